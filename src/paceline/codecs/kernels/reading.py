"""Fused kernel that reads the records of the sparse codecs, whose layout is in sparse.py.

A payload is never trusted: `read_records` first runs without writing.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from paceline.codecs.kernels.fuse import fuse

Array = np.ndarray[Any, Any]

_LARGEST = np.float32(3.4028234663852886e38)
_ONE = np.float32(1.0)


@fuse
def _word(payload: Array, at: int, size: int) -> int:
    word = 0
    for i in range(size):
        word |= int(payload[at + i]) << (8 * i)
    return word


@fuse
def _from_fp16(word: int) -> float:
    exponent, fraction = (word >> 10) & 31, word & 1023
    if exponent == 31:
        return np.float32(np.inf)  # type: ignore[return-value]
    if exponent == 0:
        value = np.float32(math.ldexp(float(fraction), -24))
    else:
        value = np.float32(math.ldexp(float(fraction + 1024), exponent - 25))
    return -value if word & 0x8000 else value  # type: ignore[return-value]


@fuse
def read_records(
    start: int,
    stop: int,
    payload: Array,
    out: Array,
    block: int,
    counts: Array,
    widths: Array,
    offsets: Array,
    kind: int,
    weight: float,
    write: bool,
) -> bool:
    """Whether the records are sensible; where `write`, which wants that known, adds what they say to `out`."""
    kept = np.empty(block, np.int32)
    values = np.empty(block, np.float32)
    bits = values.view(np.uint32)
    for base in range(start, stop, block):
        n = min(block, stop - base)
        b = base // block
        k = counts[b]
        if k == 0:
            continue
        at = offsets[b]
        scale, lower, upper = _ONE, 0, 0
        if kind == 3:
            bits[0] = _word(payload, at, 4)
            scale = values[0]
            at += 4
        elif kind == 4:
            lower, upper = _word(payload, at, 2) << 16, _word(payload, at + 2, 2) << 16
            at += 4
        width = widths[b]
        packed, held, last = 0, 0, -1
        for j in range(k):
            while held < width:
                packed |= int(payload[at]) << held
                held += 8
                at += 1
            position = packed & ((1 << width) - 1)
            packed >>= width
            held -= width
            if position <= last or position >= n:
                return False
            kept[j] = position
            last = position
        part = out[base : base + n]
        for j in range(k):
            if kind == 0:
                bits[j] = _word(payload, at, 4)
                at += 4
            elif kind == 1:
                bits[j] = _word(payload, at, 2) << 16
                at += 2
            elif kind == 2:
                values[j] = _from_fp16(_word(payload, at, 2))
                at += 2
            elif kind == 4:
                code = int(payload[at + (j >> 2)]) >> (2 * (j & 3))
                bits[j] = (upper if code & 1 else lower) ^ (code & 2) << 30
            else:
                code = int(payload[at])
                values[j] = np.float32(code - 256 if code > 127 else code) * scale
                at += 1
        for j in range(k):
            if write:
                part[kept[j]] += values[j] * weight
            elif not abs(values[j]) <= _LARGEST:
                return False
    return True
