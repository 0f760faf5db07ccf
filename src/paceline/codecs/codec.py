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
        begins with zeros. `out` has room for `nbytes` at least, whatever is written.

        Raises:
            ConfigError: the values or the residual are not flat, contiguous float32, or `out` not flat, contiguous
                uint8 of that length; or they are on several devices.
            PacelineError: a value is not finite.
        """

    def decode_add(self, payload: torch.Tensor, out: torch.Tensor, weight: float = 1.0) -> None:
        """Add what a payload (uint8) says, times `weight`, to `out`. `out` is unchanged where it raises.

        Raises:
            ConfigError: `out` is not flat, contiguous float32, or the payload not uint8 on the same device.
            PayloadError: it says nothing sensible for a tensor of this size.
        """


def warm_up(codec: Codec, device: torch.device) -> None:
    """Encode and decode a little, so that the first gradients do not wait until kernels are loaded or compiled."""
    full = torch.arange(1.0, 65.0, device=device)
    for x in full, full * (full % 2 == 0), full * (full == 1):  # nonzero has a way for each
        residual = torch.zeros(codec.rows * len(x), device=device)
        out = torch.empty(codec.nbytes(len(x)), dtype=torch.uint8, device=device)
        n = codec.encode_into(x, residual, out, Context(agreed=codec.agree(x, residual)))
        codec.decode_add(out[:n], torch.zeros_like(x))


def check_tensor(x: torch.Tensor, residual: torch.Tensor | None, codec: Codec) -> None:
    """Refuse what no codec encodes; kernels do not look at types, nor where a tensor ends."""
    if not _flat(x, torch.float32, x.device):
        raise ConfigError(
            f"{codec.words}: {_told(x)}; codecs encode flat, contiguous float32 tensors. Convert it with "
            "x.detach().float().flatten(), or send it as it is"
        )
    numel = x.numel()
    if residual is not None and not (
        residual.numel() == codec.rows * numel and _flat(residual, torch.float32, x.device)
    ):
        raise ConfigError(
            f"{codec.words}: {_told(residual)} as the residual of {numel} values; a flat, contiguous one of "
            f"{codec.rows * numel} float32 zeros on {x.device} belongs there at first"
        )


def check_encode(x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor, codec: Codec) -> None:
    """The same, and memory that cannot be written to or is too short."""
    check_tensor(x, residual, codec)
    numel = x.numel()
    if not _flat(out, torch.uint8, x.device) or out.numel() < codec.nbytes(numel):
        raise ConfigError(
            f"{codec.words}: {_told(out)} as the room for the bytes of {numel} values; make it "
            f"torch.empty({codec.nbytes(numel)}, dtype=torch.uint8) on {x.device}, or longer"
        )


def check_decode(payload: torch.Tensor, out: torch.Tensor, codec: Codec) -> None:
    """Refuse memory that a payload cannot be added to, and what is no payload at all; its bytes are checked later."""
    if not _flat(out, torch.float32, out.device):
        raise ConfigError(
            f"{codec.words}: {_told(out)} to add to; codecs add to flat, contiguous float32 tensors. Add to a "
            "torch.zeros(numel) and copy that"
        )
    if not _flat(payload, torch.uint8, out.device):
        raise ConfigError(
            f"{codec.words}: {_told(payload)} as a payload; it is the flat, contiguous uint8 tensor that was encoded, "
            f"on {out.device} as what it is added to"
        )


def _flat(tensor: torch.Tensor, dtype: torch.dtype, device: torch.device) -> bool:
    return (
        tensor.dtype == dtype
        and tensor.dim() == 1
        and tensor.is_contiguous()
        and tensor.device == device
        and not tensor.requires_grad
    )


def _told(tensor: torch.Tensor) -> str:
    strided = "" if tensor.is_contiguous() else ", not contiguous"
    graph = ", which requires grad" if tensor.requires_grad else ""
    return f"a tensor of {tensor.dtype} and shape {tuple(tensor.shape)} on {tensor.device}{strided}{graph}"


def check_length(payload: torch.Tensor, expected: int, codec: Codec) -> None:
    """Refuse a payload that does not have the bytes that it must have."""
    if payload.numel() != expected:
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
