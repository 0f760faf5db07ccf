"""Codes that add: each block has one scale for all members, so that the sum of their codes says the sum.

    Δ = a / L,   a = the largest magnitude that any member has in the block,   L = 127 // members
    code = round(p / Δ), from −L to L;   Σ code fits a byte;   decoded = Σ code · Δ

So one byte per element travels a ring, where a gather would bring every member the bytes of all others. The price are
levels: 63 with 2 members, 15 with 8, 1 with 64 to 127. (An idea of THC, Li and others 2024, who add a rotation.)

The payload is that of 8 bits in kernels/dense.py: the scales, which are the same on all members, then the codes.
"""

from __future__ import annotations

import numpy as np
import torch

from paceline.codecs.codec import Context
from paceline.codecs.kernels import dense
from paceline.codecs.kernels.random import draws, keys
from paceline.codecs.kernels.spread import compiled, spread

MOST_MEMBERS = 127


def write(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    block: int,
    largest: dense.Singles,
    levels: int,
    out: torch.Tensor,
    context: Context | None,
) -> int:
    """The payload of codes up to `levels` for these largest magnitudes of all members; drawn, where there is a context.

    An element that is larger than the largest, which then is not of this tensor, gets the highest code.
    """
    scales, inverses = _scales_of(largest, levels)
    size, stream = dense.nbytes(x.numel(), block, 8), keys(context.seed, context.step) if context else (0, 0)
    assert len(largest) == dense.num_blocks(x.numel(), block)
    assert out.dtype == torch.uint8
    assert out.numel() >= size, "kernels do not look where a tensor ends"
    codes = out[scales.nbytes : size]
    if compiled() and x.device.type == "cpu":
        from paceline.codecs.kernels import shared_scale

        out.numpy()[: scales.nbytes] = scales.view(np.uint8)
        unsaid = np.empty(0, np.float32) if residual is None else residual.numpy()
        drawn = (context is not None, np.uint32(stream[0]), np.uint32(stream[1]))
        args = (block, np.float32(levels), *drawn, scales, inverses, codes.numpy().view(np.int8))
        spread(shared_scale.write_codes, x.numel(), x.numpy(), unsaid, *args, unit=block)
        return size
    out[: scales.nbytes] = torch.from_numpy(scales.view(np.uint8)).to(out.device)
    whole = x if residual is None else x + residual
    inverse, scale = (_of_elements(values, whole, block) for values in (inverses, scales))
    steps = whole.abs() * inverse
    steps = torch.where(steps < levels, steps, float(levels))
    if context:
        down = steps.trunc()
        steps = down + (draws(stream, x.numel(), x.device) < steps - down)
    else:
        steps.round_()
    steps = torch.where(whole < 0, -steps, steps)
    codes.copy_(steps.to(torch.int8).view(torch.uint8))
    if residual is not None:
        torch.sub(whole, steps * scale, out=residual)
    return size


def _scales_of(largest: dense.Singles, levels: int) -> tuple[dense.Singles, dense.Singles]:
    """The scales by which each largest magnitude has the highest code, and their inverses; zeros where it is tiny."""
    highest = np.float32(levels)
    live = largest >= np.float32(dense.SMALLEST)
    limited: dense.Singles = np.where(live, np.minimum(largest, np.float32(dense.LARGEST)), highest)
    scales: dense.Singles = limited / highest * live
    inverses: dense.Singles = highest / limited * live
    return scales, inverses


def _of_elements(values: dense.Singles, whole: torch.Tensor, block: int) -> torch.Tensor:
    return torch.from_numpy(values).to(whole.device).repeat_interleave(block)[: whole.numel()]
