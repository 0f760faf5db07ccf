"""Quantize: 8, 4 or 2 bits per element, and one scale per block of elements.

    Δ = max|p| / (2^(bits−1) − 1);   code = round(p / Δ);   decoded = code · Δ

Rounded half to even, an element is at most Δ / 2 off, always to the same side: a residual makes up for it. Rounded up
or down by a draw, so that the mean is right, it is at most Δ off and takes no residual (QSGD, Alistarh and others 2017,
with the largest magnitude in the place of the norm).

With a scale for each block that all members share, codes of 8 bits add up (an idea of THC, Li and others 2024, who add
a rotation):

    Δ = a / L,   a = the largest magnitude that any member has in the block,   L = 127 // members
    code = round(p / Δ), from −L to L;   Σ code fits a byte;   decoded = Σ code · Δ

So one byte per element travels a ring, where a gather would bring every member the bytes of all others. The price are
levels: 63 with 2 members, 15 with 8, 1 with 64 to 127.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from paceline.codecs.codec import Context, check_decode, check_encode, check_finite, check_tensor, largest_magnitude
from paceline.codecs.kernels import dense
from paceline.core.errors import ConfigError

_MOST_MEMBERS = 127  # whose codes add up in a byte, of one level to either side


class Quantize:
    """Signed codes of `bits` bits, 1, 2 or 4 to a byte.

    A block whose magnitudes are all below 2**-100 becomes zeros.

    Args:
        bits: 8 | 4 | 2. With 2 the codes are -1, 0 and 1.
        block: elements that share a scale, a power of two from 16 to 65536. None: 256, or 1024 where it is shared.
        stochastic: round by a draw that depends on the context's seed and step and on the element's index.
        shared: all members have the same scales, and their codes add up. Only with 8 bits, and up to 127 members,
            each of which has 127 // members levels to either side.
    """

    varies = False
    rows = 1

    def __init__(self, bits: int = 8, block: int | None = None, stochastic: bool = False, shared: bool = False) -> None:
        if bits not in (8, 4, 2) or not isinstance(bits, int):
            raise ConfigError(f"quantize(bits={bits!r}): 8, 4 or 2 bits are possible")
        if not isinstance(stochastic, bool):
            raise ConfigError(f"quantize(stochastic={stochastic!r}): True or False is needed")
        if not isinstance(shared, bool):
            raise ConfigError(f"quantize(shared={shared!r}): True or False is needed")
        if shared and bits != 8:
            raise ConfigError(f"quantize(bits={bits!r}, shared=True): codes that add need 8 bits")
        if block is None:
            block = 1024 if shared else 256
        self.bits, self.block, self.stochastic = bits, dense.check_block(block, "quantize"), stochastic
        self.shared, self.unbiased = shared, stochastic
        self.adds_as = torch.int8 if shared else None

    @property
    def words(self) -> str:
        stochastic = ", stochastic=True" if self.stochastic else ""
        shared = ", shared=True" if self.shared else ""
        return f"quantize(bits={self.bits}, block={self.block}{stochastic}{shared})"

    def nbytes(self, numel: int) -> int:
        return dense.nbytes(numel, self.block, self.bits)

    def head_bytes(self, numel: int) -> int:
        return 4 * dense.num_blocks(numel, self.block)

    def agree(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor | None:
        if not self.shared:
            return None
        check_tensor(x, residual, self)
        largest = dense.Blocks(x, residual, self.block).largest()
        largest[np.isnan(largest)] = np.inf  # which is the maximum of itself and anything, however that is found
        return torch.from_numpy(largest).to(x.device)

    def bound(self, x: torch.Tensor) -> float:
        """For shared scales: whatever the number of members, where none has larger magnitudes than these."""
        largest = largest_magnitude(x)
        steps = (1.0 if self.stochastic else 0.5) + 2.0**-13  # of 127 steps, float32 may be that much off
        levels = 1 if self.shared else dense.levels_of(self.bits)
        return largest / levels * steps + dense.SMALLEST

    @functools.cached_property
    def _plan(self) -> dense.Plan:
        return dense.Plan(codec=self, block=self.block, bits=self.bits, drawn=self.stochastic)

    def encode_into(self, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor, context: Context) -> int:
        check_encode(x, residual, out, self)
        drawn = context if self.stochastic else None
        if dense.on_cuda(x) and not self.shared:
            return self._plan.encode(x, residual, out, context)
        blocks = dense.Blocks(x, residual, self.block)
        if self.shared:
            if context.size > _MOST_MEMBERS:
                raise ConfigError(
                    f"{self.words}: the codes of {context.size} members do not add up in a byte. It takes at most "
                    f"{_MOST_MEMBERS}: leave out shared=True"
                )
            agreed, num_blocks = context.agreed, dense.num_blocks(x.numel(), self.block)
            if agreed is not None and (agreed.dtype != torch.float32 or agreed.shape != (num_blocks,)):
                raise ConfigError(
                    f"{self.words}: members agreed on {tuple(agreed.shape)} numbers of {agreed.dtype} for "
                    f"{num_blocks} blocks; give the maximum of what `agree` gave them, a flat float32 tensor"
                )
            # What was agreed on, where it is finite, is believed to be so for this x and residual.
            largest = blocks.largest() if agreed is None else agreed.cpu().contiguous().numpy()
            check_finite(float(largest.max(initial=0.0)), self)
            return blocks.write_codes(largest, self.bits, out, drawn, levels=_MOST_MEMBERS // context.size)
        largest = blocks.largest()
        check_finite(float(largest.max(initial=0.0)), self)
        return blocks.write_codes(largest, self.bits, out, drawn)

    def decode_add(self, payload: torch.Tensor, out: torch.Tensor, weight: float = 1.0) -> None:
        check_decode(payload, out, self)
        if dense.on_cuda(out):
            self._plan.decode_add(payload, out, weight)
            return
        scales = dense.read_scales(payload, out.numel(), self.block, self.bits, self)
        dense.add_codes(payload[scales.nbytes :], scales * np.float32(weight), self.block, self.bits, out)
