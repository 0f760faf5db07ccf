"""What each member of an elastic run has done, the lost ones too: known to all who are there.

Every member tells with its gradients how many samples they are made of, and how long its last turn took. Who commits
the step writes that down, by the members' numbers for life, so all have the same accounts after the same step;
newcomers and those who are behind get them with the state. So samples are those of committed steps and nothing else,
whoever is lost when; of times the last turn of a lost process is missing.

If all who have the state are lost at once, the accounts of who comes next begin at the checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from paceline.train.stragglers import Pace

_KEYS = ("samples", "data_s", "compute_s", "wait_s", "sent_bytes")


class Accounts:
    """
    >>> accounts = Accounts(own=3)
    >>> accounts.committed([(1, "a"), (3, "b")], [Pace(0.0, 1.0, 1.0, samples=8), Pace(0.0, 2.0, 1.0, samples=4)])
    >>> [(row["rank"], row["samples"], row["lost"]) for row in accounts.rows(here=[3], left=[])]
    [(1, 8.0, True)]
    """

    def __init__(self, own: int) -> None:
        self.seconds = 0.0  # of all turns, one after another
        self._own = own
        self._known: dict[int, dict[str, float]] = {}
        self._hosts: dict[int, str] = {}  # where each was last
        self._before: dict[str, float] | None = None  # what earlier processes of this member had done

    def committed(self, members: Sequence[tuple[int, str]], paces: Sequence[Pace]) -> None:
        """All have taken a step: ids and hosts, in the order of ranks."""
        if self._before is None:
            self._before = dict.fromkeys(_KEYS, 0.0)
        for (id, host), pace in zip(members, paces):
            self._hosts[id] = host
            account = self._known.setdefault(id, dict.fromkeys(_KEYS, 0.0))
            for key in _KEYS:
                account[key] += getattr(pace, key)
        self.seconds += max((pace.own_s + pace.wait_s for pace in paces), default=0.0)

    def state(self) -> dict[str, Any]:
        known = [[id, self._hosts[id], *account.values()] for id, account in self._known.items()]
        return {"seconds": self.seconds, "known": known}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over those of one who is ahead."""
        self.seconds = state["seconds"]
        self._known = {id: dict(zip(_KEYS, amounts)) for id, _, *amounts in state["known"]}
        self._hosts = {id: host for id, host, *_ in state["known"]}
        if self._before is None:
            self._before = dict(self._known.get(self._own) or dict.fromkeys(_KEYS, 0.0))

    def own(self, totals: Mapping[str, Any]) -> dict[str, Any]:
        """This member's row: what this process has measured, which knows more of its times, and what earlier ones at
        its place had done."""
        before = self._before or dict.fromkeys(_KEYS, 0.0)
        mine = {key: totals.get(key, 0.0) + before[key] for key in _KEYS}
        mine["samples"] = self._known.get(self._own, mine)["samples"]
        seconds = totals.get("seconds", 0.0) + sum(before[key] for key in ("data_s", "compute_s", "wait_s"))
        return {**totals, **mine, "seconds": seconds, "rank": self._own}

    def rows(self, here: Collection[int], left: Collection[int]) -> list[dict[str, Any]]:
        """Everybody else's; `left`: who is not here and was asked to go, or went by itself."""
        rows = []
        for id, account in sorted(self._known.items()):
            gone = {} if id in here else {"left": True} if id in left else {"lost": True}
            seconds = sum(account[key] for key in ("data_s", "compute_s", "wait_s"))
            if id != self._own and (account["samples"] or seconds):
                rows.append({"rank": id, "host": self._hosts[id], **account, "seconds": seconds, **gone})
        return rows
