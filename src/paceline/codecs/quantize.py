"""Quantize: 8, 4 or 2 bits per element, and one scale per block of elements.

    Δ = max|p| / (2^(bits−1) − 1);   code = round(p / Δ);   decoded = code · Δ

Rounded half to even, an element is at most Δ / 2 off, always to the same side: a residual makes up for it. Rounded up
or down by a draw, so that the mean is right, it is at most Δ off and takes no residual (QSGD, Alistarh and others 2017,
with the largest magnitude in the place of the norm).
"""

from __future__ import annotations

import numpy as np
import torch

from paceline.codecs.codec import Context, check_finite, largest_magnitude
from paceline.codecs.kernels import dense
from paceline.core.errors import ConfigError


class Quantize:
    """Signed codes of `bits` bits, 1, 2 or 4 to a byte.

    A block whose magnitudes are all below 2**-100 becomes zeros.

    Args:
        bits: 8 | 4 | 2. With 2 the codes are -1, 0 and 1.
        block: elements that share a scale, a power of two from 16 to 65536.
        stochastic: round by a draw that depends on the context's seed and step and on the element's index.
    """

    adds_as = None
    varies = False

    def __init__(self, bits: int = 8, block: int = 256, stochastic: bool = False) -> None:
        if bits not in (8, 4, 2):
            raise ConfigError(f"quantize(bits={bits!r}): 8, 4 or 2 bits are possible")
        if not isinstance(stochastic, bool):
            raise ConfigError(f"quantize(stochastic={stochastic!r}): True or False is needed")
        self.bits, self.block, self.stochastic = bits, dense.check_block(block, "quantize"), stochastic
        self.unbiased = stochastic

    @property
    def words(self) -> str:
        stochastic = ", stochastic=True" if self.stochastic else ""
        return f"quantize(bits={self.bits}, block={self.block}{stochastic})"

    def nbytes(self, numel: int) -> int:
        return dense.nbytes(numel, self.block, self.bits)

    def bound(self, x: torch.Tensor) -> float:
        largest = largest_magnitude(x)
        steps = (1.0 if self.stochastic else 0.5) + 2.0**-13  # of 127 steps, float32 may be that much off
        return largest / ((1 << (self.bits - 1)) - 1) * steps + dense.SMALLEST

    def encode_into(self, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor, context: Context) -> int:
        blocks = dense.Blocks(x, residual, self.block)
        largest = blocks.largest()
        check_finite(float(largest.max(initial=0.0)), self)
        scales, inverses = dense.scales_of(largest, self.bits)
        return blocks.write_codes(scales, inverses, self.bits, out, context if self.stochastic else None)

    def decode_add(self, payload: torch.Tensor, out: torch.Tensor, weight: float = 1.0) -> None:
        scales = dense.read_scales(payload, out.numel(), self.block, self.bits, self)
        dense.add_codes(payload[scales.nbytes :], scales * np.float32(weight), self.block, self.bits, out)
