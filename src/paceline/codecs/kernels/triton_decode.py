"""The Triton kernels that decode: `check` looks at all scales of a payload, `add` then adds what its codes say.
triton_dense.py starts them.
"""

from __future__ import annotations

import triton.language as tl

from paceline.codecs.kernels.triton_tiles import flip, jit, tile, widths


@jit
def _scale(payload: tl.tensor, number: tl.tensor, mask: tl.tensor, aligned: tl.constexpr) -> tl.tensor:
    if aligned:
        return tl.load(payload.to(tl.pointer_type(tl.float32)) + number, mask=mask, other=0.0)
    word = tl.load(payload + number * 4, mask=mask, other=0).to(tl.int32)
    for place in tl.static_range(1, 4):
        word |= tl.load(payload + number * 4 + place, mask=mask, other=0).to(tl.int32) << (8 * place)
    return word.to(tl.float32, bitcast=True)


@jit
def check(
    payload: tl.tensor,
    flag: tl.tensor,
    host_flag: tl.tensor,
    numel: tl.tensor,
    size: tl.constexpr,
    block: tl.constexpr,
    aligned: tl.constexpr,
) -> None:
    number = tl.program_id(0).to(tl.int64) * size + tl.arange(0, size)
    scale = _scale(payload, number, number < (numel + block - 1) // block, aligned)
    good = (scale >= 0.0) & (scale < float("inf"))
    bad = tl.min(good.to(tl.int32), axis=0) == 0
    tl.store(flag, 1, mask=bad)
    tl.store(host_flag, 1, mask=bad)


@jit
def _add_tile(
    codes: tl.tensor,
    factor: tl.tensor,
    out: tl.tensor,
    left: tl.tensor,
    column: tl.tensor,
    width: tl.tensor,
    rows: tl.constexpr,
    block: tl.constexpr,
    bits: tl.constexpr,
    masked: tl.constexpr,
) -> None:
    row = tl.arange(0, rows)[:, None]
    place = codes + row * (block * bits // 8) + column
    if masked:
        packed = tl.load(place, mask=(column < width) & (row * block < left), other=0).to(tl.int32)
    else:
        packed = tl.load(place).to(tl.int32)
    before: tl.tuple = ()
    for plane in tl.static_range(8 // bits):
        at = row * block + column + plane * width
        if masked:
            before += (tl.load(out + at, mask=(column < width) & (at < left), other=0.0),)
        else:
            before += (tl.load(out + at),)
    for plane in tl.static_range(8 // bits):
        field = (packed >> (plane * bits)) & ((1 << bits) - 1)
        if bits == 1:
            said = flip(factor, field)
        else:
            said = ((field ^ (1 << (bits - 1))) - (1 << (bits - 1))).to(tl.float32) * factor
        at = row * block + column + plane * width
        if masked:
            tl.store(out + at, before[plane] + said, mask=(column < width) & (at < left))
        else:
            tl.store(out + at, before[plane] + said)


@jit
def add(
    payload: tl.tensor,
    out: tl.tensor,
    flag: tl.tensor,
    numel: tl.tensor,
    weight: tl.tensor,
    rows: tl.constexpr,
    columns: tl.constexpr,
    block: tl.constexpr,
    bits: tl.constexpr,
    aligned: tl.constexpr,
) -> None:
    if tl.load(flag) == 0:
        first_row, column, left, short = tile(numel, rows, columns, block, bits)
        codes = payload + 4 * ((numel + block - 1) // block) + first_row * (block * bits // 8)
        out += first_row * block
        row = tl.arange(0, rows)
        factor = (_scale(payload, first_row + row, row * block < left, aligned) * weight)[:, None]
        if left >= rows * block:
            _add_tile(codes, factor, out, left, column, block * bits // 8, rows, block, bits, False)
        else:
            width = widths(left, short, rows, block, bits)
            _add_tile(codes, factor, out, left, column, width, rows, block, bits, True)
