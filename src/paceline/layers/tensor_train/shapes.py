"""How a matrix is cut into modes: `out = m1 · … · md` rows and `in = n1 · … · nd` columns, and a rank between cores.

Modes of about the same size make small cores. A number that has no such factors (a prime, say) is rounded up: what is
added is filled with zeros and cut off again, which costs a copy, so that exact factors are preferred where they are
nearly as good.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from paceline.core.errors import ConfigError

MAX_CORES = 6  # the cheapest order is looked for among all, which are 1631 there
_ROUNDED_UP = 1.25  # how much better modes must be for a number to be rounded up


class Shape(NamedTuple):
    """Of a tensor train for a matrix: core k has the shape (ranks[k], outs[k], ins[k], ranks[k + 1])."""

    outs: tuple[int, ...]
    ins: tuple[int, ...]
    ranks: tuple[int, ...]  # one more than cores; the first and the last are 1

    @property
    def cores(self) -> list[tuple[int, int, int, int]]:
        return list(zip(self.ranks, self.outs, self.ins, self.ranks[1:]))

    @property
    def num_elements(self) -> int:
        return sum(math.prod(core) for core in self.cores)

    @property
    def rows(self) -> int:
        return math.prod(self.outs)

    @property
    def columns(self) -> int:
        return math.prod(self.ins)


@cache
def modes(size: int, num: int) -> tuple[int, ...]:
    """`num` factors, as even as possible and in rising order, whose product is `size` or a little more.

    >>> modes(4096, 2), modes(784, 2), modes(50257, 2), modes(10, 2), modes(4096, 3)
    ((64, 64), (28, 28), (213, 236), (2, 5), (16, 16, 16))
    """
    return min(_all(size, num), key=lambda found: (_badness(found, size), found))


def _all(size: int, num: int) -> list[tuple[int, ...]]:
    if num == 1:
        return [(size,)]
    even = size ** (1 / num)
    found = set()
    for first in range(max(1, int(even / 2)), max(2, math.ceil(2 * even)) + 1):
        found.add(tuple(sorted((first, *modes(math.ceil(size / first), num - 1)))))
    return list(found)


def _badness(found: tuple[int, ...], size: int) -> float:
    product = math.prod(found)
    return sum(found) * product / size * (_ROUNDED_UP if product > size else 1.0)


def shape_of(rows: int, columns: int, rank: int | Sequence[int], num_cores: int = 2) -> Shape:
    """The shape for a matrix. Ranks above what the modes can use are lowered to that.

    >>> shape_of(4096, 4096, 8)
    Shape(outs=(64, 64), ins=(64, 64), ranks=(1, 8, 1))
    >>> shape_of(4, 4, 100).ranks
    (1, 4, 1)
    """
    if not 2 <= num_cores <= MAX_CORES:
        raise ConfigError(f"cores={num_cores}: a tensor train has 2 to {MAX_CORES} of them")
    if min(rows, columns) < 1:
        raise ConfigError(f"a matrix of {rows} x {columns} has nothing to cut into cores")
    outs, ins = modes(rows, num_cores), modes(columns, num_cores)[::-1]  # so that cores are alike in size
    return with_ranks(outs, ins, rank)


def with_ranks(outs: tuple[int, ...], ins: tuple[int, ...], rank: int | Sequence[int]) -> Shape:
    """The shape with these modes; `rank` is one number for all, or the `cores − 1` between them."""
    wanted = [rank] * (len(outs) - 1) if isinstance(rank, int) else list(rank)
    if len(wanted) != len(outs) - 1 or min(wanted) < 1:
        raise ConfigError(f"rank={rank!r}: a number of at least 1 is needed, or {len(outs) - 1} of them, between cores")
    sizes = [m * n for m, n in zip(outs, ins)]
    most = [min(math.prod(sizes[:k]), math.prod(sizes[k:])) for k in range(1, len(sizes))]
    return Shape(outs, ins, (1, *map(min, wanted, most), 1))
