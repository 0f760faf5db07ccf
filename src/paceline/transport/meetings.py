"""What a hub knows: who is here, what they have handed in for which collective, and who waits to come in.

Opens nothing and waits for nothing, so any order of events can be tested. Collectives are numbered by those who take
part: all of them run the same script. One who replaces a lost member runs it from the top, alone, and has to learn the
present number, at a place in the script that it can go to: the beginning of an epoch (`Stand`), which the first of
those who are here tells. It may come in as long as no collective of that epoch is answered, and waits for the next
epoch otherwise. With nobody left, it begins the last epoch that was told again.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class Stand(msgspec.Struct, frozen=True, tag="stand"):
    """An epoch begins after so many collectives; `state` is what a newcomer must know then."""

    epoch: int
    step: int
    number: int
    state: bytes


class Enter(msgspec.Struct, frozen=True, tag="enter"):
    """I would like to take part."""


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """I have come to the end of the script."""


class Over(msgspec.Struct, frozen=True, tag="over"):
    """Nobody comes in any more."""

    reason: str


FINISHED = "the run has come to its end"
_NEVER = "all workers were lost before the first epoch began"

Parts = dict[int, bytes]  # of a collective, by rank


class Meetings:
    """One hub's. Each method returns what is to be said now: to whom, and a number with all parts, or a word.

    >>> meetings = Meetings([0, 1])
    >>> meetings.hand(0, 1, b"a")
    []
    >>> meetings.leave(1)
    [(0, (1, {0: b'a'}))]
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self.here = set(ranks)
        self.waiting: set[int] = set()  # to come in
        self.stand: Stand | None = None
        self.done = 0  # number of the last collective that was answered
        self._finished = False
        self._handed: dict[int, Parts] = {}  # by number of the collective

    def hand(self, rank: int, number: int, part: bytes) -> list[Say]:
        """A member's part of a collective."""
        if rank not in self.here:
            return []
        self._handed.setdefault(number, {})[rank] = part
        return self._look(number)

    def stands(self, rank: int, stand: Stand) -> list[Say]:
        """A member begins an epoch."""
        if rank in self.here and (self.stand is None or stand.number >= self.stand.number):
            self.stand = stand
        return self._let_in()

    def enter(self, rank: int) -> list[Say]:
        """One who is not here asks to be let in."""
        self.waiting.add(rank)
        return self._let_in()

    def finish(self, rank: int) -> list[Say]:
        """A member has come to the end of the script: so will all others, and nobody is let in."""
        self._finished = self._finished or rank in self.here
        return self._let_in()

    def leave(self, rank: int) -> list[Say]:
        """A member is not here any more: the others go on without its part."""
        self.here.discard(rank)
        self.waiting.discard(rank)
        said: list[Say] = []
        for number in list(self._handed):
            self._handed[number].pop(rank, None)
            said += self._look(number)
        return said + self._let_in()

    def _look(self, number: int) -> list[Say]:
        """Answer where all who are here have handed in their part."""
        if not self.here <= self._handed[number].keys():
            return []
        parts = dict(sorted(self._handed.pop(number).items()))
        self.done = max(self.done, number)
        return [(rank, (number, parts)) for rank in sorted(self.here)]

    def _let_in(self) -> list[Say]:
        waiting = sorted(self.waiting)
        if self._finished or (not self.here and self.stand is None):
            self.waiting.clear()
            return [(rank, Over(FINISHED if self._finished else _NEVER)) for rank in waiting]
        if not self.here and self.stand is not None:
            self.done = self.stand.number
            self._handed.clear()
        if self.stand is None or self.done != self.stand.number:
            return []
        self.here |= self.waiting
        self.waiting.clear()
        return [(rank, self.stand) for rank in waiting]


Say = tuple[int, tuple[int, Parts] | Stand | Over]
