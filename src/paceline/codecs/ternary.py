"""Ternary: every element becomes -s, 0 or s, by a draw (TernGrad, Wen and others 2017).

    s = min(max|p|, clip · σ);   decoded = s · sgn(p) · b,   P(b = 1) = min(|p| / s, 1)

with σ the root mean square of a block. Without clipping one large element makes nearly all others zeros or, rarely, as
large as itself; with it, what stands above clip · σ is cut off.

A clipped tensor is biased, and `unbiased` says so: False with any clip, True with none. So a clipped one takes a
residual by default, which returns what was cut off, but also the noise of every draw: on normally distributed values
the residual settles at 0.7, 0.8, 1.4 and 11 times their size with a clip of 1, 1.5, 2 and 2.5. Feedback wants a clip of
2 or less, so 2 is the default; the published 2.5 was trained without.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from paceline.codecs.codec import Context, check_decode, check_encode, check_finite, largest_magnitude
from paceline.codecs.kernels import dense
from paceline.core.errors import ConfigError
from paceline.core.words import finite


class Ternary:
    """Two bits per element, four to a byte, and one scale per block.

    A block whose scale is below 2**-100 becomes zeros.

    Args:
        clip: in units of a block's root mean square; 0: nothing is clipped.
        block: elements that share a scale, a power of two from 16 to 65536.
    """

    adds_as = None
    varies = False
    rows = 1

    def __init__(self, clip: float = 2.0, block: int = 1024) -> None:
        if not finite(clip) or clip < 0:
            raise ConfigError(f"ternary(clip={clip!r}): a number above 0 is needed, such as 2, or 0 to clip nothing")
        self.clip, self.block = float(clip), dense.check_block(block, "ternary")

    @property
    def unbiased(self) -> bool:
        return self.clip == 0

    @property
    def words(self) -> str:
        return f"ternary(clip={self.clip}, block={self.block})"

    def nbytes(self, numel: int) -> int:
        return dense.nbytes(numel, self.block, 2)

    def head_bytes(self, numel: int) -> int:
        return 0

    def agree(self, x: torch.Tensor, residual: torch.Tensor | None) -> None:
        return None

    def bound(self, x: torch.Tensor) -> float:
        largest = largest_magnitude(x)
        return largest + dense.SMALLEST

    @functools.cached_property
    def _plan(self) -> dense.Plan:
        return dense.Plan(codec=self, block=self.block, bits=2, clip=self.clip, drawn=True)

    def encode_into(self, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor, context: Context) -> int:
        check_encode(x, residual, out, self)
        if dense.on_cuda(x):
            return self._plan.encode(x, residual, out, context)
        blocks = dense.Blocks(x, residual, self.block)
        if self.clip:
            largest, mean_square = blocks.largest_and_mean(power=2)
        else:
            largest, mean_square = blocks.largest(), None
        check_finite(float(largest.max(initial=0.0)), self)
        if mean_square is not None:
            largest = np.minimum(largest, self.clip * np.sqrt(mean_square)).astype(np.float32)
        return blocks.write_codes(largest, 2, out, context)

    def decode_add(self, payload: torch.Tensor, out: torch.Tensor, weight: float = 1.0) -> None:
        check_decode(payload, out, self)
        if dense.on_cuda(out):
            self._plan.decode_add(payload, out, weight)
            return
        scales = dense.read_scales(payload, out.numel(), self.block, 2, self)
        dense.add_codes(payload[scales.nbytes :], scales * np.float32(weight), self.block, 2, out)
