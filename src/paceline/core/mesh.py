"""How the members of a run stand to each other: `--mesh "replicate=2,shard=2"`.

    replicate   whole models, made to agree by the strategy
    stage       layers, one behind the other
    shard       every tensor in parts, put together when it is needed; members of it train on batches of their own
    split       the products within layers in parts

Neighbours in the last one are neighbours by rank, since they talk most: rank = ((replicate · stages + stage) · shards +
shard) · splits + split.

>>> mesh = parse("shard=2", 8)
>>> mesh
Mesh(replicate=4, stage=1, shard=2, split=1)
>>> mesh.at(5), mesh.alike(5), mesh.apart(5)
(Mesh(replicate=2, stage=0, shard=1, split=0), [1, 3, 5, 7], [4, 5])
"""

from __future__ import annotations

import math
from typing import NamedTuple

from paceline.core.errors import ConfigError, nearest


class Mesh(NamedTuple):
    """Sizes; or where a member stands, counted from 0."""

    replicate: int = 1
    stage: int = 1
    shard: int = 1
    split: int = 1

    @property
    def size(self) -> int:
        return math.prod(self)

    @property
    def cuts(self) -> bool:
        """Whether a replica has more than one member."""
        return self.size > self.replicate

    @property
    def words(self) -> str:
        """
        >>> Mesh(replicate=2, shard=4).words
        'replicate=2,shard=4'
        """
        return ",".join(f"{name}={n}" for name, n in self._asdict().items() if n > 1)

    def at(self, rank: int) -> Mesh:
        """Where a member stands."""
        rank, split = divmod(rank, self.split)
        rank, shard = divmod(rank, self.shard)
        replicate, stage = divmod(rank, self.stage)
        return Mesh(replicate, stage, shard, split)

    def alike(self, rank: int) -> list[int]:
        """The members that hold the same part as this one."""
        return [r for r in range(self.size) if self.at(r)[1:] == self.at(rank)[1:]]

    def apart(self, rank: int) -> list[int]:
        """The members that hold one replica with this one."""
        return [r for r in range(self.size) if self.at(r).replicate == self.at(rank).replicate]

    def reader(self, rank: int) -> tuple[int, int]:
        """Which share of the data a member is to see, and of how many: those of one shard see the same."""
        at = self.at(rank)
        return at.replicate * self.shard + at.shard, self.replicate * self.shard


def parse(text: str, size: int) -> Mesh:
    """The mesh of so many members; what is left of them is replicated.

    >>> parse("", 2)
    Mesh(replicate=2, stage=1, shard=1, split=1)
    >>> parse("shard=3", 4)
    Traceback (most recent call last):
      ...
    paceline.core.errors.ConfigError: mesh 'shard=3' needs a multiple of 3 members, and there are 4: start 3 or 6
    >>> parse("shards=2", 4)
    Traceback (most recent call last):
      ...
    paceline.core.errors.ConfigError: mesh 'shards=2': unknown dimension 'shards': did you mean 'shard'?
    """
    sizes: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, number = (word.strip() for word in part.partition("="))
        if name not in Mesh._fields:
            raise ConfigError(f"mesh {text!r}: unknown dimension {name!r}: {nearest(name, Mesh._fields)}")
        if not number.isdecimal() or int(number) < 1 or name in sizes:
            raise ConfigError(f"mesh {text!r}: write each dimension once with a number, as in 'replicate=2,shard=4'")
        sizes[name] = int(number)
    needed = math.prod(sizes.values())
    if "replicate" in sizes and needed != size:
        raise ConfigError(
            f"mesh {text!r} has {needed} members, and there are {size}: start {needed}, or leave replicate out"
        )
    if size % needed:
        below = size // needed * needed
        which = f"{below} or {below + needed}" if below else f"{needed}"
        raise ConfigError(f"mesh {text!r} needs a multiple of {needed} members, and there are {size}: start {which}")
    sizes.setdefault("replicate", size // needed)
    return Mesh(**sizes)
