"""Random numbers that datasets draw: reproducible, and apart from those of training.

A dataset that augments its samples draws from the global generators of torch, numpy and `random`, the same
ones that dropout and initialisation use. `Private` gives a piece of fetching a state of its own and puts the
global states back afterwards, so that what a batch contains follows from (seed, epoch, position) alone: not
from the number of worker processes, from how far was fetched ahead, or from where a run was resumed.

`Watch` finds out on the first batch whether a dataset draws at all; one that begins to draw only later is not
found out. Assumes that nothing else draws while a `Private` block is open, so it is used in the thread that trains, or
in a worker process. Generators that a dataset makes for itself are its own business.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import numpy
import torch
from torch import Tensor

T = TypeVar("T")


class States(NamedTuple):
    """The three global states."""

    torch: Tensor
    numpy: dict[str, Any]
    python: tuple[Any, ...]


def mix(*parts: int | str) -> int:
    """A seed of 63 bits out of numbers and words.

    >>> mix(0, 1, "order") == mix(0, 1, "order") != mix(0, 11, "order")
    True
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def permutation(length: int, seed: int, epoch: int) -> Tensor:
    """The shuffled order of an epoch, the same on every member."""
    generator = torch.Generator().manual_seed(mix(seed, epoch, "order"))
    return torch.randperm(length, generator=generator)


def seed_all(seed: int) -> None:
    """Seed the generators that datasets use; CUDA's belong to training and are left alone."""
    torch.default_generator.manual_seed(seed)
    numpy.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def capture() -> States:
    return States(torch.get_rng_state(), numpy.random.get_state(legacy=False), random.getstate())


def restore(states: States) -> None:
    torch.set_rng_state(states.torch)
    numpy.random.set_state(states.numpy)
    random.setstate(states.python)


def same(one: States, other: States) -> bool:
    """Whether nothing was drawn between two captures."""
    return one.python == other.python and torch.equal(one.torch, other.torch) and _equal(one.numpy, other.numpy)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return all(_equal(one[key], other[key]) for key in one)
    return bool(numpy.array_equal(one, other))


class Private:
    """A random state apart from the global one: `with private: ...` goes on where its last block ended.

    >>> private = Private(7)
    >>> before = capture()
    >>> with private: _ = torch.rand(3)
    >>> private.drew, same(before, capture())
    (True, True)
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.drew = False  # in its last block
        self._mine: States | None = None

    def reseed(self, seed: int) -> None:
        """Start over from another seed at the next block."""
        self.seed, self._mine = seed, None

    def __enter__(self) -> Private:
        self._outer = capture()
        if self._mine is None:
            seed_all(self.seed)
            self._mine = capture()
        else:
            restore(self._mine)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        now = capture()
        assert self._mine is not None
        self.drew = not same(self._mine, now)
        self._mine = now
        restore(self._outer)


class Watch:
    """Runs pieces of reading under a private random state, until it is known that nothing is drawn."""

    def __init__(self) -> None:
        self.drew: bool | None = None  # None: not known yet

    def run(self, private: Private, work: Callable[[], T]) -> T:
        if self.drew is False:
            return work()
        with private:
            result = work()
        self.drew = self.drew or private.drew or None
        return result

    def settle(self) -> None:
        """The first batch is there: what has not drawn by now counts as drawing nothing."""
        self.drew = bool(self.drew)
