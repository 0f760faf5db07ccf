"""How the members of a run stand to each other: `--mesh "replicate=2,stage=2,shard=2"`.

    replicate   whole models, made to agree by the strategy
    stage       layers, one part of them after the other; batches pass through in pieces
    shard       every tensor in parts, put together when it is needed
    split       products in parts, each computed where it lies

The later dimensions are the closer neighbours by rank, since they talk most. Members of different replicates and shards
train on batches of their own; stages and splits of one work on the same.

>>> mesh = parse("shard=2,stage=2", 8)
>>> mesh.along(5, "replicate"), mesh.along(5, "shard"), mesh.along(5, "stage"), mesh.share(5)
([1, 5], [4, 5], [5, 7], (3, 4))
"""

from __future__ import annotations

import math
from typing import NamedTuple

from paceline.core.errors import ConfigError, nearest


class Mesh(NamedTuple):
    """How many there are in each dimension."""

    replicate: int = 1
    stage: int = 1
    shard: int = 1
    split: int = 1

    @property
    def cuts(self) -> bool:
        """Whether a replica has more than one member."""
        return self.stage * self.shard * self.split > 1

    @property
    def words(self) -> str:
        """
        >>> Mesh(replicate=2, shard=4).words
        'replicate=2,shard=4'
        """
        return ",".join(f"{name}={n}" for name, n in self._asdict().items() if n > 1)

    def at(self, rank: int) -> dict[str, int]:
        """Where a member stands in each dimension.

        >>> Mesh(replicate=2, shard=2).at(3)
        {'replicate': 1, 'stage': 0, 'shard': 1, 'split': 0}
        """
        found: dict[str, int] = {}
        for name, n in reversed(self._asdict().items()):
            rank, found[name] = divmod(rank, n)
        return {name: found[name] for name in self._fields}

    def along(self, rank: int, *dimensions: str) -> list[int]:
        """The members that differ from this one in no other dimensions, in their order."""
        mine = self.at(rank)
        keep = [name for name in self._fields if name not in dimensions]
        return [r for r in range(math.prod(self)) if all(self.at(r)[name] == mine[name] for name in keep)]

    def share(self, rank: int) -> tuple[int, int]:
        """Which share of the data a member trains on, of how many."""
        mine = self.at(rank)
        return mine["replicate"] * self.shard + mine["shard"], self.replicate * self.shard


def parse(text: str, size: int, against: str = "") -> Mesh:
    """The mesh of so many members; what is left of them is replicated.

    Args:
        against: what of the run does not go with replicas that are cut; "": nothing.

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
    >>> parse("shard=0", 4)
    Traceback (most recent call last):
      ...
    paceline.core.errors.ConfigError: mesh 'shard=0': shard=0 has no members; write shard=1, or leave it out
    """
    sizes: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, number = (word.strip() for word in part.partition("="))
        if name not in Mesh._fields:
            raise ConfigError(f"mesh {text!r}: unknown dimension {name!r}: {nearest(name, Mesh._fields)}")
        if number.isdecimal() and not int(number):
            raise ConfigError(f"mesh {text!r}: {name}=0 has no members; write {name}=1, or leave it out")
        if not number.isdecimal() or name in sizes:
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
    mesh = Mesh(**sizes)
    if mesh.stage > 1 and mesh.split > 1:
        raise ConfigError(
            f"mesh {text!r}: stages hold layers as they are, and splits change them; use one of both, with shard where "
            "that is too little"
        )
    if mesh.cuts and against:
        raise ConfigError(
            f"--mesh {mesh.words} does not go with {against}: all members of a replica are needed at every step"
        )
    return mesh
