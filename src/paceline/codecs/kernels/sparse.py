"""Fused kernels of the sparse codecs: choose elements, pack where they stand and what they are, keep what is unsaid.

A tensor is cut into blocks, and each block with something to say becomes one record:

    scale (float32, only for int8 values) · positions in the block, bit by bit, filled up to a byte · values

Of k ascending positions among n the log2(n / k) low bits come first, as they are. What is left of them, their high
parts, grows from 0 to at most n / 2^low: each is a one, after as many zeros as it is more than the one before. That
makes log2(n / k) + 2 bits for each position, at most, in a size that depends on n and k alone (Fano 1971, Elias 1974).
Where plain positions are as small, as for k = 1, all their bits are low ones.

Values of 2 bits have two magnitudes (bf16) in the place of the scale, the lower one first. Of the bits of a value the
first says which, the second that it is negative; four are in a byte.

Kernels work on ranges that begin at a block, so that several threads run side by side. reading.py has the kernel that
reads records, and codecs/records.py the torch forms.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from paceline.codecs.kernels.fuse import fuse

Array = np.ndarray[Any, Any]

_MAGNITUDE = 0x7FFFFFFF  # all bits of a float but its sign: as integers they are ordered as the magnitudes are
_LARGEST_FP16 = np.float32(65504.0)
_LARGEST_BF16 = np.float32(3.3895313892515355e38)
_SMALLEST_SCALED = np.float32(2.0**-100)
_LARGEST_SCALED = np.float32(3.4e38)  # 127 parts of it, added up again, stay finite
_ONE = np.float32(1.0)
_GLANCE = 16


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
def _sum_momenta(
    x: Array, residual: Array, factor: float, momentum: float, base: int, n: int, momenta: Array, whole: Array
) -> None:
    """The same where a second row of the residual has momenta: these become momentum · momenta + factor · x, and are
    what is added to the first row."""
    part, unsaid = x[base : base + n], residual[base : base + n]
    before = residual[x.size + base : x.size + base + n]
    for i in range(n):
        momenta[i] = momentum * before[i] + factor * part[i]
        whole[i] = unsaid[i] + momenta[i]


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
def largest(start: int, stop: int, x: Array, residual: Array, factor: float, momentum: float) -> int:
    """The largest magnitude of x + residual, as the bits of a float; infinities and nan are larger than all others.

    The factor and the momentum are for a residual of two rows.
    """
    lanes = 4096
    most = np.int32(0)
    for base in range(start, stop, lanes):
        n = min(lanes, stop - base)
        part, unsaid = x[base : base + n], residual[base : base + n]
        if residual.size > x.size:
            before = residual[x.size + base : x.size + base + n]
            for i in range(n):
                p = unsaid[i] + (momentum * before[i] + factor * part[i])
                most = max(most, np.int32(np.float32(p).view(np.int32) & np.int32(_MAGNITUDE)))
        elif residual.size:
            for i in range(n):
                p = part[i] + unsaid[i]
                most = max(most, np.int32(np.float32(p).view(np.int32) & np.int32(_MAGNITUDE)))
        else:
            for i in range(n):
                most = max(most, np.int32(np.float32(part[i]).view(np.int32) & np.int32(_MAGNITUDE)))
    return int(most)


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
def _positions(numbers: Array, n: int, limit: Any, kept: Array) -> int:
    """Write the ascending positions of the numbers that reach the limit to `kept`; how many there are.

    Few do as a rule: a glance at the largest of several tells whether to look at each.
    """
    count = 0
    whole = n - n % _GLANCE
    for first in range(0, whole, _GLANCE):
        row = numbers[first : first + _GLANCE]
        most = row[0]
        for j in range(_GLANCE):
            most = max(most, row[j])
        if most >= limit:
            for j in range(_GLANCE):
                kept[count] = first + j
                count += row[j] >= limit
    for i in range(whole, n):
        kept[count] = i
        count += numbers[i] >= limit
    return count


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
    count = _positions(magnitudes, n, np.int32(low), kept)
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
def _mean(whole: Array, kept: Array, k: int, cut: Any, above: bool) -> float:
    """Of the magnitudes that reach the cut, or of those that do not; 0 where there are none.

    Halves are added to halves, in float64, so that torch can add in the same order.
    """
    width = 1
    while width < k:
        width *= 2
    terms = np.zeros(width, np.float64)
    count = 0
    for j in range(k):
        magnitude = abs(whole[kept[j]])
        if (magnitude >= cut) == above:
            terms[j] = magnitude
            count += 1
    while width > 1:
        width //= 2
        for j in range(width):
            terms[j] += terms[j + width]
    return float(terms[0] / max(count, 1))


@fuse
def _write_positions(n: int, kept: Array, k: int, low: int, out: Array, at: int) -> int:
    """Where they end."""
    packed, held, mask = 0, 0, (1 << low) - 1
    for j in range(k):
        packed |= (int(kept[j]) & mask) << held
        held += low
        while held >= 8:
            out[at] = packed & 255
            packed >>= 8
            held -= 8
            at += 1
    most = (n - 1) >> low
    if most:
        last = 0
        for j in range(k + 1):  # after the last one, zeros up to the most
            high = (int(kept[j]) >> low) if j < k else most
            held += high - last
            last = high
            while held >= 8:
                out[at] = packed & 255
                packed >>= 8
                held -= 8
                at += 1
            if j < k:
                packed |= 1 << held
                held += 1
        if held == 8:
            out[at] = packed & 255
            held = 0
            at += 1
    if held:
        out[at] = packed & 255
        at += 1
    return at


@fuse
def _write_record(
    whole: Array, n: int, kept: Array, k: int, low: int, kind: int, out: Array, at: int, said: Array
) -> None:
    """Write one record at `out[at:]`, and to `said` what a reader will take each value for."""
    bits, said_bits = whole.view(np.int32), said.view(np.uint32)
    scale = _ONE
    if kind == 4:
        middle = np.float32(_mean(whole, kept, k, np.float32(0.0), True))
        said[0] = np.float32(_mean(whole, kept, k, middle, False))
        lower = int(said_bits[0]) >> 16  # cut off: no more than was meant
        said[0] = np.float32(_mean(whole, kept, k, middle, True))
        upper = int(said_bits[0]) >> 16
        for word in (lower, upper):
            out[at] = word & 255
            out[at + 1] = word >> 8
            at += 2
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
    at = _write_positions(n, kept, k, low, out, at)
    if kind == 4:
        for j in range(k):
            negative, is_upper = int(bits[kept[j]] < 0), int(abs(whole[kept[j]]) >= middle)
            said_bits[j] = (upper if is_upper else lower) << 16 | negative << 31
            if j & 3 == 0:
                out[at + (j >> 2)] = 0
            out[at + (j >> 2)] |= (is_upper | negative << 1) << (2 * (j & 3))
        return
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
    factor: float,
    momentum: float,
    out: Array,
    block: int,
    counts: Array,
    lows: Array,
    offsets: Array,
    kind: int,
) -> None:
    """Write the records of the `counts[b]` largest magnitudes of each block b.

    Where the residual has a second row, of momenta, these are zero where an element is sent.
    """
    whole = np.empty(block, np.float32)
    bits = whole.view(np.int32)
    momenta = np.empty(block, np.float32)
    magnitudes = np.empty(block, np.int32)
    maxima = np.empty(block, np.int32)
    candidates = np.empty(block, np.int32)
    kept = np.empty(block + 1, np.int32)
    said = np.empty(block, np.float32)
    for base in range(start, stop, block):
        n = min(block, stop - base)
        b = base // block
        k = counts[b]
        if residual.size > x.size:
            _sum_momenta(x, residual, factor, momentum, base, n, momenta, whole)
        else:
            _sum(x, residual, base, n, whole)
        _magnitudes(bits, n, magnitudes)
        _top(magnitudes, n, k, maxima, kept, candidates)
        _write_record(whole, n, kept, k, lows[b], kind, out, offsets[b], said)
        _leave(whole, base, n, kept, k, said, residual)
        if residual.size > x.size:
            for j in range(k):
                momenta[kept[j]] = 0.0
            row = residual[x.size + base : x.size + base + n]
            for i in range(n):
                row[i] = momenta[i]


@fuse
def _count_block(x: Array, residual: Array, base: int, n: int, cut: int) -> tuple[int, int]:
    """How many magnitudes of a block reach the cut, and the largest. In one loop, so that nothing is written."""
    part = x[base : base + n]
    limit = np.int32(cut)
    most, count = np.int32(0), np.int32(0)
    if residual.size:
        unsaid = residual[base : base + n]
        for i in range(n):
            magnitude = np.int32(np.float32(part[i] + unsaid[i]).view(np.int32) & np.int32(_MAGNITUDE))
            most = max(most, magnitude)
            count += np.int32(magnitude >= limit)
    else:
        for i in range(n):
            magnitude = np.int32(np.float32(part[i]).view(np.int32) & np.int32(_MAGNITUDE))
            most = max(most, magnitude)
            count += np.int32(magnitude >= limit)
    return int(count), int(most)


@fuse
def count_above(start: int, stop: int, x: Array, residual: Array, cut: int, block: int, counts: Array) -> int:
    """How many magnitudes of each block reach `cut` (bits of a float); the largest magnitude. A cut of 0: all bits but
    those of +0.0."""
    whole = np.empty(block, np.float32)
    bits = whole.view(np.int32)
    largest_yet = 0
    for base in range(start, stop, block):
        n = min(block, stop - base)
        count, most = _count_block(x, residual, base, n, max(cut, 1))
        largest_yet = max(largest_yet, most)
        if not cut:
            _sum(x, residual, base, n, whole)
            count = 0
            for i in range(n):
                count += bits[i] != 0
        counts[base // block] = count
    return largest_yet


@fuse
def encode_above(
    start: int,
    stop: int,
    x: Array,
    residual: Array,
    out: Array,
    block: int,
    counts: Array,
    lows: Array,
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
            _positions(magnitudes, n, limit, kept)
            _write_record(whole, n, kept, k, lows[b], kind, out, offsets[b], said)
        _leave(whole, base, n, kept, k, said, residual)
