"""A member's line to the scheduler, in an elastic run.

It hears of new views and of the wish that this member leaves, and says what happened to it. While the scheduler is away
the line is dialled again and training goes on; what had been said and may be lost is said again. Only who needs a new
view, and cannot get one because it is cut off, is told so and stops.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec

from paceline.core.errors import ConfigError, Dismissed, Interrupted, PacelineError, TimedOut
from paceline.membership.messages import Refused
from paceline.membership.orders import (
    Arrive,
    Broken,
    Come,
    Drain,
    Formed,
    Going,
    Here,
    Leave,
    NewView,
    Noted,
    Ready,
    Slow,
    Standing,
    ToMember,
    decode,
    encode,
)
from paceline.membership.tie import Final, Tie, left
from paceline.transport.channel import Channel

Said = Ready | Broken | Formed | Here | Going | Leave

_ANSWER_LIMIT_S = 5.0
_LEAVE_LIMIT_S = 10.0  # for a Leave to be in the journal
_PROBE_S, _PROBE_MOST_S = 3.0, 60.0  # a line on which nothing comes is dialled again: it may be dead


class Line:
    """Opens the line and returns when this member is counted in; raises what a refusal says.

    `newest` is the view with the highest number that was heard, whether this member is in it or not; `on_view` is
    called with each, in the line's thread. Set it, then look at `newest`.
    """

    def __init__(self, address: str, token: str, arrive: Arrive, *, limit_s: float) -> None:
        self._arrive = arrive
        self._address = address
        self._changed = threading.Condition()
        self._term = 0
        self._owed: dict[type, Said] = {}  # what a break may have swallowed
        self._refused: Refused | None = None
        self._noted = False
        self._closed = False
        self._cut_off = False  # it has waited for a view long enough
        self._standing: Standing | None = None
        self.newest: NewView | None = None
        self.on_view: Callable[[NewView], None] | None = None
        self.drained = False
        self.come = 0  # the number of the view whose members are on their way to it
        try:
            self._tie = Tie(address, token, self._greet, self._heard, limit_s, self._wake)
        except Final:
            assert self._refused is not None
            raise self._dismissal(self._refused) from None

    @property
    def standing(self) -> Standing:
        """The newest answer to this member's arrival."""
        assert self._standing is not None
        return self._standing

    def newer(self, than: int, limit_s: float) -> NewView:
        """The next view with a number higher than `than`.

        TimedOut where none comes; Interrupted where this member is cut off from the scheduler, or was asked to leave;
        and what a refusal says.
        """
        deadline, probe_s = time.monotonic() + limit_s, _PROBE_S
        probe_at = time.monotonic() + probe_s
        with self._changed:
            while not (self.newest and self.newest.view.number > than):
                if self._refused:
                    raise self._dismissal(self._refused)
                if self._closed:
                    raise Interrupted("the line to the scheduler was closed on this side")
                if self.drained:
                    raise Interrupted(f"member {self._arrive.id} was asked to leave")
                now = time.monotonic()
                if now >= deadline and not self._tie.up:
                    self._cut_off = True
                    raise Interrupted(
                        f"member {self._arrive.id} is cut off from the scheduler at {self._address} for {limit_s:g} s "
                        f"and stops: the others may go on without it"
                    )
                if now >= deadline:
                    raise TimedOut(f"no view after view {than} within {limit_s:g} s")
                if now >= probe_at:
                    self._tie.cut()
                    probe_s = min(2 * probe_s, _PROBE_MOST_S)
                    probe_at = now + probe_s
                self._changed.wait(min(deadline, probe_at) - now)
            return self.newest

    def ready(self, view: int) -> None:
        """I can be taken into a view: before my first batch (0), or left out of `view`."""
        self._say(Ready(view))

    def broken(self, view: int, blamed: int, reason: str) -> None:
        """The group of `view` broke here; `blamed`: an id, or -1."""
        self._say(Broken(view, blamed, reason))

    def formed(self, view: int, step: int) -> None:
        """All of `view` have met, and go on from a step."""
        self._say(Formed(view, step))

    def here(self, view: int, round: int, quorum: int, grace_s: float) -> None:
        """I am at a round: see `quorum`."""
        self._say(Here(view=view, round=round, quorum=quorum, grace_s=grace_s))

    def going(self, view: int) -> None:
        """I go to a planned view, with the others who were in the one before."""
        self._say(Going(view))

    def slow(self, id: int, why: str) -> None:
        """A member holds the others up: it should leave. A wish that is lost is made again by who made it."""
        self._tie.send(encode(Slow(id, why)))

    def leave(self, reason: str) -> None:
        """Do not wait for me: finished, drained or failed. Returns when the scheduler knows, or after some seconds; at
        once where this member has given up reaching it."""
        if self._cut_off and not self._tie.up:
            return
        self._say(Leave(reason))
        deadline = time.monotonic() + _LEAVE_LIMIT_S
        with self._changed:
            while not (self._noted or self._refused or self._closed) and left(deadline):
                self._changed.wait(left(deadline))

    def close(self) -> None:
        """Close the line, and wake who waits for a view."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._tie.close()

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _say(self, message: Said) -> None:
        with self._changed:
            self._owed[type(message)] = message
        self._tie.send(encode(message))

    def _greet(self, channel: Channel) -> None:
        with self._changed:
            held = self.newest.view.number if self.newest else self._arrive.view
            owed = list(self._owed.values())
        channel.send(encode(msgspec.structs.replace(self._arrive, view=held)))
        answer: ToMember = decode(channel.recv(_ANSWER_LIMIT_S), ToMember)
        self._obey(answer)
        if not isinstance(answer, Standing):
            raise ConfigError(f"unexpected answer from the scheduler: {type(answer).__name__}")
        for message in owed:
            channel.send(encode(message))

    def _heard(self, data: bytearray) -> None:
        message: ToMember = decode(data, ToMember)
        self._obey(message)

    def _obey(self, message: ToMember) -> None:
        fresh: NewView | None = None
        with self._changed:
            if isinstance(message, Refused):
                self._refused = message
                self._changed.notify_all()
                raise Final
            if message.term < self._term:  # of a scheduler that was replaced
                return
            self._term = message.term
            if isinstance(message, Standing):
                self._standing = message
            elif isinstance(message, Drain):
                self.drained = True
            elif isinstance(message, Come):
                self.come = max(self.come, message.view)
            elif isinstance(message, Noted):
                self._noted = True
            elif self.newest is None or message.view.number > self.newest.view.number:
                self.newest = fresh = message
                self._forget(message)
            self._changed.notify_all()
        if fresh and self.on_view:
            self.on_view(fresh)

    def _forget(self, new: NewView) -> None:
        """What has been said of older views matters no more; a Ready does until this member is in one."""
        for kind in (Broken, Formed):
            self._owed.pop(kind, None)
        if any(m.id == self._arrive.id for m in new.view.members):
            self._owed.pop(Ready, None)

    def _dismissal(self, refused: Refused) -> PacelineError:
        error = refused.error()
        return Dismissed(f"member {self._arrive.id} ends: {error}") if type(error) is Interrupted else error

    def _wake(self) -> None:
        with self._changed:
            self._closed = self._closed or self._refused is None
            self._changed.notify_all()
