"""The rendezvous: where the members of a run meet and become a view.

It runs in the launcher's process, or in member 0's where an engine started them, on threads of its own, and imports
no torch. A round begins with the
first member that says hello and ends when all have: each gets the same view and the launcher's settings.
When one cannot come any more, those who wait are told at once; when the limit is reached, they are told who
is missing.

A member whose process ends is noticed twice: by its channel, and by the agent, which calls `gone`. Where lost
members are replaced, who comes in its place afterwards gets the view as it is now, with its own address, at once.
"""

from __future__ import annotations

import contextlib
import threading
import time

from paceline.core.errors import ConfigError, Interrupted, PacelineError, TimedOut
from paceline.core.settings import Settings
from paceline.core.view import Member, View
from paceline.membership.messages import (
    MAX_MESSAGE_BYTES,
    Answer,
    Refused,
    Wait,
    Welcome,
    decode_hello,
    encode,
)
from paceline.transport.channel import Channel, Listener

_HELLO_LIMIT_S = 10.0  # between connecting and saying hello
_GOODBYE_LIMIT_S = 10.0  # between our last word and the other side's closing
_TICK_S = 1.0


class Rendezvous:
    """Waits for `size` members; lives until closed. `replaces`: lost ones are started again."""

    def __init__(
        self,
        size: int,
        settings: Settings,
        token: str,
        host: str = "127.0.0.1",
        *,
        port: int = 0,
        replaces: bool = False,
    ) -> None:
        self._size = size
        self._replaces = replaces
        self._settings = settings
        self._listener = Listener(host, token, port=port, max_message_bytes=MAX_MESSAGE_BYTES)
        self.address = self._listener.address
        self._lock = threading.Lock()
        self._number = 1  # of the view that the present round will give
        self._arrived: dict[int, tuple[Member, Channel]] = {}
        self._began = 0.0  # when the first of them came
        self._joined: dict[int, Member] = {}  # of the last view
        self._gone: dict[int, str] = {}  # ranks whose process has ended, and how
        self._failure: Refused | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name="paceline-rendezvous", daemon=True)
        self._thread.start()

    def arrived(self) -> list[int]:
        """The ranks that wait, or that are in the last view if nobody waits."""
        with self._lock:
            return sorted(self._arrived or self._joined)

    def gone(self, rank: int, how: str) -> None:
        """A member's process has ended; who waits for it will wait in vain."""
        with self._lock:
            self._gone[rank] = how
            self._fail_if_hopeless()

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            channels = [channel for _, channel in self._arrived.values()]
        self._listener.close()
        for channel in channels:
            channel.close()
        self._thread.join()

    def _accept(self) -> None:
        while not self._closed:
            try:
                channel = self._listener.accept(_TICK_S)
            except TimedOut:
                continue
            except Interrupted:
                return
            threading.Thread(target=self._meet, args=(channel,), name="paceline-arrival", daemon=True).start()

    def _meet(self, channel: Channel) -> None:
        """From a member's hello to its last word."""
        with contextlib.closing(channel), contextlib.suppress(Interrupted):
            try:
                rank, deadline = self._admit(channel)
            except PacelineError as error:  # this one is refused; the others go on waiting
                if not isinstance(error, Interrupted):
                    channel.send(encode(Refused("config", str(error))))
                    channel.recv(_GOODBYE_LIMIT_S)
                return
            try:
                while True:  # a member says nothing more: what ends this is its closing, or the limit
                    channel.recv(deadline - time.monotonic())
            except TimedOut:
                self._fail_at_limit(rank, channel)
                with contextlib.suppress(Interrupted):
                    channel.recv(_GOODBYE_LIMIT_S)
            except Interrupted:
                self._left(rank, channel)

    def _admit(self, channel: Channel) -> tuple[int, float]:
        """Count a newcomer in, or raise why not; its rank and how long to stay with it."""
        hello = decode_hello(channel.recv(_HELLO_LIMIT_S))
        me, limit_s = hello.member, self._settings.join_limit_s
        channel.name = f"member {me.rank}"
        if hello.size != self._size:
            raise ConfigError(
                f"member {me.rank} believes in {hello.size} members, the launcher started {self._size}: "
                f"do not set PACELINE_SIZE by hand"
            )
        if not 0 <= me.rank < self._size:
            raise ConfigError(f"rank {me.rank} is not one of 0 to {self._size - 1}: do not set PACELINE_RANK by hand")
        with self._lock:
            if self._replaces and me.rank in self._joined and me.rank in self._gone and not self._arrived:
                self._replace(me, channel)
                return me.rank, time.monotonic() + limit_s
            other = self._arrived[me.rank][0] if me.rank in self._arrived else self._joined.get(me.rank)
            again = other is not None and me.rank not in self._arrived and _process(other) == _process(me)
            if other is not None and not again:
                raise ConfigError(
                    f"rank {me.rank} is taken by process {other.pid} on {other.host}: a member joins once; "
                    f"a program that a member starts inherits its place, so clear PACELINE_* for it"
                )
            if not self._arrived:
                self._began = time.monotonic()
            deadline = self._began + limit_s
            channel.send(encode(self._failure or Wait(limit_s=max(0.0, deadline - time.monotonic()))))
            if self._failure is None:
                self._arrived[me.rank] = (me, channel)
                self._fail_if_hopeless()
            if len(self._arrived) == self._size:
                self._complete()
        return me.rank, deadline

    def _complete(self) -> None:
        members = tuple(self._arrived[rank][0] for rank in range(self._size))
        self._tell_all(Welcome(View(number=self._number, members=members), self._settings, self._replaces))
        self._joined = {m.rank: m for m in members}
        self._number += 1

    def _replace(self, me: Member, channel: Channel) -> None:
        """Let one in that comes in the place of a member that is gone."""
        del self._gone[me.rank]
        self._joined[me.rank] = me
        view = View(number=self._number - 1, members=tuple(self._joined[rank] for rank in range(self._size)))
        channel.send(encode(Welcome(view, self._settings, self._replaces, late=True)))

    def _left(self, rank: int, channel: Channel) -> None:
        """A member closed its channel: its part after our answer, the end of the round before it."""
        with self._lock:
            if self._waits(rank, channel):
                del self._arrived[rank]
                self._fail(Refused("left", f"member {rank} left before all {self._size} members had arrived"))

    def _fail_at_limit(self, rank: int, channel: Channel) -> None:
        with self._lock:
            if not self._waits(rank, channel):
                return
            missing = [r for r in range(self._size) if r not in self._arrived]
            limit_s = self._settings.join_limit_s
            self._fail(Refused("timeout", missing_message(missing, limit_s, self._size)))

    def _fail_if_hopeless(self) -> None:
        missing = [r for r in self._gone if r not in self._arrived]
        if self._arrived and missing:
            rank = missing[0]
            self._fail(Refused("left", f"member {rank} {self._gone[rank]} and cannot be waited for"))

    def _fail(self, why: Refused) -> None:
        self._failure = why
        self._tell_all(why)

    def _tell_all(self, answer: Answer) -> None:
        data = encode(answer)
        for _, channel in self._arrived.values():
            with contextlib.suppress(Interrupted):  # its own thread will notice
                channel.send(data)
        self._arrived = {}

    def _waits(self, rank: int, channel: Channel) -> bool:
        return rank in self._arrived and self._arrived[rank][1] is channel


def missing_message(missing: list[int], limit_s: float, size: int) -> str:
    """What to tell those who came when others did not.

    >>> missing_message([1, 3], 5.0, 4).partition(":")[0]
    'members 1, 3 of 4 did not arrive within 5 s'
    """
    who = ("member " if len(missing) == 1 else "members ") + ", ".join(map(str, missing))
    return (
        f"{who} of {size} did not arrive within {limit_s:g} s: see what their logs say, check that every "
        f"member calls paceline.join(), or raise --join-limit-s if they need longer to start"
    )


def _process(member: Member) -> tuple[str, int]:
    return member.host, member.pid
