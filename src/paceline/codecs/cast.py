"""Cast: every element in a shorter float type. Sums of casts are casts, so it travels a ring as it is."""

from __future__ import annotations

import math

import numpy as np
import torch

from paceline.codecs.codec import (
    Context,
    PayloadError,
    check_decode,
    check_encode,
    check_finite,
    check_length,
    largest_magnitude,
)
from paceline.codecs.kernels.spread import spread
from paceline.codecs.records import Array, array_of, fused, largest_of_sum
from paceline.core.errors import ConfigError, nearest

_TYPES = {
    "bf16": (torch.bfloat16, 2.0**-8, 3.3895313892515355e38),
    "fp16": (torch.float16, 2.0**-11, 65504.0),
    "fp8": (torch.float8_e4m3fn, 2.0**-4, 448.0),
}
_STEP = {"bf16": 2.0**-134, "fp16": 2.0**-25, "fp8": 2.0**-10}  # half of the smallest difference near zero


class Cast:
    """Two bytes (bf16, fp16) or one (fp8, with one scale for the whole tensor) per element.

    Args:
        to: "bf16" | "fp16" | "fp8".
    """

    unbiased = False
    varies = False
    rows = 1

    def __init__(self, to: str = "bf16") -> None:
        if not isinstance(to, str) or to not in _TYPES:
            raise ConfigError(f"cast(to={to!r}): {nearest(str(to), _TYPES)}")
        self.to = to
        self.dtype, self._relative, self._largest = _TYPES[to]
        self.adds_as = None if to == "fp8" else self.dtype  # sums of fp8 codes have another scale

    @property
    def words(self) -> str:
        return f"cast(to={self.to})"

    def nbytes(self, numel: int) -> int:
        return numel * self.dtype.itemsize + (0 if self.adds_as else 4)

    def head_bytes(self, numel: int) -> int:
        return 0

    def agree(self, x: torch.Tensor, residual: torch.Tensor | None) -> None:
        return None

    def bound(self, x: torch.Tensor) -> float:
        largest = largest_magnitude(x)
        if self.adds_as:
            return max(0.0, largest - self._largest) + largest * self._relative + _STEP[self.to]
        return largest * self._relative + _scale(largest, self._largest) * _STEP[self.to]

    def encode_into(self, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor, context: Context) -> int:
        check_encode(x, residual, out, self)
        largest, size = largest_of_sum(x, residual), self.nbytes(x.numel())
        check_finite(largest, self)
        scale, head = 0.0, 0
        if not self.adds_as:
            scale, head = float(np.float32(_scale(largest, self._largest))), 4
            out[:head] = torch.tensor([scale]).view(torch.uint8)
        place = out[head:size]
        # What fits no more stands at the edge, so that sums over the members fit too: an infinity would spoil them.
        most = self._largest
        if self.to == "fp16" and context.size > 1:  # where others do not fit, float32 would not either
            most = float(np.float32(most / context.size * (1 - 2 * self._relative)))
        if fused(x):
            from paceline.codecs.kernels import casting

            args = (casting.DROPPED[self.to], np.float32(scale), np.float32(most), self._codes(place))
            spread(casting.encode, x.numel(), x.numpy(), array_of(residual), *args)
            return size
        whole = x if residual is None else x + residual
        scaled = whole / whole.new_tensor([scale]) if scale else whole  # by a tensor: as a number, some devices
        codes = scaled.clamp(-most, most).to(self.dtype)  # would multiply by its inverse
        place.copy_(codes.view(torch.uint8))
        if residual is not None:
            said = codes.float()
            torch.sub(whole, said * scale if scale else said, out=residual)
        return size

    def decode_add(self, payload: torch.Tensor, out: torch.Tensor, weight: float = 1.0) -> None:
        check_decode(payload, out, self)
        check_length(payload, self.nbytes(out.numel()), self)
        factor, head = weight, 0
        if not self.adds_as:
            scale, head = float(payload[:4].clone().view(torch.float32)), 4
            if not 0 <= scale < math.inf:
                raise PayloadError(f"a payload of {self.words} has a scale that is negative or not finite")
            if bool(((payload[head:] & 0x7F) == 0x7F).any()):  # fp8 has no infinities
                raise PayloadError(f"a payload of {self.words} has codes that are no numbers")
            factor = scale * weight
        place = payload[head:]
        if fused(out):
            from paceline.codecs.kernels import casting

            args = (casting.DROPPED[self.to], np.float32(factor), out.numpy())
            spread(casting.add, out.numel(), self._codes(place), *args)
            return
        codes = torch.empty(out.numel(), dtype=self.dtype, device=out.device)
        codes.view(torch.uint8).copy_(place)  # which may stand anywhere
        out.add_(codes.float().mul_(factor))

    def _codes(self, place: torch.Tensor) -> Array:
        return place.numpy().view(np.uint8 if self.dtype.itemsize == 1 else np.uint16)


def _scale(largest: float, code: float) -> float:
    return max(largest, 2.0**-100) / code
