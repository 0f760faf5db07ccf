"""The mesh: channels between the members of one view, made when they are first asked for.

A channel is known by the two ranks and a lane, so that traffic of different kinds never mixes. Whoever
needs it first dials; where both dial at once the higher rank's connection is kept, so no order of asking
can deadlock. Connections are taken in the listener's own short threads: a member answers while it computes
or waits.

That is also how a fault gets its name. A member that waits says for whom (`waiting`). When a wait reaches
its limit or a channel breaks, `trace` asks along the chain of who waits for whom until it finds the member
that does not answer or waits for nobody, and `tell` closes the lane on all members and says why.

One who replaces a lost member comes to a mesh that was formed without it: it has a life of its own (`life`), dials
whomever it needs, and is not dialled. What it opens goes to `newcomer`, once the lane of the one before it is closed.

A mesh lives as long as its view: connections of an older view are refused, those of a newer one told to try
again later. The listener belongs to the member and serves the next mesh; `close` leaves it open, and
refuses until then.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeVar

import msgspec

from paceline.core.errors import ConfigError, Interrupted, PacelineError, TimedOut
from paceline.core.view import View
from paceline.transport.channel import Channel, Listener, connect

_HELLO_LIMIT_S = 10.0  # for the few bytes after the token was proven
_TRY_LIMIT_S = 2.0  # for one try to connect; between tries a close is noticed
_HELLO_BYTES = 1 << 16
_ASK_LIMIT_S = 2.0  # a member that lives answers within this, however busy its cores


class Fault(msgspec.Struct, frozen=True):
    """Why a lane broke, the same on all of its members."""

    rank: int  # the member at fault
    reason: str  # what is said of it: "did not answer for 30 s"
    timed_out: bool

    def error(self, where: str) -> Interrupted:
        kind = TimedOut if self.timed_out else Interrupted
        return kind(f"{where}: member {self.rank} {self.reason}")


class _Key(NamedTuple):
    rank: int
    lane: str
    sender: int


class _Hello(msgspec.Struct, frozen=True):
    wish: Literal["join", "ask", "tell", "visit"]
    rank: int
    view: int
    lane: str
    sender: int = -1
    fault: Fault | None = None
    life: int = 0  # 0: it was there when the view was formed


class _Reply(msgspec.Struct, frozen=True):
    verdict: Literal["welcome", "crossed", "early", "refused"]
    reason: str = ""
    waits_for: int | None = None
    fault: Fault | None = None


_hello = msgspec.msgpack.Decoder(_Hello)
_reply = msgspec.msgpack.Decoder(_Reply)
_encode = msgspec.msgpack.Encoder().encode

_T = TypeVar("_T")


class Mesh:
    """This member's channels to the others of `view`. `encrypt` as in `Listener`."""

    def __init__(
        self,
        view: View,
        rank: int,
        token: str,
        listener: Listener,
        limit_s: float,
        *,
        encrypt: bool | None = None,
        life: int = 0,
    ) -> None:
        self.view = view
        self.rank = rank
        self.limit_s = limit_s
        self._life = life
        self.newcomer: Callable[[int, str, int, Channel], None] | None = None  # gets rank, lane, life and channel
        self._members = {member.rank: member for member in view.members}
        if rank not in self._members:
            raise ConfigError(f"rank={rank} is not in view {view.number}, which has {sorted(self._members)}")
        self._token = token
        self._encrypt = encrypt
        self._listener = listener
        self._channels: dict[_Key, Channel] = {}
        self._dialing: set[_Key] = set()
        self._opening: set[Channel] = set()  # connected, not yet welcome
        self.waiting: dict[str, int] = {}  # by lane: the rank for whom this member waits, for those who ask
        self._faults: dict[str, Fault] = {}
        self.visit: Callable[[Channel], None] | None = None  # takes those who come from outside the run
        self._closed = False
        self._changed = threading.Condition()
        listener.hand_to(self._welcome)

    def channel(self, rank: int, lane: str, sender: int = -1) -> Channel:
        """The channel to a member, made if need be. TimedOut and Interrupted name the member.

        Where a lane wants one channel for each direction, `sender` is the rank that will send on it.
        """
        key = _Key(rank, lane, sender)
        deadline = time.monotonic() + self.limit_s
        with self._changed:
            channel = self._channels.get(key)
            if channel is not None and not self._closed:
                return channel
            if rank == self.rank or rank not in self._members:
                raise ConfigError(f"rank={rank}: member {self.rank} has channels to {self._others()}")
            if key in self._dialing:  # another thread of ours
                return self._arrival(key, deadline)
            self._raise_if_closed()
            self._dialing.add(key)
        try:
            return self._dial(key, deadline)
        finally:
            with self._changed:
                self._dialing.discard(key)
                self._changed.notify_all()

    def trace(self, lane: str, fault: Fault) -> Fault:
        """What is behind a fault: follow who waits for whom, from the member that seems to be at fault."""
        rank, seen = fault.rank, [self.rank]
        while rank not in seen:
            seen.append(rank)
            try:
                reply = self._say(rank, _Hello("ask", self.rank, self.view.number, lane))
            except PacelineError:
                break  # it does not answer
            if reply.fault is not None:
                return reply.fault
            if reply.waits_for is None:
                break  # it could go on, and did not
            rank = reply.waits_for
        else:
            chain = " → ".join(map(str, [*seen[seen.index(rank) :], rank]))
            reason = f"waits in a circle ({chain}): were collectives called in another order on some member?"
            return Fault(rank, reason, fault.timed_out)
        return Fault(rank, fault.reason, fault.timed_out)

    def tell(self, lane: str, fault: Fault, ranks: Sequence[int]) -> Fault:
        """Close `lane` here and, telling why, on the other `ranks`. The first fault that was told stands."""
        with self._changed:
            fault = self._note(lane, fault)
        hello = _Hello("tell", self.rank, self.view.number, lane, fault=fault)
        for rank in ranks:
            if rank not in (self.rank, fault.rank) and not self._closed:
                with contextlib.suppress(PacelineError):  # it cannot be reached, and will notice by itself
                    self._say(rank, hello)
        return fault

    def fault(self, lane: str) -> Fault | None:
        """Why `lane` broke, where anybody has told."""
        return self._faults.get(lane)

    def close(self) -> None:
        """Close every channel: the abort. Whoever waits in one, here or elsewhere, gets Interrupted."""
        with self._changed:
            self._closed = True
            channels = [*self._channels.values(), *self._opening]
            self._changed.notify_all()
        for channel in channels:
            channel.close()

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def sent_bytes(self) -> int:
        with self._changed:
            return sum(channel.sent_bytes for channel in self._channels.values())

    # ---- the side that dials

    def _dial(self, key: _Key, deadline: float) -> Channel:
        rank, lane, sender = key
        hello = _Hello("join", self.rank, self.view.number, lane, sender, life=self._life)
        while True:
            channel = self._connect(rank, deadline)
            try:
                reply = self._exchange(channel, hello, deadline)
                if reply.verdict == "welcome" and self._keep(key, channel):
                    return channel
            except BaseException:
                channel.close()
                raise
            channel.close()
            if reply.verdict == "refused":
                raise Interrupted(f"member {rank} refused lane {lane!r}: {reply.reason}")
            with self._changed:
                self._raise_if_closed()
                if reply.verdict == "crossed":
                    return self._arrival(key, deadline)
                if time.monotonic() >= deadline:
                    raise TimedOut(f"member {rank} did not reach view {self.view.number} in {self.limit_s:g} s")
                self._changed.wait(0.05)  # early: it has not formed this view yet

    def _keep(self, key: _Key, channel: Channel) -> bool:
        with self._changed:
            if self._closed:
                return False
            self._channels[key] = channel
            self._changed.notify_all()
            return True

    def _say(self, rank: int, hello: _Hello) -> _Reply:
        deadline = time.monotonic() + _ASK_LIMIT_S
        with self._connect(rank, deadline, patient=False) as channel:
            return self._exchange(channel, hello, deadline)

    def _connect(self, rank: int, deadline: float, patient: bool = True) -> Channel:
        address = self._members[rank].address
        while True:
            left = deadline - time.monotonic()
            try:
                channel = connect(address, self._token, min(left, _TRY_LIMIT_S), encrypt=self._encrypt, patient=patient)
            except TimedOut as error:
                self._raise_if_closed()
                if left > _TRY_LIMIT_S:
                    continue
                raise TimedOut(f"member {rank} cannot be reached: {error}") from None
            channel.name = f"member {rank}"
            channel.send_limit_s = self.limit_s
            return channel

    def _exchange(self, channel: Channel, hello: _Hello, deadline: float) -> _Reply:
        with self._changed:
            self._raise_if_closed()
            self._opening.add(channel)
        try:
            channel.send(_encode(hello))
            return _decoded(_reply, channel, deadline - time.monotonic())
        finally:
            with self._changed:
                self._opening.discard(channel)

    # ---- the side that is dialled; runs in the listener's threads

    def _welcome(self, channel: Channel) -> None:
        allowed, channel.max_message_bytes = channel.max_message_bytes, _HELLO_BYTES
        try:
            hello = _decoded(_hello, channel, _HELLO_LIMIT_S)
            channel.max_message_bytes = allowed
            if hello.wish == "visit":
                self._let_in(channel)
                return
            channel.name = f"member {hello.rank}"
            with self._changed:
                reply = self._judge(hello)
                # Sent under the lock, so that it goes before anything that the lane's user sends. It cannot
                # block: nothing else was sent on this connection.
                channel.send(_encode(reply))
                if reply.verdict == "welcome" and hello.wish == "join":
                    channel.send_limit_s = self.limit_s
                    self._channels[_Key(hello.rank, hello.lane, hello.sender)] = channel
                    self._changed.notify_all()
                    if hello.life and self.newcomer:
                        self.newcomer(hello.rank, hello.lane, hello.life, channel)
                    return
        except PacelineError:
            pass  # it went away; if it needs the channel it dials again
        channel.close()

    def _let_in(self, channel: Channel) -> None:
        visit = None if self._closed else self.visit
        reason = "" if visit else "the run is ending" if self._closed else "it has no desk for outsiders"
        channel.send(_encode(_Reply("welcome" if visit else "refused", reason)))
        if visit:
            visit(channel)
        channel.close()

    def _judge(self, hello: _Hello) -> _Reply:
        key = _Key(hello.rank, hello.lane, hello.sender)
        if self._closed or hello.view < self.view.number:
            return _Reply("refused", f"view {hello.view} is over")
        if hello.view > self.view.number:
            return _Reply("early")
        if hello.rank not in self._members or hello.rank == self.rank:
            return _Reply("refused", f"rank {hello.rank} is not another member of view {self.view.number}")
        if hello.wish == "tell" and hello.fault is not None:
            self._note(hello.lane, hello.fault)
        if hello.wish != "join":
            return _Reply("welcome", "", self.waiting.get(hello.lane), self._faults.get(hello.lane))
        if hello.lane in self._faults:
            return _Reply("refused", f"member {self._faults[hello.lane].rank} broke the lane")
        if hello.life:
            old = self._channels.get(key)
            return _Reply("early" if self.newcomer is None or (old and not old.closed) else "welcome")
        if key in self._channels or (key in self._dialing and self.rank > hello.rank):
            return _Reply("crossed")
        return _Reply("welcome")

    # ---- called with the lock held

    def _arrival(self, key: _Key, deadline: float) -> Channel:
        left = max(0.0, deadline - time.monotonic())
        self._changed.wait_for(lambda: self._closed or key in self._channels, left)
        self._raise_if_closed()
        if key not in self._channels:
            raise TimedOut(f"member {key.rank} did not open lane {key.lane!r} within {self.limit_s:g} s")
        return self._channels[key]

    def _note(self, lane: str, fault: Fault) -> Fault:
        """Close the lane, which wakes whoever waits in it. The first fault stands."""
        if lane not in self._faults:
            self._faults[lane] = fault
            for key, channel in self._channels.items():
                if key.lane == lane:
                    channel.close()
            self._changed.notify_all()
        return self._faults[lane]

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise Interrupted(f"the mesh of view {self.view.number} was closed on this side")

    def _others(self) -> list[int]:
        return sorted(self._members.keys() - {self.rank})


def visit(address: str, token: str, limit_s: float) -> Channel:
    """A channel to a member's desk, for one who is not a member. Interrupted where nobody is there or will have us."""
    channel = connect(address, token, limit_s, patient=False)
    try:
        channel.send(_encode(_Hello("visit", -1, 0, "")))
        try:
            reply = _decoded(_reply, channel, limit_s)
        except TimedOut:
            raise
        except Interrupted as error:
            raise Interrupted(
                f"{address} hung up: does that run have an older version of paceline? ({error})"
            ) from None
        if reply.verdict != "welcome":
            raise Interrupted(f"{address} lets nobody in: {reply.reason}")
    except BaseException:
        channel.close()
        raise
    return channel


def _decoded(decoder: msgspec.msgpack.Decoder[_T], channel: Channel, limit_s: float) -> _T:
    try:
        return decoder.decode(channel.recv(max(0.0, limit_s)))
    except msgspec.DecodeError as error:
        raise Interrupted(f"{channel.name} sent what cannot be read: {error}") from None
