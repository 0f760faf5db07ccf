"""Links between hosts that are slower than the others.

A member measures its own: how many bytes have arrived in the time in which some were on their way. Whether others were
slow to send or to take them is not in that. What each tells of its slowest link goes to all with its pace.

A host with a slow card slows down the links to it as well as those from it, so the members to name are the fewest that
have a part in all slow links; where these are not a minority, that is what the network is like, and nobody is named.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import NamedTuple

from paceline.transport.traffic import Traffic

SLOWER, CAUGHT_UP = 3.0, 2.0  # times the fastest link's seconds for a byte
_TURNS = 20  # that a mean looks back, about
_LEAST_BYTES = 4096  # in a turn; with fewer a link says nothing
_RESOLUTION_S = 1e-3  # of the system's clock for links
_BUSY = 0.25  # of a turn, at least, for a link to hold anybody up


class Told(NamedTuple):
    """A member's slowest link, in the mean of its last turns."""

    bytes_per_s: float = 0.0  # 0: it has none
    busy_s: float = 0.0  # of a turn
    to: int = -1


class Slow(NamedTuple):
    """A link that is slow."""

    sender: int
    to: int
    bytes_per_s: float
    usual: float  # of the others

    def text(self, rank: int, name: Mapping[int, object]) -> str:
        """As one of its ends sees it."""
        own = rank == self.sender
        which = f"its link to member {name[self.to]}" if own else f"the link from member {name[self.sender]} to it"
        rates = f"{_mbit(self.bytes_per_s)} Mbit/s where the others' carry {_mbit(self.usual)}"
        return f"is held up by the network: {which} carries {rates}"


class Links:
    """This member's."""

    def __init__(self) -> None:
        self._before: dict[int, Traffic] = {}
        self._means: dict[int, tuple[float, float]] = {}  # by rank: bytes and busy seconds of a turn
        self._seen: dict[int, int] = {}

    def note(self, now: Mapping[int, Traffic]) -> Told:
        """A turn is over; what has been sent to whom since the links were made."""
        for rank, traffic in now.items():
            before = self._before.get(rank)
            self._before[rank] = traffic
            if before is None or traffic.sent_bytes < before.sent_bytes:  # it was made anew
                continue
            self._seen[rank] = min(self._seen.get(rank, 0) + 1, _TURNS)
            share, (sent, busy) = 1 / self._seen[rank], self._means.get(rank, (0.0, 0.0))
            sent += share * (traffic.sent_bytes - before.sent_bytes - sent)
            busy += share * (traffic.busy_s - before.busy_s - busy)
            self._means[rank] = sent, busy
        links = [
            Told(sent / max(busy, _RESOLUTION_S), busy, rank)
            for rank, (sent, busy) in self._means.items()
            if sent >= _LEAST_BYTES
        ]
        return min(links, default=Told())


def find(links: Mapping[int, Told], turn_s: float, slower: float) -> dict[int, Slow]:
    """By rank: whose part in slow links explains them, with one of them, its own if that is slow.

    `turn_s` is how long a turn takes.
    """
    told = {rank: link for rank, link in links.items() if link.bytes_per_s}
    fastest = max((link.bytes_per_s for link in told.values()), default=0.0)
    slow = {
        rank: link
        for rank, link in told.items()
        if link.bytes_per_s * slower < fastest and link.busy_s > max(_BUSY * turn_s, 2 * _RESOLUTION_S)
    }
    usual = statistics.median([link.bytes_per_s for rank, link in told.items() if rank not in slow] or [0.0])
    found: dict[int, Slow] = {}
    while slow:
        ends = [*slow, *(link.to for link in slow.values())]
        worst = max(dict.fromkeys(ends), key=ends.count)  # of equals, a sender
        part = [r for r, link in slow.items() if worst in (r, link.to)]
        rank = worst if worst in part else min(part, key=lambda r: slow[r].bytes_per_s)
        found[worst] = Slow(rank, slow[rank].to, slow[rank].bytes_per_s, usual)
        slow = {r: link for r, link in slow.items() if worst not in (r, link.to)}
    return found if len(found) <= max(1, (len(told) - 1) // 2) else {}


def _mbit(bytes_per_s: float) -> str:
    """
    >>> _mbit(1_012_500), _mbit(11_875_000), _mbit(1.25e9)
    ('8.1', '95', '10,000')
    """
    rate = 8e-6 * bytes_per_s
    return f"{rate:.2g}" if rate < 100 else f"{round(rate):,}"
