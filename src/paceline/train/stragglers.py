"""Members that hold the others up, found by their own time and not by the wait that they cause.

Each member tells with its gradients how long its last turn took without waiting for others: for data, for computing,
how much processor time it had, and how its slowest link to another host does. All get the same numbers; the first
member tells of a straggler, by name and with the likely reason, once until it has caught up.

    slow     its own time, in the mean of the last turns, is more than half as long again as the median of the others'
    data     most of what it takes longer is spent waiting for batches
    load     it has less processor time in a second of computing than the others, and waits for a processor: something
             else runs on its host
    idle     it has less, and does not wait for one: its script sleeps, or waits for something of its own
    compute  it computes as undisturbed as the others, but slower
    network  its own time is as short as the others', but everyone waits, and its link to another host carries less
             than a third of what the others' do
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from paceline.train import links
from paceline.train.links import Slow, Told
from paceline.train.queued import UNKNOWN

_SLOW = 1.5  # times the others' median
_CAUGHT_UP = 1.2
_WARM_UP = 20  # turns at the start of a view that are not looked at: caches fill, and what is imported late comes in
_TURNS = 20  # that a mean looks back, about; and that it takes after that before anybody is named
_MOST = 3.0  # times its mean that a turn counts, at most: one that was held up once is not slow
_STARVED = 0.75  # of the share of a processor that the others get
_QUEUED = 0.3  # of what one takes longer, spent waiting for a processor, is load
_LEAST_S = 1e-3  # of a turn; shorter ones are not worth a word
_WAITS = 0.2  # of a turn that everyone waits, at least, where the exchange is what takes time


class Pace(NamedTuple):
    """A member's turn, in seconds."""

    data_s: float
    compute_s: float
    cpu_s: float  # of all its threads, while it computed
    wait_s: float = 0.0  # for others
    link: Told = Told()  # its slowest to another host
    queued_s: float = UNKNOWN  # that it could have run, and waited for a processor
    sent_bytes: float = 0.0
    samples: float = 0.0  # of the turn under way: with what it tells goes the gradient of these

    @property
    def own_s(self) -> float:
        return self.data_s + self.compute_s

    def numbers(self) -> tuple[float, ...]:
        """To be told; `heard` reads them."""
        return (*self[:4], *self.link, self.queued_s, self.sent_bytes, self.samples)


def heard(numbers: Sequence[float]) -> list[Pace]:
    """Everyone's, in the order of ranks.

    >>> pace = Pace(0.5, 1.0, 2.0, 0.25, Told(1e6, 0.125, 3), 0.5, 4096.0, 64.0)
    >>> heard([*pace.numbers(), *pace.numbers()]) == [pace, pace]
    True
    """
    width = len(Pace(0.0, 0.0, 0.0).numbers())
    rows = [numbers[i : i + width] for i in range(0, len(numbers), width)]
    return [
        Pace(row[0], row[1], row[2], row[3], Told(row[4], row[5], int(row[6])), row[7], row[8], row[9]) for row in rows
    ]


class Straggler(NamedTuple):
    """Who is slow, how slow, and why."""

    rank: int
    times: float  # the others' median
    reason: str  # data, load, idle, compute, network
    text: str
    turns: int = 0  # since it was found


