"""What to say of an elastic run while it goes on: who was lost and how, who is started again, who has come.

It is read off the scheduler's own picture, not guessed from what the launcher sees: only the scheduler knows whether a
lost member is replaced, and what it knows of other hosts is told too.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from paceline.core.errors import PacelineError
from paceline.membership.agent_line import look
from paceline.membership.orders import Picture, Seen, Site

_LOOK_S = 0.3  # shorter than the time before a replacement
_LIMIT_S = 2.0  # for an answer


def tell(before: Picture | None, after: Picture, replacements: int) -> list[str]:
    """What has happened between two pictures, a line each; before the first, nothing has."""
    lines = []
    earlier = {seen.id: seen for seen in before.members} if before else {}
    was_in, is_in = _ids(before) if before else set(), _ids(after)
    for seen in after.members:
        old = earlier.get(seen.id)
        lost_now = seen.state == "lost" and (old is None or old.state != "lost")
        replaced_now = (old is None or old.state != "lost") and seen.replaced > (old.replaced if old else 0)
        if lost_now or replaced_now:
            lines.append(_lost(seen, after, replacements))
        elif old and old.state != "drained" and seen.state == "drained":
            lines.append(f"member {seen.id} has left: {_train(is_in - {seen.id})}")
    if came := sorted(is_in - was_in) if was_in else []:
        who = ("member " if len(came) == 1 else "members ") + ", ".join(map(str, came))
        lines.append(f"{who} joined: {_train(is_in)}")
    was = {site.name: site.state for site in before.hosts} if before else {}
    new = [site for site in after.hosts if site.state != was.get(site.name, "")]
    return lines + [_host(site, was.get(site.name, "")) for site in new if before or site.state == "quarantined"]


def gone(what: str, times: int, most: int, wait_s: float | None) -> str:
    """Of a lost member, which was started again so often before; None: it is not any more.

    >>> gone("member 2 was killed", 1, 3, 0.5)
    'member 2 was killed; the others go on; it is started again in 0.5 s (2 of 3)'
    >>> gone("member 2 was killed", 1, 1, None)
    'member 2 was killed; the others go on without it: it was started again once already'
    """
    if wait_s is not None:
        return f"{what}; the others go on; it is started again in {wait_s:.1f} s ({times + 1} of {most})"
    often = "once" if times == 1 else f"{times} times"
    used_up = f": it was started again {often} already" if times >= most > 0 else ""
    return f"{what}; the others go on without it{used_up}"


class Story:
    """Looks at a run now and then, and says what has happened."""

    def __init__(self, address: str, token: str, replacements: int, say: Callable[[str], None]) -> None:
        self._where = (address, token)
        self._replacements = replacements
        self._say = say
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
        closed = False
        while not closed:
            closed = self._closed.wait(_LOOK_S)  # and look a last time
            with contextlib.suppress(PacelineError):  # it is started again, and tells us then
                picture = look(*self._where, limit_s=_LIMIT_S)
                for line in tell(self.newest, picture, self._replacements):
                    self._say(line)
                self.newest, self.met = picture, self.met or has_met(picture)


def has_met(picture: Picture) -> bool:
    """Whether any member has come to the scheduler. One may also finish without having come."""
    here = ("arrived", "ready", "in", "draining", "drained")
    return picture.view is not None or any(seen.state in here for seen in picture.members)


def _host(site: Site, was: str) -> str:
    """How a host's state has changed."""
    slots = "1 slot" if site.slots == 1 else f"{site.slots} slots"
    return f"host {site.name} " + {
        "up": f"has joined, with {slots}" if not was else "is heard again" if was == "silent" else "is back",
        "silent": "is not heard any more",
        "leaving": "leaves: its members go, and are started elsewhere if there is room",
        "quarantined": "is quarantined: it keeps losing members, and none is started there any more",
    }.get(site.state, site.state)


def _ids(picture: Picture) -> set[int]:
    return {member.id for member in picture.view.members} if picture.view else set()


def _train(ids: set[int]) -> str:
    return "1 member trains now" if len(ids) == 1 else f"{len(ids)} members train now"


def _lost(seen: Seen, picture: Picture, replacements: int) -> str:
    what = f"member {seen.id} {seen.why or 'was lost'}"
    if seen.state != "lost":  # it runs again already
        return f"{what}; the others go on; it was started again ({seen.replaced} of {replacements})"
    wait_s = max(0.0, seen.again_at - seen.since) if seen.again_at else None
    return gone(what, seen.replaced, replacements, wait_s)
