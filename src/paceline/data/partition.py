"""Partition strategies: which member visits which samples of an epoch.

The sampler makes the order of the epoch (natural, or shuffled from seed and epoch), takes away what was
consumed before a resume, and asks the partition to `share` the rest among the members. The contract:
the shares are disjoint and together are exactly the rest (for `Columns`: every share is the rest, and the
columns are what is cut), and they follow from the arguments alone, so that all members agree without talking.

`share` of a whole epoch binds a sample to the same member in every epoch, except for `Shuffled`. The rest of
an epoch that is resumed on another number of members is divided anew by the same rule.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from paceline.core.errors import ConfigError


class Partition(Protocol):
    """Divides samples among members."""

    whole: ClassVar[bool]  # True: every member visits every sample

    def check(self, length: int, size: int) -> None:
        """Raise a ConfigError where `length` samples cannot be divided among `size` members."""

    def share(self, rest: Tensor, length: int, size: int, batch_size: int) -> list[Tensor]:
        """Divide `rest` (indices into a dataset of `length`, in visiting order): one tensor per member."""


@dataclass(frozen=True)
class Shuffled:
    """Each global batch is the next batch_size * size samples of one global order; the default.

    Where the order is shuffled, a member sees other samples in every epoch. The last, shorter global
    batch is divided evenly.

    >>> [s.tolist() for s in Shuffled().share(torch.arange(7), 7, size=2, batch_size=2)]
    [[0, 1, 4, 5], [2, 3, 6]]
    """

    whole: ClassVar[bool] = False

    def check(self, length: int, size: int) -> None:
        pass

    def share(self, rest: Tensor, length: int, size: int, batch_size: int) -> list[Tensor]:
        if size == 1:
            return [rest]
        full = len(rest) // (size * batch_size)
        head = rest[: full * size * batch_size].view(full, size, batch_size)
        tail = rest[full * size * batch_size :].tensor_split(size)
        return [torch.cat([head[:, rank].reshape(-1), tail[rank]]) for rank in range(size)]


@dataclass(frozen=True)
class Strided:
    """Sample i goes to member i % size.

    >>> [s.tolist() for s in Strided().share(torch.arange(5), 5, size=2, batch_size=2)]
    [[0, 2, 4], [1, 3]]
    """

    whole: ClassVar[bool] = False

    def check(self, length: int, size: int) -> None:
        pass

    def share(self, rest: Tensor, length: int, size: int, batch_size: int) -> list[Tensor]:
        return _by_owner(rest, _places(rest) % size, size)


@dataclass(frozen=True)
class Contiguous:
    """Each member has one run of neighbouring samples, all runs of equal length within one.

    >>> [s.tolist() for s in Contiguous().share(torch.tensor([4, 2, 0, 3, 1]), 5, size=2, batch_size=2)]
    [[2, 0, 1], [4, 3]]
    """

    whole: ClassVar[bool] = False

    def check(self, length: int, size: int) -> None:
        pass

    def share(self, rest: Tensor, length: int, size: int, batch_size: int) -> list[Tensor]:
        return _by_owner(rest, _places(rest) * size // max(1, len(rest)), size)


@dataclass(frozen=True)
class ByKey:
    """All samples of one key go to one member: `keys` is a list of keys or a function of the sample's index.

    Keys are dealt largest first, each to the member that has least, so shares are as even as keys allow.

    >>> [s.tolist() for s in ByKey("aabbbc").share(torch.arange(6), 6, size=2, batch_size=2)]
    [[2, 3, 4], [0, 1, 5]]
    """

    keys: Sequence[Hashable] | Callable[[int], Hashable]
    whole: ClassVar[bool] = False
    _codes: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def codes(self, length: int) -> Tensor:
        """The key of every sample as a number, in order of first appearance."""
        if length not in self._codes:
            if callable(self.keys):
                keys: Sequence[Hashable] = [self.keys(index) for index in range(length)]
            else:
                keys = self.keys
                if isinstance(keys, Tensor):
                    keys = keys.tolist()
            if len(keys) != length:
                raise ConfigError(f"ByKey has {len(keys)} keys for {length} samples: give one key per sample")
            numbers: dict[Hashable, int] = {}
            codes = [numbers.setdefault(key, len(numbers)) for key in keys]
            self._codes[length] = torch.tensor(codes, dtype=torch.int64)
        return self._codes[length]

    def check(self, length: int, size: int) -> None:
        found = int(self.codes(length).max()) + 1
        if found < size:
            raise ConfigError(
                f"ByKey: {found} different keys cannot be divided among {size} members, since all samples of "
                f"a key stay together: start at most {found} members, or use finer keys"
            )

    def share(self, rest: Tensor, length: int, size: int, batch_size: int) -> list[Tensor]:
        return _by_owner(rest, _dealt(self.codes(length)[rest], size), size)


@dataclass(frozen=True)
class Blocks:
    """The dataset is cut into `m` blocks of neighbouring samples; each block goes to one member.

    >>> [s.tolist() for s in Blocks(3).share(torch.arange(6), 6, size=2, batch_size=2)]
    [[0, 1, 4, 5], [2, 3]]
    """

    m: int
    whole: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.m < 1:
            raise ConfigError(f"Blocks(m={self.m}): m must be at least 1")

    def check(self, length: int, size: int) -> None:
        if self.m > length:
            raise ConfigError(f"Blocks({self.m}) of {length} samples: use at most {length} blocks")
        if self.m < size:
            raise ConfigError(
                f"Blocks({self.m}) leaves some of {size} members without samples: use at least {size} blocks"
            )

    def share(self, rest: Tensor, length: int, size: int, batch_size: int) -> list[Tensor]:
        return _by_owner(rest, _dealt(rest * self.m // length, size), size)


@dataclass(frozen=True)
class ByFile:
    """Each member opens only its own files: file i of a `Files` dataset goes to member i % size.

    How many samples a file has is known only when it has been read, so members may run out at different
    times; see `paceline.data.files`.

    >>> ByFile().owned(files=5, rank=1, size=2)
    [1, 3]
    """

    def owned(self, files: int, rank: int, size: int) -> list[int]:
        """The files of one member."""
        if files < size:
            raise ConfigError(
                f"ByFile: {files} files cannot be divided among {size} members: start at most {files} "
                "members, write more files, or leave partition out, so that every member reads all of them"
            )
        return list(range(rank, files, size))


@dataclass(frozen=True)
class Columns:
    """Every member visits every sample, but sees only its own columns (the last dimension).

    `of` says which part of the sample has the columns: a position in a tuple or a key of a dict; where the
    sample is one tensor it is ignored. `groups` gives the columns of each member; without it they are cut
    into even runs.

    >>> Columns().cut([torch.arange(10).view(2, 5), torch.tensor([0, 1])], rank=1, size=2)
    [tensor([[3, 4],
            [8, 9]]), tensor([0, 1])]
    """

    of: int | str = 0
    groups: Sequence[Sequence[int]] | None = None
    whole: ClassVar[bool] = True

    def check(self, length: int, size: int) -> None:
        if self.groups is None:
            return
        if len(self.groups) != size:
            raise ConfigError(f"Columns has {len(self.groups)} groups for {size} members: give one per member")
        every = [column for group in self.groups for column in group]
        if len(every) != len(set(every)) or not all(self.groups):
            raise ConfigError("Columns: groups must not be empty, and each column belongs to one group only")

    def share(self, rest: Tensor, length: int, size: int, batch_size: int) -> list[Tensor]:
        return [rest] * size

    def cut(self, batch: Any, rank: int, size: int) -> Any:
        """The batch with this member's columns."""
        if isinstance(batch, Tensor):
            return self._cut(batch, rank, size)
        try:
            part = batch[self.of]
        except (LookupError, TypeError):
            raise ConfigError(
                f"Columns(of={self.of!r}): the batch is a {type(batch).__name__} without that part: "
                "name the position or key of the tensor that has the columns"
            ) from None
        if not isinstance(part, Tensor):
            raise ConfigError(f"Columns(of={self.of!r}): that part is a {type(part).__name__}, not a tensor")
        mine = self._cut(part, rank, size)
        if isinstance(batch, dict):
            return {**batch, self.of: mine}
        parts = [mine if place == self.of else other for place, other in enumerate(batch)]
        if isinstance(batch, tuple):
            return type(batch)(*parts) if hasattr(batch, "_fields") else tuple(parts)
        return parts

    def _cut(self, tensor: Tensor, rank: int, size: int) -> Tensor:
        width = tensor.shape[-1] if tensor.ndim > 1 else 0
        if self.groups is not None:
            known = set(range(width))
            if {column for group in self.groups for column in group} != known:
                raise ConfigError(f"Columns: the groups must name each of the {width} columns exactly once")
            return tensor[..., list(self.groups[rank])]
        if width < size:
            raise ConfigError(f"Columns: {width} columns cannot be divided among {size} members")
        return tensor.tensor_split(size, dim=-1)[rank]


def _places(rest: Tensor) -> Tensor:
    """The place of each index among the sorted ones."""
    places = torch.empty_like(rest)
    places[rest.argsort()] = torch.arange(len(rest))
    return places


def _by_owner(rest: Tensor, owner: Tensor, size: int) -> list[Tensor]:
    return [rest[owner == rank] for rank in range(size)]


def _dealt(codes: Tensor, size: int) -> Tensor:
    """An owner for each sample, from the number of its key: largest key first, to whoever has least."""
    counts = torch.bincount(codes).tolist() if len(codes) else []
    loads = [(0, rank) for rank in range(size)]
    owners = [0] * len(counts)
    for code in sorted(range(len(counts)), key=lambda code: -counts[code]):
        load, rank = heapq.heappop(loads)
        owners[code] = rank
        heapq.heappush(loads, (load + counts[code], rank))
    return torch.tensor(owners, dtype=torch.int64)[codes]