class Stragglers:
    """Fed with everyone's pace after each step; a new one for each view, whose ranks are others'.

    `names` are the members' by rank; by default, their ranks.
    """

    def __init__(self, names: Sequence[object] = ()) -> None:
        self._names = names
        self._means: list[Pace] = []
        self._seen = 0
        self._found: dict[int, Straggler] = {}

    def note(self, paces: Sequence[Pace]) -> list[Straggler]:
        """Those who are found to be slow now, and were not before."""
        if len(paces) != len(self._means):
            self._means, self._seen, self._found = [Pace(*p) for p in paces], -_WARM_UP, {}
        self._seen += 1
        if self._seen <= 0:
            self._means = [Pace(*p) for p in paces]
            return []
        share = 1 / min(self._seen, _TURNS)
        paces = [_held(pace, mean) for pace, mean in zip(paces, self._means)]
        self._means = [
            Pace(
                mean.data_s + share * (pace.data_s - mean.data_s),
                mean.compute_s + share * (pace.compute_s - mean.compute_s),
                mean.cpu_s + share * (pace.cpu_s - mean.cpu_s),
                mean.wait_s + share * (pace.wait_s - mean.wait_s),
                pace.link,  # a mean already
                mean.queued_s + share * (pace.queued_s - mean.queued_s),
            )
            for mean, pace in zip(self._means, paces)
        ]
        if self._seen < _TURNS or len(paces) < 2:
            return []
        before, self._found = self._found, {}
        networks = {named: self._by_network(named) for named in (False, True)}
        for rank, mean in enumerate(self._means):
            named = rank in before
            slow = self._by_own_time(rank, mean, _CAUGHT_UP if named else _SLOW)
            if slow is None and rank in networks[named]:
                slow = self._by_link(rank, networks[named][rank])
            if slow is not None:
                self._found[rank] = slow._replace(turns=before[rank].turns + 1 if named else 0)
        return [slow for rank, slow in self._found.items() if rank not in before]

    @property
    def slowest(self) -> Straggler | None:
        """Of those who are slow now, the one that has been for longest."""
        return max(self._found.values(), key=lambda slow: (slow.turns, slow.times), default=None)

    def _by_own_time(self, rank: int, mean: Pace, limit: float) -> Straggler | None:
        others = [p for r, p in enumerate(self._means) if r != rank]
        times = mean.own_s / max(statistics.median(p.own_s for p in others), 1e-9)
        return self._explained(rank, mean, others, times) if times > limit and mean.own_s > _LEAST_S else None

    def _by_network(self, named: bool) -> dict[int, Slow]:
        turn_s = statistics.median(p.own_s + p.wait_s for p in self._means)
        if min(p.wait_s for p in self._means) < _WAITS * turn_s:  # somebody is hardly waiting: it is not the exchange
            return {}
        told = {rank: pace.link for rank, pace in enumerate(self._means)}
        return links.find(told, turn_s, links.CAUGHT_UP if named else links.SLOWER)

    def _by_link(self, rank: int, slow: Slow) -> Straggler:
        names = dict(enumerate(self._names or range(len(self._means))))
        return Straggler(rank, slow.usual / slow.bytes_per_s, "network", slow.text(rank, names))

    def _explained(self, rank: int, mean: Pace, others: list[Pace], times: float) -> Straggler:
        more_data = mean.data_s - statistics.median(p.data_s for p in others)
        more_compute = mean.compute_s - statistics.median(p.compute_s for p in others)
        cores, usual = _cores(mean), statistics.median(_cores(p) for p in others)
        if more_data > more_compute:
            reason, why = "data", "it waits for its batches: look at its disk, or give run.loader workers"
        elif cores < _STARVED * usual and self._idle(mean, others, more_compute):
            reason = "idle"
            why = (
                f"it computes for {min(cores, 1.0):.0%} of that time, and nothing keeps it from the processor: its "
                "script sleeps, or waits for something of its own"
            )
        elif cores < _STARVED * usual:
            reason = "load"
            why = f"it gets {cores:.2g} cores where the others get {usual:.2g}: something else runs on its host"
        else:
            reason, why = (
                "compute",
                "it computes as undisturbed as the others: a slower machine, or more work per sample",
            )
        return Straggler(rank, times, reason, f"takes {times:.1f} times as long for a turn as the others; {why}")

    @staticmethod
    def _idle(mean: Pace, others: list[Pace], more_compute: float) -> bool:
        """Whether what it takes longer is not explained by waiting for a processor."""
        if min(mean.queued_s, *(p.queued_s for p in others)) < 0:  # somebody does not know
            return False
        return mean.queued_s - statistics.median(p.queued_s for p in others) < _QUEUED * more_compute


def _held(pace: Pace, mean: Pace) -> Pace:
    """A turn as it counts for the mean."""
    part = _MOST * mean.own_s / pace.own_s if pace.own_s else 1.0
    if not 0 < part < 1:
        return pace
    return pace._replace(
        data_s=part * pace.data_s,
        compute_s=part * pace.compute_s,
        cpu_s=part * pace.cpu_s,
        wait_s=part * pace.wait_s,
        queued_s=part * pace.queued_s if pace.queued_s > 0 else pace.queued_s,
    )


def _cores(pace: Pace) -> float:
    return pace.cpu_s / max(pace.compute_s, 1e-9)
