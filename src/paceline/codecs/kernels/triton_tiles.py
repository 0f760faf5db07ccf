"""What Triton kernels that encode and that decode share: how they are compiled, and which tile each program has.

A tile is some rows, which are blocks, and some columns, which are the elements or the bytes of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl


def jit(kernel: Callable[..., Any]) -> Any:
    """Sizes and keys change from call to call: kernels are not compiled anew for those that 16 divides."""
    names = kernel.__code__.co_varnames[: kernel.__code__.co_argcount]
    return triton.jit(do_not_specialize=[name for name in names if name in ("numel", "key", "other_key")])(kernel)


@jit
def flip(value: tl.tensor, negative: tl.tensor) -> tl.tensor:
    """The value with the other sign, where `negative` is 1."""
    return (value.to(tl.int32, bitcast=True) ^ (negative.to(tl.int32) << 31)).to(tl.float32, bitcast=True)


@jit
def tile(
    numel: tl.tensor, rows: tl.constexpr, columns: tl.constexpr, block: tl.constexpr, bits: tl.constexpr
) -> tl.tensor:
    """Of this program: its first row, its columns, how many elements it has, and the bytes of the last block."""
    width: tl.constexpr = block * bits // 8
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    first_row = (number // (width // columns)).to(tl.int64) * rows
    column = (number % (width // columns)) * columns + tl.arange(0, columns)[None, :]
    left = tl.minimum(numel - first_row * block, rows * block).to(tl.int32)
    return first_row, column, left, ((numel % block) * bits + 7) // 8


@jit
def widths(left: tl.tensor, short: tl.tensor, rows: tl.constexpr, block: tl.constexpr, bits: tl.constexpr) -> tl.tensor:
    """The bytes of each block of a tile, of which one may be short."""
    return tl.where((tl.arange(0, rows) + 1) * block <= left, block * bits // 8, short)[:, None]
