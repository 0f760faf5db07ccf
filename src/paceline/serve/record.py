"""What each of the last seconds was like: for the page at `/`, kept in the parent.

Once a second the parent has the counts of all replicas. What is written down is what has changed since the second
before; latencies are read off the histogram, so they are as fine as its bounds. Ten minutes are kept, whoever looks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from paceline.serve.counts import LATENCY_S, Counts
from paceline.serve.keeper import Standing
from paceline.serve.learner import Learning

KEPT = 600  # seconds
_GOOD = 200


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """What `/status` says."""

    name: str  # what is served
    now: float  # Unix time
    standing: Standing
    seconds: dict[str, list[float | None]]  # see `Second`
    replicas: dict[str, int]  # by state
    answered: int  # requests, since the start
    refused: int
    learning: Learning | None  # None: nothing can learn


class Second(NamedTuple):
    """Rates are per second, latencies None where nothing was answered."""

    at: float  # Unix time of its end
    answered: float  # requests with a result
    refused: float  # requests without one, for whatever reason
    p50_ms: float | None
    p99_ms: float | None
    queue: int
    version: int | None  # the lowest that a replica answers with; None: none does
    metric: float | None  # of the version that is to be served, on the holdout


class Record:
    """
    >>> record = Record()
    >>> record.add(10.0, Counts())
    >>> record.add(12.0, Counts(requests={200: 6, 429: 2}, latency=[0, 8] + [0] * 13, queue=3, version=7))
    >>> record.columns()["answered"], record.columns()["refused"], record.columns()["p50_ms"]
    ([3.0], [1.0], [0.75])
    """

    def __init__(self) -> None:
        self._seconds: deque[Second] = deque(maxlen=KEPT)
        self._before: tuple[float, Counts] | None = None

    def add(self, at: float, summed: Counts, metric: float | None = None) -> None:
        """The counts of all replicas at this time."""
        before, self._before = self._before, (at, summed)
        if before is None or at <= before[0]:  # the first, or the clock was set back
            return
        passed_s = at - before[0]
        good, bad = (now - then for now, then in zip(totals(summed), totals(before[1])))
        times = [max(0, now - then) for now, then in zip(summed.latency, before[1].latency)]
        p50, p99 = (quantile(times, q) for q in (0.5, 0.99))
        self._seconds.append(
            Second(
                round(at, 2),
                round(max(0, good) / passed_s, 2),
                round(max(0, bad) / passed_s, 2),
                None if p50 is None else round(1e3 * p50, 3),
                None if p99 is None else round(1e3 * p99, 3),
                summed.queue,
                summed.version or None,
                metric,
            )
        )

    def columns(self) -> dict[str, list[float | None]]:
        """One list per name of `Second`, the oldest first."""
        rows = list(self._seconds)
        return {name: [row[i] for row in rows] for i, name in enumerate(Second._fields)}


def totals(summed: Counts) -> tuple[int, int]:
    """Requests that got a result, and those that did not."""
    good = summed.requests.get(_GOOD, 0)
    return good, sum(summed.requests.values()) - good


def quantile(counts: Sequence[int], q: float) -> float | None:
    """Of a histogram with the bounds LATENCY_S, as if values lay evenly between two; None: it is empty.

    >>> quantile([0, 0, 10] + [0] * 12, 0.5)
    0.0015
    """
    wanted, below = q * sum(counts), 0
    for i, count in enumerate(counts):
        if count and below + count >= wanted:
            low = LATENCY_S[i - 1] if i else 0.0
            high = LATENCY_S[min(i, len(LATENCY_S) - 1)]  # longer than the last bound: that bound
            return low + (high - low) * (wanted - below) / count
        below += count
    return None
