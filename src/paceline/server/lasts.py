"""The last push of a worker that was lost: whether all servers have got the same of it.

A push goes to all servers at once, and nobody takes it back. So where its worker dies on the way, some have applied
what others never get. Each server tells the first how far it has come, and the first says what is missing where.
"""

from __future__ import annotations

from paceline.server.messages import Last


class Lasts:
    """What the first server has heard.

    >>> lasts = Lasts()
    >>> lasts.hear(0, Last(table=0, servers=2, rank=3, begun=7, whole=7))
    >>> lasts.hear(1, Last(table=0, servers=2, rank=3, begun=6, whole=6))
    'member 3 was lost in the middle of its push 7: server 1 has none of it; the rest stays applied'
    """

    def __init__(self) -> None:
        self._heard: dict[tuple[int, int], dict[int, Last]] = {}  # by table and rank, then by server

    def hear(self, server: int, last: Last) -> str | None:
        """A server tells how far a lost worker's pushes have come; in words, what is missing, once all have told."""
        key = last.table, last.rank
        heard = self._heard.setdefault(key, {})
        heard[server] = last
        if len(heard) < last.servers:
            return None
        del self._heard[key]
        newest = max(each.begun for each in heard.values())
        none = [server for server, each in sorted(heard.items()) if each.begun < newest]
        half = [server for server, each in sorted(heard.items()) if each.whole < newest == each.begun]
        if not none and not half:
            return None
        words = [f"server {server} has none of it" for server in none]
        words += [f"server {server} has only a part of it" for server in half]
        again = ", and its batches are dealt again" if 0 in none else ""
        return (
            f"member {last.rank} was lost in the middle of its push {newest}: {', '.join(words)}; the rest stays "
            f"applied{again}"
        )
