"""What a replica counts, how the counts of several add up, and how Prometheus reads them.

A replica changes its own `Counts` and sends them to the parent when asked; the parent adds up those of all replicas,
and of those that have ended, so that a total never falls.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

import msgspec

LATENCY_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
BATCH = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class Counts(msgspec.Struct, kw_only=True):
    """Since the replica's start. `version`, `queue`, `connections` are of now."""

    requests: dict[int, int] = {}  # by status
    latency: list[int] = msgspec.field(default_factory=lambda: [0] * (len(LATENCY_S) + 1))
    latency_sum_s: float = 0.0
    batches: list[int] = msgspec.field(default_factory=lambda: [0] * (len(BATCH) + 1))
    items: int = 0
    swaps: int = 0
    queue: int = 0
    connections: int = 0
    version: int = 0

    def answered(self, status: int, seconds: float) -> None:
        """One request has got its answer."""
        self.requests[status] = self.requests.get(status, 0) + 1
        self.latency[bisect_left(LATENCY_S, seconds)] += 1
        self.latency_sum_s += seconds

    def batch(self, rows: int) -> None:
        """One batch goes to the engine."""
        self.batches[bisect_left(BATCH, rows)] += 1
        self.items += rows


def total(counts: Iterable[Counts]) -> Counts:
    """The sum; of versions the lowest that answers.

    >>> total([Counts(requests={200: 2}, version=3), Counts(requests={200: 1, 429: 1}, version=2)]).requests
    {200: 3, 429: 1}
    """
    summed = Counts()
    versions = []
    for one in counts:
        for status, number in one.requests.items():
            summed.requests[status] = summed.requests.get(status, 0) + number
        summed.latency = [a + b for a, b in zip(summed.latency, one.latency)]
        summed.batches = [a + b for a, b in zip(summed.batches, one.batches)]
        summed.latency_sum_s += one.latency_sum_s
        summed.items += one.items
        summed.swaps += one.swaps
        summed.queue += one.queue
        summed.connections += one.connections
        if one.version:
            versions.append(one.version)
    summed.version = min(versions, default=0)
    return summed


def text(summed: Counts, replicas: dict[str, int], starts: int) -> str:
    """In the format that Prometheus reads."""
    lines = _head("requests_total", "counter", "Requests to /predict, by status.")
    lines += [f'paceline_serve_requests_total{{code="{c}"}} {n}' for c, n in sorted(summed.requests.items())]
    lines += _histogram(
        "latency_seconds",
        "From the last byte of a request to its answer.",
        LATENCY_S,
        summed.latency,
        summed.latency_sum_s,
    )
    lines += _histogram("batch_items", "Items per batch.", BATCH, summed.batches, summed.items)
    lines += _one("queue_items", "gauge", "Items that wait for a batch.", summed.queue)
    lines += _one("connections", "gauge", "Open connections.", summed.connections)
    lines += _one("version", "gauge", "The lowest version that a replica answers with.", summed.version)
    lines += _one("swaps_total", "counter", "Versions that replicas have taken over.", summed.swaps)
    lines += _head("replicas", "gauge", "Replicas, by state.")
    lines += [f'paceline_serve_replicas{{state="{state}"}} {n}' for state, n in sorted(replicas.items())]
    lines += _one("replica_starts_total", "counter", "Replicas that were started.", starts)
    return "\n".join(lines) + "\n"


def _head(name: str, kind: str, what: str) -> list[str]:
    return [f"# HELP paceline_serve_{name} {what}", f"# TYPE paceline_serve_{name} {kind}"]


def _one(name: str, kind: str, what: str, value: float) -> list[str]:
    return [*_head(name, kind, what), f"paceline_serve_{name} {value}"]


def _histogram(name: str, what: str, bounds: tuple[float, ...], counts: list[int], total: float) -> list[str]:
    lines = _head(name, "histogram", what)
    below = 0
    for bound, count in zip(bounds, counts):
        below += count
        lines.append(f'paceline_serve_{name}_bucket{{le="{bound}"}} {below}')
    number = below + counts[-1]
    lines.append(f'paceline_serve_{name}_bucket{{le="+Inf"}} {number}')
    return [*lines, f"paceline_serve_{name}_sum {total}", f"paceline_serve_{name}_count {number}"]
