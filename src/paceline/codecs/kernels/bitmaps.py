"""Fused kernels of NonZero's bitmap: one bit for each element says whether it travels, and the values follow."""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.codecs.kernels.fuse import fuse

Array = np.ndarray[Any, Any]


@fuse
def encode_bitmap(
    start: int, stop: int, x: Array, residual: Array, bitmap: Array, values: Array, block: int, offsets: Array
) -> None:
    """One bit for each element that is not +0.0, and the bytes of these, from place `offsets[b]` on for block b."""
    whole = np.empty(block, np.float32)
    bits = whole.view(np.int32)
    there = np.empty(block + 7, np.uint8)
    packed = np.empty(block + 1, np.int32)
    packed_bytes = packed.view(np.uint8)
    for base in range(start, stop, block):
        n = min(block, stop - base)
        part = x[base : base + n]
        if residual.size:
            unsaid = residual[base : base + n]
            for i in range(n):
                whole[i] = part[i] + unsaid[i]
        else:
            whole[:n] = part
        count = 0
        for i in range(n):
            packed[count] = bits[i]
            there[i] = bits[i] != 0
            count += bits[i] != 0
        at = 4 * offsets[base // block]
        values[at : at + 4 * count] = packed_bytes[: 4 * count]
        there[n : n + 7] = 0
        for first in range(0, n, 8):
            byte = 0
            for i in range(8):
                byte |= int(there[first + i]) << i
            bitmap[(base + first) >> 3] = byte


@fuse
def count_bitmap(start: int, stop: int, bitmap: Array, block: int, counts: Array) -> None:
    """How many bits are set for each block."""
    for base in range(start, stop, block):
        count = 0
        for at in range(base >> 3, (min(base + block, stop) + 7) >> 3):
            byte = int(bitmap[at])
            while byte:
                byte &= byte - 1
                count += 1
        counts[base // block] = count


@fuse
def add_bitmap(
    start: int, stop: int, bitmap: Array, values: Array, out: Array, block: int, offsets: Array, weight: float
) -> None:
    """Add the values, one or more and known to be as many as the bits, to the elements whose bits are set."""
    for base in range(start, stop, block):
        at = offsets[base // block]
        for i in range(base, min(base + block, stop)):
            # Half of all bits may be set: a choice of two sums is cheaper than a branch that is often guessed wrongly.
            there = int(bitmap[i >> 3]) >> (i & 7) & 1
            added = out[i] + values[min(at, values.size - 1)] * weight
            out[i] = added if there else out[i]
            at += there
