"""How the members of a run stand to each other: `--mesh "replicate=2,shard=2"`.

    replicate   whole models, made to agree by the strategy
    shard       every tensor in parts, put together when it is needed

Members of a shard are neighbours by rank, since they talk most: rank = replicate · shards + shard. All train on batches
of their own.

>>> mesh = parse("shard=2", 8)
>>> mesh, mesh.alike(5), mesh.apart(5)
(Mesh(replicate=4, shard=2), [1, 3, 5, 7], [4, 5])
"""

from __future__ import annotations

import math
from typing import NamedTuple

from paceline.core.errors import ConfigError, nearest


class Mesh(NamedTuple):
    """How many there are in each dimension."""

    replicate: int = 1
    shard: int = 1

    @property
    def cuts(self) -> bool:
        """Whether a replica has more than one member."""
        return self.shard > 1

    @property
    def words(self) -> str:
        """
        >>> Mesh(replicate=2, shard=4).words
        'replicate=2,shard=4'
        """
        return ",".join(f"{name}={n}" for name, n in self._asdict().items() if n > 1)

    def alike(self, rank: int) -> list[int]:
        """The members that hold the same parts as this one."""
        return list(range(rank % self.shard, self.replicate * self.shard, self.shard))

    def apart(self, rank: int) -> list[int]:
        """The members that hold one replica with this one."""
        first = rank - rank % self.shard
        return list(range(first, first + self.shard))


def parse(text: str, size: int, against: str = "") -> Mesh:
    """The mesh of so many members; what is left of them is replicated.

    Args:
        against: what of the run does not go with replicas that are cut; "": nothing.

    >>> parse("", 2)
    Mesh(replicate=2, shard=1)
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
    mesh = Mesh(**sizes)
    if mesh.cuts and against:
        raise ConfigError(
            f"--mesh {mesh.words} does not go with {against}: all members of a replica are needed at every step"
        )
    return mesh
