"""What to say of an elastic run while it goes on: who was lost and how, who is started again, who has come.

It is read off the scheduler's own picture, not guessed from what the launcher sees: only the scheduler knows whether a
lost member is replaced, and what it knows of other hosts is told too.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.core.errors import PacelineError
from paceline.membership.agent_line import look
from paceline.membership.books import LEFT
from paceline.membership.orders import Picture, Seen, Site

_LOOK_S = 0.3  # shorter than the time before a replacement
_LIMIT_S = 2.0  # for an answer
_WAITS_S = 3.0  # after which it is said for whom


def tell(before: Picture | None, after: Picture, replacements: int, stopped_by: int = 0) -> list[str]:
    """What has happened between two pictures, a line each; before the first, nothing has.

    `stopped_by`: the signal by which the run is being stopped; nobody is started again then.
    """
    lines = []
    earlier = {seen.id: seen for seen in before.members} if before else {}
    over = before is not None and before.over is not None
    was_in, is_in = _ids(before) if before else set(), _ids(after)
    for seen in after.members:
        old = earlier.get(seen.id)
        known = old is not None and old.state == "lost" and (not old.unsure or over)
        lost_now = seen.state == "lost" and not known and (not seen.unsure or after.over is not None)
        replaced_now = not known and seen.replaced > (old.replaced if old else 0)
        if lost_now or replaced_now:
            if stopped_by in (0, signal.SIGTERM):  # by another one all are ended at once, which is no news
                lines.append(_lost(seen, after, replacements, stopped=bool(stopped_by)))
        elif old and old.state != "drained" and seen.state == "drained" and after.over is None:
            stay = is_in - {s.id for s in after.members if s.state in ("draining", "leaving", "drained")}
            if seen.why == LEFT:
                lines.append(f"member {seen.id} {LEFT}" + (f"; {_train(stay)}" if stay else ""))
            else:
                lines.append(f"member {seen.id} has left" + (f": {_train(stay)}" if stay else ""))
    if came := sorted(is_in - was_in) if was_in else []:
        who = ("member " if len(came) == 1 else "members ") + ", ".join(map(str, came))
        lines.append(f"{who} joined: {_train(is_in)}")
    was = {site.name: site.state for site in before.hosts} if before else {}
    new = [site for site in after.hosts if site.state != was.get(site.name, "")]
    elsewhere = any(site.state == "up" for site in after.hosts)
    told = [site for site in new if before or site.state == "quarantined"]
    return lines + [_host(site, was.get(site.name, ""), elsewhere) for site in told]


def gone(what: str, times: int, most: int, wait_s: float | None, others: str = "the others go on") -> str:
    """Of a lost member, which was started again so often before; None: it is not any more.

    >>> gone("member 2 was killed", 1, 3, 0.5)
    'member 2 was killed; the others go on; it is started again in 0.5 s (2 of 3)'
    >>> gone("member 2 was killed", 1, 1, None)
    'member 2 was killed; the others go on without it: it was started again once already'
    """
    if wait_s is not None:
        return f"{what}; {others}; it is started again in {wait_s:.1f} s ({times + 1} of {most})"
    often = "once" if times == 1 else f"{times} times"
    used_up = f": it was started again {often} already" if times >= most > 0 else ""
    return f"{what}; {others} without it{used_up}" if others else f"{what}{used_up}"


def waiting(picture: Picture, hosts: Sequence[str], begin: int, limit_s: float) -> str:
    """For which hosts a run waits that has not begun; "": for none. `hosts`: that it is to have; `begin`: how many
    members it begins with, or 0 for all."""
    up = {site.name: site.slots for site in picture.hosts if site.state == "up"}
    room, target = sum(up.values()), begin or picture.target
    if picture.view is not None or picture.over is not None or room >= target:
        return ""
    away = [name for name in hosts if name not in up]
    who = f"host{'s' if len(away) > 1 else ''} {', '.join(away)}" if away else "a host with free slots"
    reached = f"reached {len(hosts) - len(away)} of {len(hosts)}; " if hosts else ""
    members = "1 member" if picture.least == 1 else f"{picture.least} members"
    then = f"; begins without after {limit_s:g} s" if room >= picture.least else ""
    return f"waiting for {who} ({reached}needs at least {members}, and has room for {room} of {target}{then})"


@dataclass(frozen=True)
class Waits:
    """What a run that has not begun waits for; see `waiting`."""

    hosts: Callable[[], Sequence[str]] = tuple
    begin: int = 0
    limit_s: float = 0.0


class Story:
    """Looks at a run now and then, and says what has happened."""

    def __init__(
        self,
        address: str,
        token: str,
        replacements: int,
        say: Callable[[str], None],
        waits: Waits | None = None,
        stopped_by: Callable[[], int] = lambda: 0,
    ) -> None:
        self._waits = waits or Waits()
        self._waited = ""  # what was said of it last
        self._where = (address, token)
        self._replacements = replacements
        self._say = say
        self._stopped_by = stopped_by
        self._closed = threading.Event()
        self.newest: Picture | None = None
        self.met = False
        self._thread = threading.Thread(target=self._run, name="paceline-story", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """After a last look; before the scheduler ends."""
        self._closed.set()
        self._thread.join(_LIMIT_S + 1.0)

    def _run(self) -> None:
        closed, began = False, time.monotonic()
        while not closed:
            closed = self._closed.wait(_LOOK_S)  # and look a last time
            with contextlib.suppress(PacelineError):  # it is started again, and tells us then
                picture = look(*self._where, limit_s=_LIMIT_S)
                for line in tell(self.newest, picture, self._replacements, self._stopped_by()):
                    self._say(line)
                self.newest, self.met = picture, self.met or has_met(picture)
                if picture.view is not None:
                    began = float("inf")  # who waits later is told of with who was lost
                if time.monotonic() - began > _WAITS_S:
                    self._wait(picture)

    def _wait(self, picture: Picture) -> None:
        line = waiting(picture, self._waits.hosts(), self._waits.begin, self._waits.limit_s)
        if line and line != self._waited:
            self._waited = line
            self._say(line)


def has_met(picture: Picture) -> bool:
    """Whether any member has come to the scheduler. One may also finish without having come."""
    here = ("arrived", "ready", "in", "draining", "leaving", "drained")
    return picture.view is not None or any(seen.state in here for seen in picture.members)


def _host(site: Site, was: str, elsewhere: bool) -> str:
    """How a host's state has changed."""
    slots = "1 slot" if site.slots == 1 else f"{site.slots} slots"
    return f"host {site.name} " + {
        "up": f"has joined, with {slots}" if not was else "is heard again" if was == "silent" else "is back",
        "silent": "is not heard any more",
        "leaving": "leaves: its members go" + (", and are started elsewhere if there is room" if elsewhere else ""),
        "quarantined": "is quarantined: it keeps losing members, and none is started there any more",
    }.get(site.state, site.state)


def _ids(picture: Picture) -> set[int]:
    return {member.id for member in picture.view.members} if picture.view else set()


def _train(ids: set[int]) -> str:
    return "1 member trains now" if len(ids) == 1 else f"{len(ids)} members train now"


def _lost(seen: Seen, picture: Picture, replacements: int, *, stopped: bool) -> str:
    what = f"member {seen.id} {seen.why or 'was lost'}"
    if picture.over is not None or stopped:
        return gone(what, seen.replaced, replacements, None, "")
    left = _ids(picture) - {other.id for other in picture.members if other.state == "lost"}
    others = "the others go on" if len(left) >= picture.least else "the others wait" if left else "nobody is left"
    if seen.state != "lost":  # it runs again already
        return f"{what}; {others}; it was started again ({seen.replaced} of {replacements})"
    wait_s = max(0.0, seen.again_at - seen.since) if seen.again_at else None
    return gone(what, seen.replaced, replacements, wait_s, others if wait_s is not None or left else "")
