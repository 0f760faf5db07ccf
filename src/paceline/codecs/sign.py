"""Sign: one bit per element and one scale per block, the mean magnitude (EF-signSGD, Karimireddy and others 2019).

    p = x + e;   Δ = (‖p‖₁ / d) · sign p, with d the elements of a block;   e = p − Δ

Without a residual it is a poor codec: small elements are blown up to the mean, and nothing takes that back.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from paceline.codecs.codec import Context, check_decode, check_encode, check_finite, largest_magnitude
from paceline.codecs.kernels import dense


class Sign:
    """About 1 bit per element: 31 times fewer bytes with the default block. Zero counts as positive.

    Args:
        block: elements that share a scale, a power of two from 16 to 65536.
    """

    unbiased = False
    adds_as = None
    varies = False
    rows = 1

    def __init__(self, block: int = 1024) -> None:
        self.block = dense.check_block(block, "sign")

    @property
    def words(self) -> str:
        return f"sign(block={self.block})"

    def nbytes(self, numel: int) -> int:
        return dense.nbytes(numel, self.block, 1)

    def head_bytes(self, numel: int) -> int:
        return 0

    def agree(self, x: torch.Tensor, residual: torch.Tensor | None) -> None:
        return None

    def bound(self, x: torch.Tensor) -> float:
        return largest_magnitude(x)  # magnitude and mean are both between 0 and the largest

    @functools.cached_property
    def _plan(self) -> dense.Plan:
        return dense.Plan(codec=self, block=self.block, bits=1)

    def encode_into(self, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor, context: Context) -> int:
        check_encode(x, residual, out, self)
        if dense.on_cuda(x):
            return self._plan.encode(x, residual, out, context)
        blocks = dense.Blocks(x, residual, self.block)
        largest, mean = blocks.largest_and_mean(power=1)
        check_finite(float(largest.max(initial=0.0)), self)
        return blocks.write_signs(mean.astype(np.float32), out)

    def decode_add(self, payload: torch.Tensor, out: torch.Tensor, weight: float = 1.0) -> None:
        check_decode(payload, out, self)
        if dense.on_cuda(out):
            self._plan.decode_add(payload, out, weight)
            return
        scales = dense.read_scales(payload, out.numel(), self.block, 1, self)
        dense.add_signs(payload[scales.nbytes :], scales * np.float32(weight), self.block, out)
