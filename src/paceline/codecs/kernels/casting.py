"""Fused kernels of Cast: shorter floats by integer arithmetic, since compiled loops know of no others than float32.

bf16 is the upper half of a float32, rounded half to even. For fp16 and fp8, let c be 2^drop times the power of two that
a magnitude begins with, or times the smallest normal number of the type where that is more: from c on, float32 numbers
lie as far apart as those of the type about the magnitude. So `magnitude + c` rounds to what the type can hold, and the
steps by which it exceeds c are the lower bits of the code.

Types of integers are spelled out since a mere 1 is 64 bits wide, which halves the width of every vector. Codes are
uint16 or, for fp8, uint8.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.codecs.kernels.fuse import fuse

Array = np.ndarray[Any, Any]

_BF16, _FP16, _FP8 = 16, 13, 20  # the bits of a float32's fraction that are dropped: types are known by them
DROPPED = {"bf16": _BF16, "fp16": _FP16, "fp8": _FP8}
_LANES = 1024
_MAGNITUDE = np.int32(0x7FFFFFFF)
_EXPONENT = np.int32(0x7F800000)
_SIGN = np.int32(-0x80000000)
_ONE = np.int32(1)


@fuse
def _limits(drop: int) -> tuple[Any, Any, Any, Any]:
    """The largest number; the bits of the smallest normal one; what exponents differ by; the first code beyond all."""
    if drop == _FP16:
        return np.float32(65504.0), np.int32(113 << 23), np.int32(112 << 23), np.int32(0x7C00)
    return np.float32(448.0), np.int32(121 << 23), np.int32(120 << 23), np.int32(0x7F)


@fuse
def _write_bf16(whole: Array, n: int, largest: float, codes: Array, said: Array) -> None:
    said_bits = said.view(np.int32)
    for i in range(n):
        p = np.float32(min(max(whole[i], -largest), largest))
        word = np.int32(p.view(np.int32))
        odd = np.int32(np.int32(word >> np.int32(16)) & _ONE)
        word = np.int32(np.int32(word + np.int32(0x7FFF) + odd) & np.int32(-0x10000))
        said_bits[i] = word
        codes[i] = word >> np.int32(16)


@fuse
def _write_short(whole: Array, n: int, drop: int, largest: float, codes: Array, said: Array) -> None:
    said_bits, bits = said.view(np.int32), whole.view(np.int32)
    _, smallest, _, _ = _limits(drop)
    up, shift = np.int32(drop << 23), np.int32(drop)
    lowest = np.int32(smallest + up)
    to_sign, sign = np.int32(16 if drop == _FP16 else 24), np.int32(0x8000 if drop == _FP16 else 0x80)
    for i in range(n):
        magnitude = np.float32(min(abs(whole[i]), largest))
        base = np.int32(max(np.int32(np.int32(magnitude.view(np.int32)) & _EXPONENT), smallest) + up)
        c = np.float32(base.view(np.float32))
        rounded = np.float32(magnitude + c)
        above = np.int32(np.int32(rounded.view(np.int32)) - base)
        code = np.int32(above + np.int32(np.int32(base - lowest) >> shift))
        codes[i] = code | np.int32(np.int32(bits[i] >> to_sign) & sign)
        value = np.float32(rounded - c)
        said_bits[i] = np.int32(value.view(np.int32)) | np.int32(bits[i] & _SIGN)


@fuse
def encode(
    start: int, stop: int, x: Array, residual: Array, drop: int, scale: float, largest: float, codes: Array
) -> None:
    """Codes of (x + residual) / scale, cut off at the largest; the residual becomes what they do not say.

    Only fp8 has a scale.
    """
    whole = np.empty(_LANES, np.float32)
    scaled = np.empty(_LANES, np.float32)
    said = np.empty(_LANES, np.float32)
    for base in range(start, stop, _LANES):
        n = min(_LANES, stop - base)
        fresh, packed = x[base : base + n], codes[base : base + n]
        old = residual[base : base + n]
        if residual.size:
            for i in range(n):
                whole[i] = fresh[i] + old[i]
        else:
            for i in range(n):
                whole[i] = fresh[i]
        if drop == _BF16:
            _write_bf16(whole, n, largest, packed, said)
        elif drop == _FP16:
            _write_short(whole, n, drop, largest, packed, said)
        else:
            for i in range(n):
                scaled[i] = whole[i] / scale
            _write_short(scaled, n, drop, largest, packed, said)
            for i in range(n):
                said[i] *= scale
        if residual.size:
            for i in range(n):
                old[i] = whole[i] - said[i]


@fuse
def add(start: int, stop: int, codes: Array, drop: int, factor: float, out: Array) -> None:
    """Add what the codes say, times `factor`."""
    said = np.empty(_LANES, np.float32)
    bits = said.view(np.int32)
    _, smallest, between, beyond = _limits(drop)
    shift, up = np.int32(drop), np.int32(smallest + np.int32(drop << 23))
    first = np.int32(np.int32(smallest - between) >> shift)  # of the codes that are normal numbers
    to_sign, magnitude = np.int32(16 if drop == _FP16 else 24), np.int32(0x7FFF if drop == _FP16 else 0x7F)
    c = np.float32(up.view(np.float32))
    for base in range(start, stop, _LANES):
        n = min(_LANES, stop - base)
        packed, part = codes[base : base + n], out[base : base + n]
        if drop == _BF16:
            for i in range(n):
                bits[i] = np.int32(packed[i]) << np.int32(16)
        else:
            for i in range(n):
                code = np.int32(np.int32(packed[i]) & magnitude)
                shifted = np.int32(code << shift)
                near = np.float32(np.int32(code + up).view(np.float32) - c)
                word = np.int32(near.view(np.int32)) if code < first else np.int32(shifted + between)
                word = np.int32(shifted | _EXPONENT) if code >= beyond else word  # inf or nan
                bits[i] = word | np.int32(np.int32(np.int32(packed[i]) << to_sign) & _SIGN)
        for i in range(n):
            part[i] += said[i] * factor
