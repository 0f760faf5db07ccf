"""Members that hold the others up, found by their own time and not by the wait that they cause.

Each member tells with its gradients how long its last turn took without waiting for others: for data, for computing,
and how much processor time it had. All get the same numbers; the first member tells of a straggler, by name and with
the likely reason, once until it has caught up.

    slow     its own time, in the mean of the last turns, is more than half as long again as the median of the others'
    data     most of what it takes longer is spent waiting for batches
    load     it has less processor time in a second of computing than the others: something else runs on its host
    compute  it computes as undisturbed as the others, but slower
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

_SLOW = 1.5  # times the others' median
_CAUGHT_UP = 1.2
_TURNS = 20  # that a mean looks back, about; and that it takes before anybody is named
_STARVED = 0.75  # of the share of a processor that the others get
_LEAST_S = 1e-3  # of a turn; shorter ones are not worth a word


class Pace(NamedTuple):
    """A member's turn, in seconds."""

    data_s: float
    compute_s: float
    cpu_s: float  # of all its threads, while it computed

    @property
    def own_s(self) -> float:
        return self.data_s + self.compute_s


class Straggler(NamedTuple):
    """Who is slow, how slow, and why."""

    rank: int
    times: float  # the others' median
    reason: str  # data, load, compute
    text: str


class Stragglers:
    """Fed with everyone's pace after each step."""

    def __init__(self) -> None:
        self._means: list[Pace] = []
        self._seen = 0
        self._named: set[int] = set()

    def note(self, paces: Sequence[Pace]) -> list[Straggler]:
        """Those who are found to be slow now, and were not before."""
        if len(paces) != len(self._means):  # another view: ranks are others'
            self._means, self._seen, self._named = [Pace(*p) for p in paces], 0, set()
        self._seen += 1
        share = 1 / min(self._seen, _TURNS)
        self._means = [
            Pace(*(old + share * (new - old) for old, new in zip(mean, pace))) for mean, pace in zip(self._means, paces)
        ]
        if self._seen < _TURNS or len(paces) < 2:
            return []
        found = []
        for rank, mean in enumerate(self._means):
            others = [p for r, p in enumerate(self._means) if r != rank]
            usual = max(statistics.median(p.own_s for p in others), 1e-9)
            times = mean.own_s / usual
            if times < _CAUGHT_UP:
                self._named.discard(rank)
            if times > _SLOW and mean.own_s > _LEAST_S and rank not in self._named:
                self._named.add(rank)
                found.append(self._explained(rank, mean, others, times))
        return found

    def _explained(self, rank: int, mean: Pace, others: list[Pace], times: float) -> Straggler:
        more_data = mean.data_s - statistics.median(p.data_s for p in others)
        more_compute = mean.compute_s - statistics.median(p.compute_s for p in others)
        cores, usual = _cores(mean), statistics.median(_cores(p) for p in others)
        if more_data > more_compute:
            reason, why = "data", "it waits for its batches: look at its disk, or give run.loader workers"
        elif cores < _STARVED * usual:
            reason = "load"
            why = f"it gets {cores:.2g} cores where the others get {usual:.2g}: something else runs on its host"
        else:
            reason, why = (
                "compute",
                "it computes as undisturbed as the others: a slower machine, or more work per sample",
            )
        return Straggler(rank, times, reason, f"takes {times:.1f} times as long for a turn as the others; {why}")


def _cores(pace: Pace) -> float:
    return pace.cpu_s / max(pace.compute_s, 1e-9)
