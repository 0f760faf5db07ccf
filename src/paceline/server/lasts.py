"""What workers that were lost have left with the servers: which batches are to be dealt again, and where they count.

A push goes to all servers at once, and nobody takes it back. So where its worker dies on the way, some have applied
what others never get. The first server, which deals, asks all for their accounts of a lost worker (`rounds`) and puts
them together: a batch that all have whole is done; one that some have is dealt again, and whoever gets it leaves out
what is there. What cannot be dealt again, such as what a script reads by itself, is told in words.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from paceline.server.counting import Batch
from paceline.server.messages import Account, Last

Chunks = Mapping[tuple[int, int], int]  # by table and server: how many


class Begun(NamedTuple):
    """What is there of a batch."""

    parts: dict[tuple[int, int], int]  # by table and server: chunks, from the first on
    samples: float  # that the first server has counted for it

    def whole(self, chunks: Chunks) -> bool:
        """Whether all tables have it, as often on all servers.

        >>> Begun({(0, 0): 4, (0, 1): 2}, 8.0).whole({(0, 0): 2, (0, 1): 1})
        True
        >>> Begun({(0, 0): 3, (0, 1): 2}, 8.0).whole({(0, 0): 2, (0, 1): 1})
        False
        """
        times: dict[int, set[float]] = {}
        for (table, server), count in chunks.items():
            times.setdefault(table, set()).add(self.parts.get((table, server), 0) / count)
        return all(len(each) == 1 and min(each) >= 1 and min(each).is_integer() for each in times.values())


class Lasts:
    """What the first server has heard of those who were lost. `servers`: how many there are."""

    def __init__(self, servers: int) -> None:
        self._servers = servers
        self._heard: dict[tuple[int, int], dict[int, Account]] = {}  # by rank and life, then by server

    def hear(self, server: int, account: Account) -> dict[int, Account] | None:
        """A server tells what it has of a lost worker; all accounts of it, by server, once all have told."""
        key = account.rank, account.life
        heard = self._heard.setdefault(key, {})
        heard[server] = account
        return self._heard.pop(key) if len(heard) == self._servers else None


def begun(accounts: Mapping[int, Account]) -> dict[Batch, Begun]:
    """What is there of each batch, by all accounts of a lost worker.

    >>> from paceline.server.messages import Taken
    >>> last = Last(table=0, begun=7, whole=6, taken=(Taken("x", 3, 2, 8.0),))
    >>> begun({0: Account(1, 0, (last,)), 1: Account(1, 0)})
    {('x', 3): Begun(parts={(0, 0): 2}, samples=8.0)}
    """
    found: dict[Batch, Begun] = {}
    for server, account in accounts.items():
        for last in account.lasts:
            for taken in last.taken:
                batch = taken.course, taken.number
                before = found.get(batch, Begun({}, 0.0))
                parts = before.parts | ({(last.table, server): taken.parts} if taken.parts else {})
                found[batch] = Begun(parts, before.samples + taken.samples)
    return found


def told(accounts: Mapping[int, Account]) -> list[str]:
    """In words, what is missing where of pushes that cannot be made again.

    >>> lasts = [Last(table=0, begun=7, whole=7), Last(table=0, begun=6, whole=6)]
    >>> told({server: Account(3, 0, (last,)) for server, last in enumerate(lasts)})
    ['member 3 was lost in the middle of its push 7: server 1 has none of it; the rest stays applied']
    """
    tables: dict[int, dict[int, Last]] = {}
    for server, account in sorted(accounts.items()):
        for last in account.lasts:
            tables.setdefault(last.table, {})[server] = last
    rank = next(iter(accounts.values())).rank
    return [words for _, lasts in sorted(tables.items()) if (words := _words(rank, lasts))]


def _words(rank: int, lasts: Mapping[int, Last]) -> str | None:
    newest = max(last.begun for last in lasts.values())
    none = [server for server, last in lasts.items() if last.begun < newest]
    half = [server for server, last in lasts.items() if last.whole < newest == last.begun]
    if (not none and not half) or any(last.again for last in lasts.values() if last.begun == newest):
        return None
    words = [f"server {server} has none of it" for server in none]
    words += [f"server {server} has only a part of it" for server in half]
    return f"member {rank} was lost in the middle of its push {newest}: {', '.join(words)}; the rest stays applied"
