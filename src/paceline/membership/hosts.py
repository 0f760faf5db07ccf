"""The hosts of an elastic run as its scheduler knows them: who is silent, where a slot is free, who keeps failing.

Pure state, like the roster that owns it: time comes in with each call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from paceline.membership.orders import Site
from paceline.membership.seats import HostSeen

_FAILURES, _WINDOW_S = 3, 60.0  # so many members lost in so long: quarantine


class Hosts:
    """Hosts by name.

    >>> hosts = Hosts(silence_s=3.0)
    >>> hosts.came("a", 2, now=0.0).slots
    2
    >>> hosts.place(0), hosts.silenced(now=4.0), hosts.place(0)
    ('a', ['a'], None)
    """

    def __init__(self, silence_s: float, known: Iterable[HostSeen] = (), now: float = 0.0) -> None:
        self._silence_s = silence_s
        self.seen = {host.name: host for host in known}
        self._heard = dict.fromkeys(self.seen, now)
        self._silent: set[str] = set()
        self._losses: dict[str, deque[float]] = {}

    def came(self, name: str, slots: int, now: float, agent: str = "") -> HostSeen:
        host = self.seen.setdefault(name, HostSeen(name=name, slots=slots, agent=agent))
        host.slots = slots
        if host.agent != agent:  # the one before was drained, or has died
            host.agent, host.going = agent, False
        self.heard(name, now)
        return host

    def heard(self, name: str, now: float) -> bool:
        """This host lives; True where it had been silent."""
        self._heard[name] = now
        was_silent = name in self._silent
        self._silent.discard(name)
        return was_silent

    def grace(self, now: float) -> None:
        """It was we who did not listen: count everybody's silence from now."""
        self._heard = dict.fromkeys(self._heard, now)

    def silenced(self, now: float) -> list[str]:
        """Those whose silence has just become too long."""
        found = [n for n, at in self._heard.items() if now - at > self._silence_s and n not in self._silent]
        self._silent.update(found)
        return found

    def live(self, name: str) -> bool:
        return name in self.seen and name not in self._silent

    def runs(self, name: str, id: int) -> bool:
        """Whether a host that lives has a process of this member."""
        return self.live(name) and id in self.seen[name].running

    def ended(self, name: str, id: int) -> None:
        if name in self.seen and id in self.seen[name].running:
            self.seen[name].running.remove(id)

    def free(self) -> int:
        """How many more members could be started now."""
        return sum(max(0, h.slots - len(h.running)) for h in self.seen.values() if h.usable and self.live(h.name))

    def place(self, id: int) -> str | None:
        """Where to start this one: fewest failures first, then who came first; not where an earlier process of it still
        runs, as far as is known."""
        able = [h for h in self.seen.values() if h.usable and self.live(h.name) and id not in h.running]
        open_ = [h for h in able if len(h.running) < h.slots]
        return min(open_, key=lambda h: h.lost).name if open_ else None

    def lost(self, name: str, now: float) -> None:
        """A member was lost there. The last host that can be used is not quarantined: budgets end a run, not this."""
        host = self.seen.get(name)
        if host is None:
            return
        host.lost += 1
        times = self._losses.setdefault(name, deque(maxlen=_FAILURES))
        times.append(now)
        others = any(h.usable and self.live(h.name) for h in self.seen.values() if h is not host)
        if len(times) == _FAILURES and now - times[0] <= _WINDOW_S and others:
            host.quarantined = True

    def sites(self) -> tuple[Site, ...]:
        """All of them, for people."""
        return tuple(
            Site(name=host.name, slots=host.slots, running=len(host.running), state=self._state(host))
            for host in self.seen.values()
        )

    def _state(self, host: HostSeen) -> str:
        if host.quarantined:
            return "quarantined"
        return "silent" if not self.live(host.name) else "leaving" if host.going else "up"

    @property
    def quarantined(self) -> tuple[str, ...]:
        return tuple(h.name for h in self.seen.values() if h.quarantined)
