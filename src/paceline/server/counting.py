"""How much of each batch a shard has taken: what is missing where, when its worker dies within a push, follows from it.

A push names the batches that it is made of, and every server counts the chunks that it has taken of them. A batch is
counted until it is known to be everywhere: its worker's next push is made of others, or it says that it rests or goes.
Only then is the batch done, unless its worker has told whoever deals before. So what is counted is little: of each
thread of a worker, the batches of its last push.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.server.messages import UPLOADS, Push, Taken

Leases = dict[str, tuple[int, ...]]
Batch = tuple[str, int]  # course and number


class Counting:
    """Of one shard.

    >>> counting = Counting()
    >>> push = Push(table=0, view=1, step=1, read=0, weight=1.0, groups=[], leases={"x": (4,)})
    >>> counting.begin(3, push)
    {}
    >>> counting.part(3, push)
    >>> counting.of(3)
    (Taken(course='x', number=4, parts=1, samples=0.0),)
    >>> counting.rests(3), counting.of(3)
    ({'x': (4,)}, ())
    """

    def __init__(self) -> None:
        self._pushes: dict[int, dict[int, _Pushed]] = {}  # by rank and thread

    def begin(self, rank: int, push: Push) -> Leases:
        """A push begins; the batches that are everywhere, since its worker goes on without them."""
        known = self._pushes.setdefault(rank, {}).setdefault(push.thread, _Pushed())
        batches = batches_of(push.leases)
        over = [batch for batch in known.parts if batch not in batches]
        if len(over) == len(known.parts):
            known.samples = 0.0
        known.coming = push.samples
        known.parts = {batch: known.parts.get(batch, 0) for batch in batches}
        return _leases(over)

    def part(self, rank: int, push: Push) -> None:
        """A chunk of it is taken."""
        known = self._pushes[rank][push.thread]
        known.samples, known.coming = known.samples + known.coming, 0.0
        for batch in known.parts:
            known.parts[batch] += 1

    def of(self, rank: int) -> tuple[Taken, ...]:
        """What is counted for a worker. All samples of a push stand with the first of its batches."""
        return tuple(
            Taken(*batch, count, 0.0 if place else pushed.samples)
            for pushed in self._pushes.get(rank, {}).values()
            for place, (batch, count) in enumerate(pushed.parts.items())
        )

    def counts(self, rank: int) -> bool:
        """Whether a worker's last pushes were made of batches that can be dealt again."""
        return any(pushed.parts for pushed in self._pushes.get(rank, {}).values())

    def rests(self, rank: int) -> Leases:
        """A worker has ended all its pushes, or is gone: the batches that were counted for it, and are no more."""
        return _leases([batch for pushed in self._pushes.pop(rank, {}).values() for batch in pushed.parts])


class _Pushed:
    """The last push of a thread; with those before it that were made of the same batches."""

    def __init__(self) -> None:
        self.parts: dict[Batch, int] = {}
        self.samples = self.coming = 0.0  # with the first chunk that is taken


def batches_of(leases: Mapping[str, Sequence[int]]) -> list[Batch]:
    """Those that can be dealt again: not what outsiders have uploaded."""
    return [(course, n) for course, numbers in leases.items() if not course.startswith(UPLOADS) for n in numbers]


def is_one(leases: Mapping[str, Sequence[int]]) -> bool:
    """Whether a push is made of one batch alone."""
    return sum(map(len, leases.values())) == 1


def _leases(batches: Sequence[Batch]) -> Leases:
    leases: Leases = {}
    for course, number in batches:
        leases[course] = (*leases.get(course, ()), number)
    return leases
