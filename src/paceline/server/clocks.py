"""The workers that are at a shard, and how far each has come: what a gate compares.

A clock counts a worker's pushes that were applied or dropped. Whoever comes begins at the clock of the slowest, and one
that has rested comes back level, so that nobody waits for what it has not done.
"""

from __future__ import annotations

from paceline.core.errors import ConfigError


class Clocks:
    """
    >>> clocks = Clocks()
    >>> clocks.join(0), clocks.join(1)
    (0, 0)
    >>> clocks.count(0, step=1)
    >>> clocks.lead(0), clocks.lead(1)
    (1, -1)
    """

    def __init__(self) -> None:
        self.of: dict[int, int] = {}  # by rank, of the workers that are here
        self.resting: set[int] = set()
        self._steps: dict[int, int] = {}  # by rank: the number of its last push
        self._fresh: set[int] = set()  # who has not pushed: it begins at the highest clock that a server has told it

    def join(self, rank: int) -> int:
        """The step after which it begins."""
        self.of.setdefault(rank, min(self.of.values(), default=0))
        self._steps.setdefault(rank, self.of[rank])
        self._fresh.add(rank)
        return self._steps[rank]

    def leave(self, rank: int) -> None:
        self.of.pop(rank, None)
        self._steps.pop(rank, None)
        self.resting.discard(rank)

    def wake(self, rank: int) -> bool:
        """Whether it had rested; nobody waits for what it has not done meanwhile."""
        if rank not in self.resting:
            return False
        self.resting.discard(rank)
        awake = [clock for other, clock in self.of.items() if other != rank and other not in self.resting]
        self.of[rank] = max(self.of[rank], min(awake, default=0))
        return True

    def level(self) -> None:
        """All stand where the slowest does."""
        self.of = dict.fromkeys(self.of, min(self.of.values(), default=0))

    def check(self, rank: int, step: int) -> None:
        """Whether its next push may be this one."""
        ahead = step - self._steps[rank]
        if ahead < 1 or (ahead > 1 and rank not in self._fresh):
            raise ConfigError(f"member {rank} pushes step {step} after step {self._steps[rank]}")

    def pushes(self, rank: int) -> None:
        """It does, for the first time or again."""
        self._fresh.discard(rank)

    def count(self, rank: int, step: int) -> None:
        """Its push has come to its end."""
        self.of[rank] += 1
        self._steps[rank] = step

    def whole(self, rank: int) -> int:
        """The number of its last push that is whole; 0: it has not pushed."""
        return 0 if rank in self._fresh else self._steps[rank]

    def lead(self, rank: int, more: int = 0) -> int:
        """How far it is ahead of the slowest of the others that do not rest, with `more` of its own."""
        clock = self.of[rank] + more
        others = [c for r, c in self.of.items() if r != rank and r not in self.resting]
        return clock - min(others, default=clock)
