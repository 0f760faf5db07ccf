"""Cast: every element in a shorter float type. Sums of casts are casts, so it travels a ring as it is."""

from __future__ import annotations

import torch

from paceline.codecs.codec import Context, check_finite, check_length, largest_magnitude
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

    def __init__(self, to: str = "bf16") -> None:
        if to not in _TYPES:
            raise ConfigError(f"cast(to={to!r}): {nearest(to, _TYPES)}")
        self.to = to
        self.dtype, self._relative, self._largest = _TYPES[to]
        self.adds_as = None if to == "fp8" else self.dtype  # sums of fp8 codes have another scale

    @property
    def words(self) -> str:
        return f"cast(to={self.to})"

    def nbytes(self, numel: int) -> int:
        return numel * self.dtype.itemsize + (0 if self.adds_as else 4)

    def bound(self, x: torch.Tensor) -> float:
        largest = largest_magnitude(x)
        if self.adds_as:
            return max(0.0, largest - self._largest) + largest * self._relative + _STEP[self.to]
        return largest * self._relative + _scale(largest, self._largest) * _STEP[self.to]

    def encode_into(self, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor, context: Context) -> int:
        whole = x if residual is None else x + residual
        largest = largest_magnitude(whole)
        check_finite(largest, self)
        size = self.nbytes(x.numel())
        if self.adds_as:
            # What fits no more stands at the edge: an infinity would spoil every sum, a residual catches up.
            codes = whole.clamp(-self._largest, self._largest).to(self.dtype)
            out[:size].view(self.dtype).copy_(codes)
            said = codes.float()
        else:
            scale = _scale(largest, self._largest)
            codes = (whole / scale).clamp(-self._largest, self._largest).to(self.dtype)
            out[:4].view(torch.float32).fill_(scale)
            out[4:size].copy_(codes.view(torch.uint8))
            said = codes.float() * scale
        if residual is not None:
            torch.sub(whole, said, out=residual)
        return size

    def decode_add(self, payload: torch.Tensor, out: torch.Tensor, weight: float = 1.0) -> None:
        check_length(payload, self.nbytes(out.numel()), self)
        if self.adds_as:
            out.add_(payload.view(self.dtype).float(), alpha=weight)
            return
        scale = float(payload[:4].clone().view(torch.float32))
        out.add_(payload[4:].view(self.dtype).float(), alpha=scale * weight)


def _scale(largest: float, code: float) -> float:
    return max(largest, 2.0**-100) / code
