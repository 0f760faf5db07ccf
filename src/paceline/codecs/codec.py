"""What a codec is: a flat tensor becomes fewer bytes, and others add what these bytes say to a tensor of theirs.

    encode_into   x (plus what earlier steps left unsaid, the residual) → bytes; the residual becomes what is unsaid now
    decode_add    bytes → out += weight · decoded

A codec holds no state of its own but its settings: residuals stand outside, keyed by parameter, and are updated in
place. Everything is flat, contiguous float32 on one device; the reducer sees to that. `encode_into` writes the same
bytes whether it runs in a fused kernel or in plain torch.

Payloads of some codecs add up (`adds_as`): a head that is the same on all members, then numbers. Where that head needs
the members to agree first, `agree` says on what, and `Context.agreed` brings back what they agreed on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from paceline.core.errors import ConfigError, PacelineError


class PayloadError(PacelineError):
    """A payload was cut short, altered, or made by another codec."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """What an encoder may know of its step."""

    step: int = 0
    lr: float = 0.0  # of the optimizer; 0: not known
    size: int = 1  # members that are summed
    seed: int = 0  # unlike on every member and for every tensor, the same again after a resume
    agreed: torch.Tensor | None = None  # the elementwise maximum, over all members, of what `agree` gave


class Codec(Protocol):
    """The contract of all codecs."""

    @property
    def words(self) -> str:
        """How a user writes it, such as "topk(density=0.01)": members with other words do not understand each other."""

    @property
    def unbiased(self) -> bool:
        """Whether the mean of what is decoded is what was encoded: such a codec takes no residual by default."""

    @property
    def adds_as(self) -> torch.dtype | None:
        """The type of the numbers that a payload is, where the sum of payloads says the sum; None where it does not."""

    @property
    def varies(self) -> bool:
        """Whether the number of bytes depends on more than the number of elements."""

    @property
    def rows(self) -> int:
        """How many numbers per element are kept from step to step: the residual's, and perhaps others behind it."""

    def nbytes(self, numel: int) -> int:
        """The bytes that so many elements become; the most, where that varies."""

    def head_bytes(self, numel: int) -> int:
        """Where payloads add: how many bytes at their beginning are the same on all members. What is behind adds."""

    def agree(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor | None:
        """What members must agree on before they encode, by its elementwise maximum; None: on nothing.

        It has inf or nan in it where `x + residual` has: that is not refused here, since others wait for an answer.
        """

    def bound(self, x: torch.Tensor) -> float:
        """The most by which any decoded element may differ from this tensor's, without a residual."""

    def encode_into(self, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor, context: Context) -> int:
        """Write the bytes of `x + residual` to the beginning of `out` (uint8); how many. Updates the residual.

        The residual has `rows` times as many elements as x: first what is unsaid, then what else the codec keeps. It
        begins with zeros.

        Raises:
            ConfigError: the values are not flat, contiguous float32.
            PacelineError: a value is not finite.
        """

    def decode_add(self, payload: torch.Tensor, out: torch.Tensor, weight: float = 1.0) -> None:
        """Add what a payload (uint8) says, times `weight`, to `out`. `out` is unchanged where it raises.

        Raises:
            PayloadError: it says nothing sensible for a tensor of this size.
        """


def check_tensor(x: torch.Tensor, residual: torch.Tensor | None, codec: Codec) -> None:
    """Refuse what no codec encodes; kernels do not look at types, nor where a tensor ends."""
    if x.dtype != torch.float32 or x.dim() != 1 or not x.is_contiguous():
        raise ConfigError(
            f"{codec.words}: a tensor of {x.dtype} and shape {tuple(x.shape)}; codecs encode flat, contiguous float32 "
            "tensors. Convert it with x.float().flatten(), or send it as it is"
        )
    if residual is not None and (residual.dtype != torch.float32 or residual.numel() != codec.rows * x.numel()):
        raise ConfigError(
            f"{codec.words}: a residual of {residual.numel()} elements of {residual.dtype} beside {x.numel()} values; "
            f"{codec.rows * x.numel()} of float32 belong there"
        )


def check_length(payload: torch.Tensor, expected: int, codec: Codec) -> None:
    """Refuse a payload that does not have the bytes that it must have."""
    if payload.dtype != torch.uint8 or payload.numel() != expected:
        raise PayloadError(f"a payload of {codec.words} has {payload.numel()} bytes where {expected} belong")


def largest_magnitude(x: torch.Tensor) -> float:
    """Of a tensor; nan where there is one."""
    if not x.numel():
        return 0.0
    low, high = torch.aminmax(x)
    return max(-float(low), float(high)) if low == low else float("nan")


def check_finite(largest: float, codec: Codec) -> None:
    """Refuse to encode what cannot be added up; `largest` is the largest magnitude, nan and inf included."""
    if not largest <= 3.4028234663852886e38:
        raise PacelineError(
            f"{codec.words}: a value is not finite. Look at the batch and the loss, lower the learning rate, or clip"
        )
