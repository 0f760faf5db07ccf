"""Fused kernels of the sparse codecs: choose elements, pack where they stand and what they are, keep what is unsaid.

A tensor is cut into blocks, and each block with something to say becomes one record:

    scale (float32, only for int8 values) · positions in the block, bit by bit, filled up to a byte · values

Kernels work on ranges that begin at a block, so that several threads run side by side. A payload is never trusted:
`read_records` first runs without writing. The torch forms are in codecs/records.py.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from paceline.codecs.kernels.fuse import fuse

Array = np.ndarray[Any, Any]

_MAGNITUDE = 0x7FFFFFFF  # all bits of a float but its sign: as integers they are ordered as the magnitudes are
_LARGEST = np.float32(3.4028234663852886e38)
_LARGEST_FP16 = np.float32(65504.0)
_LARGEST_BF16 = np.float32(3.3895313892515355e38)
_SMALLEST_SCALED = np.float32(2.0**-100)
_LARGEST_SCALED = np.float32(3.4e38)  # 127 parts of it, added up again, stay finite
_ONE = np.float32(1.0)


@fuse
def _sum(x: Array, residual: Array, base: int, n: int, whole: Array) -> None:
    """`whole` = x + residual of one block."""
    part = x[base : base + n]
    if residual.size:
        unsaid = residual[base : base + n]
        for i in range(n):
            whole[i] = part[i] + unsaid[i]
    else:
        for i in range(n):
            whole[i] = part[i]


@fuse
def _magnitudes(bits: Array, n: int, magnitudes: Array) -> None:
    for i in range(n):
        magnitudes[i] = bits[i] & _MAGNITUDE


@fuse
def _raise_maxima(magnitudes: Array, first: int, n: int, maxima: Array) -> None:
    row = magnitudes[first : first + n]
    for j in range(n):
        maxima[j] = max(maxima[j], row[j])


@fuse
def largest(start: int, stop: int, x: Array, residual: Array) -> int:
    """The largest magnitude of x + residual, as the bits of a float; infinities and nan are larger than all others."""
    lanes = 1024
    whole = np.empty(lanes, np.float32)
    bits = whole.view(np.int32)
    magnitudes = np.empty(lanes, np.int32)
    maxima = np.zeros(lanes, np.int32)
    for base in range(start, stop, lanes):
        n = min(lanes, stop - base)
        _sum(x, residual, base, n, whole)
        _magnitudes(bits, n, magnitudes)
        _raise_maxima(magnitudes, 0, n, maxima)
    return int(maxima.max())


@fuse
def _count(numbers: Array, n: int, cut: int) -> int:
    limit = np.int32(cut)
    count = 0
    for i in range(n):
        count += numbers[i] >= limit
    return count


@fuse
def _cut(numbers: Array, n: int, k: int, most: int, low: int, high: int) -> int:
    """A cut that k to `most` of the numbers reach; the k-th largest number where equal ones allow no such cut.

    At least k numbers reach `low`, fewer than k reach `high`.
    """
    while high - low > 1:
        middle = (low + high) >> 1
        count = _count(numbers, n, middle)
        if count < k:
            high = middle
        elif count <= most:
            return middle
        else:
            low = middle
    return low


@fuse
def _top(magnitudes: Array, n: int, k: int, maxima: Array, kept: Array, candidates: Array) -> None:
    """Write the ascending positions of the k largest magnitudes to `kept`; of equal ones the first.

    Where k of many groups have a maximum that reaches a cut, at least k elements do, and not many more: few candidates
    are left for the exact choice.
    """
    groups = 64
    while groups < 3 * k:
        groups *= 2
    low, high = 0, _MAGNITUDE + 1
    if 2 * groups <= n:
        maxima[:groups] = 0
        for first in range(0, n, groups):
            _raise_maxima(magnitudes, first, min(groups, n - first), maxima)
        low = _cut(maxima, groups, k, k + (k >> 3), 0, high)
    limit = np.int32(low)
    count = 0
    for i in range(n):
        kept[count] = i
        count += magnitudes[i] >= limit
    if count == k:
        return
    for j in range(count):
        candidates[j] = magnitudes[kept[j]]
    low = _cut(candidates, count, k, k, low, high)
    spare = k - _count(candidates, count, low + 1)  # places for those that equal the cut
    chosen = 0
    for j in range(count):
        if candidates[j] > low or (candidates[j] == low and spare > 0):
            spare -= candidates[j] == low
            kept[chosen] = kept[j]
            chosen += 1


@fuse
def _width(n: int) -> int:
    """How many bits tell n positions apart."""
    width = 0
    while (1 << width) < n:
        width += 1
    return width


@fuse
def _write_record(whole: Array, n: int, kept: Array, k: int, kind: int, out: Array, at: int, said: Array) -> None:
    """Write one record at `out[at:]`, and to `said` what a reader will take each value for."""
    bits, said_bits = whole.view(np.int32), said.view(np.uint32)
    scale = _ONE
    if kind == 3:
        most = _SMALLEST_SCALED
        for j in range(k):
            most = max(most, abs(whole[kept[j]]))
        said[0] = min(most, _LARGEST_SCALED) / np.float32(127.0)
        scale = said[0]
        word = int(said_bits[0])
        for _ in range(4):
            out[at] = word & 255
            word >>= 8
            at += 1
    width = _width(n)
    packed, held = 0, 0
    for j in range(k):
        packed |= int(kept[j]) << held
        held += width
        while held >= 8:
            out[at] = packed & 255
            packed >>= 8
            held -= 8
            at += 1
    if held:
        out[at] = packed & 255
        at += 1
    for j in range(k):
        value = whole[kept[j]]
        word = int(bits[kept[j]]) & 0xFFFFFFFF
        if kind == 0:
            said[j] = value
            size = 4
        elif kind == 1:  # bf16: the upper half, rounded to even
            if abs(value) > _LARGEST_BF16:
                word = (word & 0x80000000) | 0x7F7F0000
            word = (word + 0x7FFF + ((word >> 16) & 1)) >> 16
            said_bits[j] = word << 16
            size = 2
        elif kind == 2:  # fp16
            sign = (word >> 16) & 0x8000
            word &= _MAGNITUDE
            if abs(value) >= _LARGEST_FP16:
                word = 0x7BFF
            elif word >= 0x38800000:  # 2^-14: below it, all codes are multiples of 2^-24
                word = (word - 0x38000000 + 0xFFF + ((word >> 13) & 1)) >> 13
            else:
                word = int(np.rint(abs(value) * np.float32(16777216.0)))
            word |= sign
            said[j] = _from_fp16(word)
            size = 2
        else:
            code = np.rint(value / scale)
            code = min(max(code, np.float32(-127.0)), np.float32(127.0))
            word = int(code) & 255
            said[j] = code * scale
            size = 1
        for _ in range(size):
            out[at] = word & 255
            word >>= 8
            at += 1


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
def _leave(whole: Array, base: int, n: int, kept: Array, k: int, said: Array, residual: Array) -> None:
    """The residual of one block becomes what its record does not say."""
    if residual.size:
        unsaid = residual[base : base + n]
        for i in range(n):
            unsaid[i] = whole[i]
        for j in range(k):
            unsaid[kept[j]] = whole[kept[j]] - said[j]


@fuse
def encode_top(
    start: int,
    stop: int,
    x: Array,
    residual: Array,
    out: Array,
    block: int,
    counts: Array,
    offsets: Array,
    kind: int,
) -> None:
    """Write the records of the `counts[b]` largest magnitudes of each block b."""
    whole = np.empty(block, np.float32)
    bits = whole.view(np.int32)
    magnitudes = np.empty(block, np.int32)
    maxima = np.empty(block, np.int32)
    candidates = np.empty(block, np.int32)
    kept = np.empty(block + 1, np.int32)
    said = np.empty(block, np.float32)
    for base in range(start, stop, block):
        n = min(block, stop - base)
        b = base // block
        k = counts[b]
        _sum(x, residual, base, n, whole)
        _magnitudes(bits, n, magnitudes)
        _top(magnitudes, n, k, maxima, kept, candidates)
        _write_record(whole, n, kept, k, kind, out, offsets[b], said)
        _leave(whole, base, n, kept, k, said, residual)


@fuse
def count_above(start: int, stop: int, x: Array, residual: Array, cut: int, block: int, counts: Array) -> int:
    """How many magnitudes of each block reach `cut` (bits of a float); the largest magnitude. A cut of 0: all bits but
    those of +0.0."""
    whole = np.empty(block, np.float32)
    bits = whole.view(np.int32)
    magnitudes = np.empty(block, np.int32)
    maxima = np.zeros(block, np.int32)
    for base in range(start, stop, block):
        n = min(block, stop - base)
        _sum(x, residual, base, n, whole)
        _magnitudes(bits, n, magnitudes)
        _raise_maxima(magnitudes, 0, n, maxima)
        if cut:
            counts[base // block] = _count(magnitudes, n, cut)
        else:
            count = 0
            for i in range(n):
                count += bits[i] != 0
            counts[base // block] = count
    return int(maxima.max())


@fuse
def encode_above(
    start: int,
    stop: int,
    x: Array,
    residual: Array,
    out: Array,
    block: int,
    counts: Array,
    offsets: Array,
    kind: int,
    cut: int,
) -> None:
    """Write the records of the first `counts[b]` elements of each block b that `count_above` counts."""
    whole = np.empty(block, np.float32)
    bits = whole.view(np.int32)
    magnitudes = np.empty(block, np.int32)
    kept = np.empty(block + 1, np.int32)
    said = np.empty(block, np.float32)
    limit = np.int32(max(cut, 1))
    for base in range(start, stop, block):
        n = min(block, stop - base)
        b = base // block
        k = counts[b]
        _sum(x, residual, base, n, whole)
        if k:
            if cut:
                _magnitudes(bits, n, magnitudes)
            else:
                for i in range(n):
                    magnitudes[i] = bits[i] != 0
            count = 0
            for i in range(n):
                kept[count] = i
                count += magnitudes[i] >= limit
            _write_record(whole, n, kept, k, kind, out, offsets[b], said)
        _leave(whole, base, n, kept, k, said, residual)


@fuse
def read_records(
    start: int,
    stop: int,
    payload: Array,
    out: Array,
    block: int,
    counts: Array,
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
        scale = _ONE
        if kind == 3:
            bits[0] = _word(payload, at, 4)
            scale = values[0]
            at += 4
        width = _width(n)
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


@fuse
def _word(payload: Array, at: int, size: int) -> int:
    word = 0
    for i in range(size):
        word |= int(payload[at + i]) << (8 * i)
    return word
