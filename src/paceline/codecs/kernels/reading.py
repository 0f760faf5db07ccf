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
def _read_positions(payload: Array, at: int, n: int, k: int, low: int, parts: Array, kept: Array) -> int:
    """Where they end; -1 where they are not k ascending positions among n. `parts` is a place to work in."""
    packed, held, first = 0, 0, 8 * at + k * low
    for j in range(k):
        while held < low:
            packed |= int(payload[at]) << held
            held += 8
            at += 1
        parts[j] = packed & ((1 << low) - 1)
        packed >>= low
        held -= low
    most = (n - 1) >> low
    if most:  # without branches: half of these bits are ones, in no order
        high, j, ones = 0, 0, 0
        for bit in range(first, first + k + most):
            one = (int(payload[bit >> 3]) >> (bit & 7)) & 1
            kept[j] = parts[j] | high << low
            ones += one
            high += 1 - one
            j = min(ones, k)
        if ones != k:
            return -1
        at = (first + k + most + 7) >> 3
    else:
        for j in range(k):
            kept[j] = parts[j]
    last, rising = -1, True
    for j in range(k):
        rising &= kept[j] > last
        last = kept[j]
    return at if rising and last < n else -1


@fuse
def read_records(
    start: int,
    stop: int,
    payload: Array,
    out: Array,
    block: int,
    counts: Array,
    lows: Array,
    offsets: Array,
    kind: int,
    weight: float,
    write: bool,
) -> bool:
    """Whether the records are sensible; where `write`, which wants that known, adds what they say to `out`."""
    parts, kept = np.zeros(block + 1, np.int32), np.empty(block + 1, np.int32)
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
        at = _read_positions(payload, at, n, k, lows[b], parts, kept)
        if at < 0:
            return False
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
