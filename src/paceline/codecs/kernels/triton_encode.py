"""The Triton kernels that encode: `measure` finds each block's scale, and whether all is finite; `write` then packs the
codes and updates the residual. triton_dense.py starts them, and says what keeps their bits the same everywhere.
"""

from __future__ import annotations

import triton.language as tl

from paceline.codecs.kernels.triton_tiles import flip, jit, tile, widths

_NOT_FINITE = tl.constexpr(0x7F7FFFFF)  # bits of magnitudes above these are those of inf and nan
_SMALLEST = tl.constexpr(2.0**-100)  # these two are dense.py's
_LARGEST = tl.constexpr(3.4e38)

# `x`, `residual` and the like point to where a program's tile begins; `first` is the element that stands there and
# `left` how many there are from it on. A tile that the tensor fills is not `masked`: masks would cost the wide loads.


@jit
def _whole(
    x: tl.tensor,
    residual: tl.tensor,
    at: tl.tensor,
    mask: tl.tensor,
    kept: tl.constexpr,
    masked: tl.constexpr,
    policy: tl.constexpr,
) -> tl.tensor:
    """x and what its residual adds. The policy says how long the cache is to hold them."""
    if masked:
        p = tl.load(x + at, mask=mask, other=0.0)
        if kept:
            p += tl.load(residual + at, mask=mask, other=0.0)
    else:
        p = tl.load(x + at, eviction_policy=policy)
        if kept:
            p += tl.load(residual + at, eviction_policy=policy)
    return p


@jit
def _magnitude(p: tl.tensor) -> tl.tensor:
    return p.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@jit
