"""Fused kernels of the dense codecs: measure blocks, pack their codes, add them up. dense.py has the layout.

Importing this compiles nothing yet, but imports numba, which takes long and may be missing: dense.py does so where the
first kernel is wanted.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.codecs.kernels.fuse import fuse
from paceline.codecs.kernels.random import draw

# Kernels take a range that begins at a block, then `x, residual, kept`: with `kept` False the residual is not read.
# Slices are taken before the inner loops, whose indices then cannot be negative: without that no loop becomes one of
# vectors. Types are spelled out since a mere 1 is 64 bits wide, which halves the width of every vector.


@fuse
def find_largest(start: int, stop: int, x: Any, residual: Any, kept: bool, block: int, largest: Any) -> None:
    """Writes the bits of the magnitudes, as int32."""
    for number in range(start // block, (stop + block - 1) // block):
        first = number * block
        fresh, old = x[first : min(first + block, stop)], residual[first : min(first + block, stop)]
        most = np.int32(0)
        for i in range(fresh.size):
            p = fresh[i] + old[i] if kept else fresh[i]
            most = max(most, np.int32(np.float32(p).view(np.int32) & np.int32(0x7FFFFFFF)))
        largest[number] = most


@fuse
def find_sums(
    start: int, stop: int, x: Any, residual: Any, kept: bool, block: int, squared: bool, largest: Any, sums: Any
) -> None:
    half = block // 2
    magnitudes = np.empty(block, np.float32)
    terms = np.empty(half, np.float64)
    for number in range(start // block, (stop + block - 1) // block):
        first = number * block
        fresh, old = x[first : min(first + block, stop)], residual[first : min(first + block, stop)]
        magnitudes[fresh.size :] = 0.0
        most = np.int32(0)
        for i in range(fresh.size):
            p = fresh[i] + old[i] if kept else fresh[i]
            most = max(most, np.int32(np.float32(p).view(np.int32) & np.int32(0x7FFFFFFF)))
            magnitudes[i] = abs(p)
        near, far = magnitudes[:half], magnitudes[half:]
        for i in range(half):
            lower, upper = np.float64(near[i]), np.float64(far[i])
            terms[i] = lower * lower + upper * upper if squared else lower + upper
        width = half
        while width > 1:
            width //= 2
            head, tail = terms[:width], terms[width : 2 * width]
            for i in range(width):
                head[i] += tail[i]
        largest[number] = most
        sums[number] = terms[0]


@fuse
def write_signs(start: int, stop: int, x: Any, residual: Any, kept: bool, block: int, scales: Any, codes: Any) -> None:
    for number in range(start // block, (stop + block - 1) // block):
        first = number * block
        last = min(first + block, stop)
        width = (last - first + 7) // 8
        packed = codes[first // 8 : first // 8 + width]
        packed[:] = 0
        scale = scales[number]
        for plane in range(8):
            begin = first + plane * width
            fresh, old = x[begin : min(begin + width, last)], residual[begin : min(begin + width, last)]
            for j in range(fresh.size):
                p = fresh[j] + old[j] if kept else fresh[j]
                packed[j] |= np.uint8(np.uint8(p < np.float32(0.0)) << np.uint8(plane))
                if kept:
                    old[j] = p - (-scale if p < np.float32(0.0) else scale)


@fuse
def write_codes(
    start: int,
    stop: int,
    x: Any,
    residual: Any,
    kept: bool,
    block: int,
    bits: int,
    highest: Any,
    drawn: bool,
    key: Any,
    other_key: Any,
    scales: Any,
    inverses: Any,
    codes: Any,
) -> None:
    per = 8 // bits
    mask = np.int32((1 << bits) - 1)
    rounding = np.float32(12582912.0)  # 1.5 · 2**23: adding it leaves no bits below one, rounded half to even
    for number in range(start // block, (stop + block - 1) // block):
        first = number * block
        last = min(first + block, stop)
        width = (last - first + per - 1) // per
        packed = codes[first // per : first // per + width]
        packed[:] = 0
        scale = scales[number]
        inverse = inverses[number]
        for plane in range(per):
            begin = first + plane * width
            shift = np.int32(plane * bits)
            fresh, old = x[begin : min(begin + width, last)], residual[begin : min(begin + width, last)]
            for j in range(fresh.size):
                p = fresh[j] + old[j] if kept else fresh[j]
                steps = abs(p) * inverse
                steps = steps if steps < highest else highest
                if drawn:
                    down = np.float32(np.int32(steps))
                    up = draw(begin + j, key, other_key) < steps - down
                    steps = down + np.float32(1.0) if up else down
                else:
                    steps = (steps + rounding) - rounding
                steps = -steps if p < np.float32(0.0) else steps
                packed[j] |= np.uint8((np.int32(steps) & mask) << shift)
                if kept:
                    old[j] = p - steps * scale


@fuse
def add_signs(start: int, stop: int, codes: Any, factors: Any, block: int, out: Any) -> None:
    for number in range(start // block, (stop + block - 1) // block):
        first = number * block
        last = min(first + block, stop)
        width = (last - first + 7) // 8
        packed = codes[first // 8 : first // 8 + width]
        factor = factors[number]
        for plane in range(8):
            begin = first + plane * width
            bit = np.uint8(1 << plane)
            plane_of_out = out[begin : min(begin + width, last)]
            for j in range(plane_of_out.size):
                plane_of_out[j] += -factor if packed[j] & bit else factor


@fuse
def add_codes(start: int, stop: int, codes: Any, factors: Any, block: int, bits: int, out: Any) -> None:
    per = 8 // bits
    mask = np.int32((1 << bits) - 1)
    half = np.int32(1 << (bits - 1))
    for number in range(start // block, (stop + block - 1) // block):
        first = number * block
        last = min(first + block, stop)
        width = (last - first + per - 1) // per
        packed = codes[first // per : first // per + width]
        factor = factors[number]
        for plane in range(per):
            begin = first + plane * width
            shift = np.int32(plane * bits)
            plane_of_out = out[begin : min(begin + width, last)]
            for j in range(plane_of_out.size):
                field = np.int32((np.int32(packed[j]) >> shift) & mask)
                plane_of_out[j] += np.float32(np.int32((field ^ half) - half)) * factor
