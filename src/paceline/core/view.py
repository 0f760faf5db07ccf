"""A view: the numbered list of the members of a run, the same on all of them."""

from __future__ import annotations

import msgspec


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One member as the others see it."""

    rank: int
    host: str  # the same string for members that share memory
    pid: int
    address: str = ""  # "ip:port" of its listener for channels
    local: str = ""  # name of its abstract unix socket, for passing descriptors on one host
    labels: tuple[str, ...] = ()
    id: int = -1  # its number for life, where members come and go; else its rank


class View(msgspec.Struct, frozen=True, kw_only=True):
    """Who is here. A higher number replaces a lower one."""

    number: int
    members: tuple[Member, ...]

    @property
    def size(self) -> int:
        return len(self.members)

    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """Ranks by host, in the order of each host's first rank.

        >>> a, b, c = (Member(rank=r, host=h, pid=1) for r, h in enumerate("xyx"))
        >>> View(number=1, members=(a, b, c)).hosts()
        ((0, 2), (1,))
        """
        ranks: dict[str, list[int]] = {}
        for member in self.members:
            ranks.setdefault(member.host, []).append(member.rank)
        return tuple(tuple(r) for r in ranks.values())