def _draw(index: tl.tensor, key: tl.tensor, other_key: tl.tensor) -> tl.tensor:
    """random.draw."""
    word = index.to(tl.uint32) ^ key.to(tl.uint32, bitcast=True)
    word = word ^ (word >> 16)
    word = (word * 0x7FEB352D) ^ other_key.to(tl.uint32, bitcast=True)
    word = word ^ (word >> 15)
    word = word * 0x846CA68B
    word = word ^ (word >> 16)
    return (word >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08


@jit
def _term(p: tl.tensor, power: tl.constexpr) -> tl.tensor:
    wide = p.to(tl.float64)
    return tl.abs(wide) if power == 1 else wide * wide


@jit
def _pair(
    x: tl.tensor,
    residual: tl.tensor,
    at: tl.tensor,
    left: tl.tensor,
    distance: tl.constexpr,
    power: tl.constexpr,
    kept: tl.constexpr,
    masked: tl.constexpr,
    policy: tl.constexpr,
) -> tl.tensor:
    """The magnitudes and the terms of an element and of the one half a block further."""
    near = _whole(x, residual, at, at < left, kept, masked, policy)
    far = _whole(x, residual, at + distance, at + distance < left, kept, masked, policy)
    return tl.maximum(_magnitude(near), _magnitude(far)), _term(near, power) + _term(far, power)


@jit
def _measure_tile(
    x: tl.tensor,
    residual: tl.tensor,
    left: tl.tensor,
    rows: tl.constexpr,
    block: tl.constexpr,
    levels: tl.constexpr,
    power: tl.constexpr,
    clip: tl.constexpr,
    kept: tl.constexpr,
    masked: tl.constexpr,
    policy: tl.constexpr,
) -> tl.tensor:
    """The bits of the largest magnitude of each block, and what its scale is made of."""
    row = tl.arange(0, rows)
    if power == 0:
        at = row[:, None] * block + tl.arange(0, block)[None, :]
        largest = tl.max(_magnitude(_whole(x, residual, at, at < left, kept, masked, policy)), axis=1)
        measure = largest.to(tl.float32, bitcast=True)
    else:
        part: tl.constexpr = block // 8
        at = row[:, None] * block + tl.arange(0, part)[None, :]
        most_0, sum_0 = _pair(x, residual, at, left, 4 * part, power, kept, masked, policy)
        most_1, sum_1 = _pair(x, residual, at + part, left, 4 * part, power, kept, masked, policy)
        most_2, sum_2 = _pair(x, residual, at + 2 * part, left, 4 * part, power, kept, masked, policy)
        most_3, sum_3 = _pair(x, residual, at + 3 * part, left, 4 * part, power, kept, masked, policy)
        largest = tl.max(tl.maximum(tl.maximum(most_0, most_2), tl.maximum(most_1, most_3)), axis=1)
        sums = (sum_0 + sum_2) + (sum_1 + sum_3)
        for level in tl.static_range(levels - 3):
            sums = tl.sum(tl.reshape(sums, (rows, 2, part >> (level + 1))), axis=1)
        count = tl.minimum(tl.maximum(left - row * block, 1), block)
        mean = tl.reshape(sums, (rows,)) / count.to(tl.float64)
        if power == 2:
            limit = tl.sqrt(mean) * tl.full((), clip, tl.float64)
            mean = tl.minimum(largest.to(tl.float32, bitcast=True).to(tl.float64), limit)
        measure = mean.to(tl.float32)
    return largest, measure


@jit
def measure(
    x: tl.tensor,
    residual: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    flag: tl.tensor,
    host_flag: tl.tensor,
    numel: tl.tensor,
    rows: tl.constexpr,
    block: tl.constexpr,
    levels: tl.constexpr,
    bits: tl.constexpr,
    power: tl.constexpr,
    clip: tl.constexpr,
    kept: tl.constexpr,
    cached: tl.constexpr,
) -> None:
    """The scales of all blocks, to `scales`, followed by their inverses, and to the head of the payload."""
    first_row = tl.program_id(0).to(tl.int64) * rows
    x += first_row * block
    residual += first_row * block
    left = numel - first_row * block
    if left < rows * block:
        largest, measure = _measure_tile(x, residual, left, rows, block, levels, power, clip, kept, True, "")
    elif left > cached:
        largest, measure = _measure_tile(
            x, residual, left, rows, block, levels, power, clip, kept, False, "evict_first"
        )
    else:
        largest, measure = _measure_tile(x, residual, left, rows, block, levels, power, clip, kept, False, "evict_last")
    row = tl.arange(0, rows)
    mask = row * block < left
    if bits == 1:
        scale = measure
    else:
        highest = tl.full((rows,), (1 << (bits - 1)) - 1, tl.float32)
        live = measure >= _SMALLEST
        limited = tl.where(live, tl.minimum(measure, _LARGEST), highest)
        scale = tl.where(live, tl.div_rn(limited, highest), 0.0)
        inverses = scales + (numel + block - 1) // block
        tl.store(inverses + first_row + row, tl.where(live, tl.div_rn(highest, limited), 0.0), mask=mask)
    tl.store(scales + first_row + row, scale, mask=mask)
    place = tl.arange(0, 4)
    octets = scale.to(tl.int32, bitcast=True)[:, None] >> (8 * place)[None, :]
    tl.store(out + first_row * 4 + (row * 4)[:, None] + place[None, :], octets.to(tl.uint8), mask=mask[:, None])
    bad = tl.max(largest, axis=0) > _NOT_FINITE
    tl.store(flag, 1, mask=bad)
    tl.store(host_flag, 1, mask=bad)


@jit
def _write_tile(
    x: tl.tensor,
    residual: tl.tensor,
    scales: tl.tensor,
    inverses: tl.tensor,
    codes: tl.tensor,
    first: tl.tensor,
    left: tl.tensor,
    key: tl.tensor,
    other_key: tl.tensor,
    column: tl.tensor,
    width: tl.tensor,
    rows: tl.constexpr,
    block: tl.constexpr,
    bits: tl.constexpr,
    kept: tl.constexpr,
    drawn: tl.constexpr,
    masked: tl.constexpr,
) -> None:
    row = tl.arange(0, rows)
    in_rows = row * block < left
    scale = tl.load(scales + row, mask=in_rows, other=0.0)[:, None]
    if bits > 1:
        inverse = tl.load(inverses + row, mask=in_rows, other=0.0)[:, None]
    wholes: tl.tuple = ()
    for plane in tl.static_range(8 // bits):  # a store in between would hold up the loads
        at = row[:, None] * block + column + plane * width
        mask = (column < width) & (at < left)
        wholes += (_whole(x, residual, at, mask, kept, masked, "evict_first"),)
    packed = tl.zeros((rows, column.shape[1]), tl.int32)
    for plane in tl.static_range(8 // bits):
        p = wholes[plane]
        at = row[:, None] * block + column + plane * width
        mask = (column < width) & (at < left)
        if bits == 1:
            code = (p < 0.0).to(tl.int32)
            said = flip(scale, code)
        else:
            steps = tl.minimum(tl.abs(p) * inverse, (1 << (bits - 1)) - 1)
            if drawn:
                down = steps.to(tl.int32).to(tl.float32)
                steps = tl.where(_draw(first + at, key, other_key) < steps - down, down + 1.0, down)
            else:
                steps = (steps + 12582912.0) - 12582912.0  # as in packing.py
            steps = flip(steps, p < 0.0)
            code = steps.to(tl.int32) & ((1 << bits) - 1)
            said = steps * scale
        packed |= code << (plane * bits)
        if kept:
            if masked:
                tl.store(residual + at, p - said, mask=mask)
            else:
                tl.store(residual + at, p - said)
    to = codes + row[:, None] * (block * bits // 8) + column
    if masked:
        tl.store(to, packed.to(tl.uint8), mask=(column < width) & in_rows[:, None])
    else:
        tl.store(to, packed.to(tl.uint8))


@jit
def write(
    x: tl.tensor,
    residual: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    flag: tl.tensor,
    numel: tl.tensor,
    key: tl.tensor,
    other_key: tl.tensor,
    rows: tl.constexpr,
    columns: tl.constexpr,
    block: tl.constexpr,
    bits: tl.constexpr,
    kept: tl.constexpr,
    drawn: tl.constexpr,
) -> None:
    """The codes of all blocks, and the residual that they leave."""
    if tl.load(flag) == 0:
        first_row, column, left, short = tile(numel, rows, columns, block, bits)
        first = first_row * block
        codes = out + 4 * ((numel + block - 1) // block) + first_row * (block * bits // 8)
        x += first
        residual += first
        scales += first_row
        inverses = scales + (numel + block - 1) // block
        if left >= rows * block:
            _write_tile(
                x, residual, scales, inverses, codes, first, left, key, other_key, column, block * bits // 8,
                rows, block, bits, kept, drawn, False,
            )  # fmt: skip
        else:
            _write_tile(
                x, residual, scales, inverses, codes, first, left, key, other_key, column,
                widths(left, short, rows, block, bits), rows, block, bits, kept, drawn, True,
            )  # fmt: skip
