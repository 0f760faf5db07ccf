"""The scheduler of an elastic run: sockets, a clock and a journal around the roster.

A process of its own, started and restarted by the launcher; it imports no torch. Every change is in the journal before
its orders go out, and the port is there too: killed and started again, it is found at the same address, in a higher
term, and training has gone on meanwhile.

    python -m paceline.membership.scheduler [FILE]

reads `Parameters` as one line of JSON from FILE or standard input (the token from there or PACELINE_TOKEN), prints
its address as one line of JSON, and runs until SIGTERM, or until the run is over and everybody has gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from paceline.core.errors import ConfigError, Interrupted, PacelineError, TimedOut
from paceline.core.settings import Settings
from paceline.membership.journal import Journal
from paceline.membership.messages import MAX_MESSAGE_BYTES, Refused
from paceline.membership.orders import (
    Arrive,
    Beat,
    Broken,
    Done,
    DrainHost,
    Ended,
    EndRun,
    Fetch,
    Formed,
    Going,
    Halt,
    Here,
    Host,
    Leave,
    Look,
    Ready,
    Scale,
    Slow,
    Started,
    ToScheduler,
    Work,
    decode,
    encode,
)
from paceline.membership.roster import Roster
from paceline.membership.seats import Rules
from paceline.transport.address import split_address
from paceline.transport.channel import Channel, Listener

_HELLO_LIMIT_S = 10.0  # between connecting and the first word
_TICK_S = 0.1
_PORT_LIMIT_S = 10.0  # for the port of the scheduler before to be free
_SEND_LIMIT_S = 5.0  # after which one who takes nothing is cut off
_SENDERS = 8
_OUTBOX = 1000  # orders that wait for one who takes nothing
_LAST_S = 1.0  # for orders that still go out when we close
_QUIET_S = 3.0  # after the end, with nobody left


class Scheduler:
    """Decides who takes part; lives until closed.

    `journal` is a file's path; where it holds a run, that run goes on. `work` is told to agents of other hosts.
    """

    def __init__(
        self,
        rules: Rules,
        token: str,
        journal: Path | str,
        host: str = "127.0.0.1",
        work: Work | None = None,
        port: int = 0,
    ) -> None:
        self._work = work
        self._lock = threading.Lock()  # of the roster, the journal and the lines
        self._lines: dict[int | str, _Line] = {}  # by a member's id or a host's name
        self._open: set[Channel] = set()
        self._closed = threading.Event()
        self._journal = Journal(journal)
        self._journal_failed = False
        try:
            kept = self._journal.load()
            self._port = kept.pop("port", str(port))
            now = time.monotonic()
            self._roster = Roster.load(kept, rules, now) if kept else Roster(rules, now)
            self._save()
            self._listener = self._listen(host, token)
        except BaseException:
            self._journal.close()
            raise
        self.address = self._listener.address
        self.term = self._roster.term
        self._port = str(split_address(self.address)[1])
        self._save()
        self._senders = ThreadPoolExecutor(_SENDERS, thread_name_prefix="paceline-orders")
        self._listener.hand_to(self._meet)
        self._ticker = threading.Thread(target=self._tick, name="paceline-scheduler", daemon=True)
        self._ticker.start()

    @property
    def over(self) -> str | None:
        """Why the run has ended; "": it finished; None: it has not."""
        with self._lock:
            return self._roster.over

    def wait(self, stop: threading.Event) -> None:
        """Until `stop`, or until the run is over and everybody has gone."""
        quiet_since = None
        while not stop.wait(_TICK_S):
            with self._lock:
                quiet = self._roster.over is not None and not self._open
            quiet_since = (quiet_since or time.monotonic()) if quiet else None
            if quiet_since and time.monotonic() - quiet_since >= _QUIET_S:
                return

    def close(self) -> None:
        self._closed.set()
        self._listener.close()
        self._ticker.join()
        deadline = time.monotonic() + _LAST_S
        while any(line.sending for line in self._lines.copy().values()) and time.monotonic() < deadline:
            time.sleep(0.01)  # that the run is over must still go out
        with self._lock:
            channels = list(self._open)
        for channel in channels:
            channel.close()
        self._senders.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            self._journal.close()

    def _listen(self, host: str, token: str) -> Listener:
        deadline = time.monotonic() + _PORT_LIMIT_S
        while True:
            try:
                return Listener(host, token, port=int(self._port), max_message_bytes=MAX_MESSAGE_BYTES)
            except ConfigError:  # somebody's connection may have borrowed the port meanwhile
                if self._port == "0" or time.monotonic() >= deadline:
                    raise
            time.sleep(0.05)

    def _tick(self) -> None:
        while not self._closed.wait(_TICK_S):
            self._apply(lambda now: self._roster.tick(now))

    def _meet(self, channel: Channel) -> None:
        """From somebody's first word to its last; in a thread of its own."""
        channel.send_limit_s = _SEND_LIMIT_S
        channel.notice_silence()
        with self._lock:
            self._open.add(channel)
        if self._closed.is_set():
            channel.close()
        try:
            with contextlib.closing(channel), contextlib.suppress(Interrupted):
                try:
                    first: ToScheduler = decode(channel.recv(_HELLO_LIMIT_S), ToScheduler)
                    self._serve(channel, first)
                except ConfigError as error:
                    channel.send(encode(Refused("config", str(error))))
                    channel.drain(_HELLO_LIMIT_S)
        finally:
            with self._lock:
                self._open.discard(channel)

    def _serve(self, channel: Channel, first: ToScheduler) -> None:
        line = _Line(channel, self._senders)
        if isinstance(first, Look):
            with self._lock:
                picture = self._roster.look(time.monotonic(), time.time())
            channel.send(encode(picture))
            channel.drain(_HELLO_LIMIT_S)
        elif isinstance(first, Scale):
            channel.send(encode(Done(self._scale(first.size))))
            channel.drain(_HELLO_LIMIT_S)
        elif isinstance(first, Halt):
            drain = first.drain
            self._apply(lambda now: self._roster.end_run(drain, now))
            channel.send(encode(Done("the members leave, and the run ends" if drain else "the run ends")))
            channel.drain(_HELLO_LIMIT_S)
        elif isinstance(first, Fetch):
            if self._work is None:
                raise ConfigError(
                    "this run takes no members on other hosts: start it with --listen ADDRESS or --hosts FILE"
                )
            channel.send(encode(self._work))
            channel.drain(_HELLO_LIMIT_S)
        elif isinstance(first, Arrive):
            channel.name, me = f"member {first.id}", first
            try:
                self._apply(lambda now: self._roster.arrive(me.id, me.member, me.view, now), me.id, line)
            except Interrupted as error:
                channel.send(encode(Refused("timeout" if isinstance(error, TimedOut) else "left", str(error))))
                channel.drain(_HELLO_LIMIT_S)
                return
            try:
                self._hear(me.id, line, self._from_member)
            finally:
                if self._forget(me.id, line):
                    self._apply(lambda now: self._roster.down(me.id, now))
        elif isinstance(first, Host):
            channel.name, host = f"the agent of {first.name}", first
            line.agent = host.agent
            self._refuse_twin(host)
            self._apply(
                lambda now: self._roster.host(host.name, host.slots, host.running, now, host.agent, host.ended),
                host.name,
                line,
            )
            try:
                self._hear(host.name, line, self._from_agent)
            finally:
                self._forget(host.name, line)
        else:
            raise ConfigError(f"a line begins with Arrive, Host or a tool's wish, not {type(first).__name__}")

    def _refuse_twin(self, host: Host) -> None:
        with self._lock:
            there = self._lines.get(host.name)
            if there and there.agent != host.agent and self._roster.live(host.name):
                raise ConfigError(f"host {host.name!r} has an agent already: give this one another --name")

    def _hear(self, who: int | str, line: _Line, take: Callable[[int | str, ToScheduler, float], None]) -> None:
        while True:
            data = line.channel.listen()
            try:
                message: ToScheduler = decode(data, ToScheduler)
            except ConfigError:  # out of step: it is closed, and may be opened again
                return
            with self._lock:
                if self._lines.get(who) is not line:  # opened again meanwhile
                    return
                take(who, message, time.monotonic())
                self._give_orders()

    def _from_member(self, who: int | str, message: ToScheduler, now: float) -> None:
        assert isinstance(who, int)
        roster = self._roster
        match message:
            case Ready():
                roster.ready(who, message.view, now)
            case Broken():
                roster.broken(who, message.view, message.blamed, now)
            case Formed():
                roster.formed(who, message.view, now, message.step)
            case Here():
                roster.here(who, message, now)
            case Going():
                roster.going(who, message.view, now)
            case Slow():
                roster.slow(message.id, message.why, now)
            case Leave():
                roster.leave(who, message.reason, now)

    def _from_agent(self, who: int | str, message: ToScheduler, now: float) -> None:
        assert isinstance(who, str)
        roster = self._roster
        match message:
            case Beat():
                roster.beat(who, message.paused, now)
            case Started():
                roster.started(who, message.id, message.pid, now)
            case Ended():
                roster.ended(who, message.id, message.code, now, message.error)
            case DrainHost():
                roster.drain_host(who, now)
            case EndRun():
                roster.end_run(message.drain, now)

    def _scale(self, size: int) -> str:
        with self._lock:
            text = self._roster.scale(size, time.monotonic())
            self._give_orders()
            return text

    def _apply(self, event: Callable[[float], None], who: int | str | None = None, line: _Line | None = None) -> None:
        """Let an event happen, and what follows from it; the first one of a line makes it the way to `who`."""
        with self._lock:
            if self._closed.is_set():
                return
            event(time.monotonic())
            if who is not None and line is not None:
                before, self._lines[who] = self._lines.get(who), line
                if before:
                    before.channel.close()
            self._give_orders()

    def _forget(self, who: int | str, line: _Line) -> bool:
        with self._lock:
            return self._lines.get(who) is line and bool(self._lines.pop(who))

    def _give_orders(self) -> None:
        orders = self._roster.take()
        if orders or self._roster.dirty or self._journal_failed:
            self._save()
        for to, order in orders:
            if line := self._lines.get(to):
                line.put(encode(order))

    def _save(self) -> None:
        try:
            self._journal.save({**self._roster.dump(), "port": self._port})
        except sqlite3.Error as error:
            # A full disk must not stop training. Should this process die too, members know the number of their view.
            if not self._journal_failed:
                print(f"paceline: the scheduler cannot write its journal: {error}; make room", file=sys.stderr)
            self._journal_failed = True
        else:
            self._journal_failed = False


class _Line:
    """The way to one member or agent. Orders go out in turn, by threads that serve all lines: one who takes nothing
    delays nobody."""

    def __init__(self, channel: Channel, senders: ThreadPoolExecutor) -> None:
        self.channel = channel
        self._senders = senders
        self._lock = threading.Lock()
        self._outbox: deque[bytes] = deque()
        self.sending = False
        self.agent = ""  # which one of its host, where it is an agent's

    def put(self, data: bytes) -> None:
        with self._lock:
            self._outbox.append(data)
            if len(self._outbox) > _OUTBOX:
                self.channel.close()
            if self.sending:
                return
            self.sending = True
        with contextlib.suppress(RuntimeError):  # we are closing
            self._senders.submit(self._send)

    def _send(self) -> None:
        while True:
            with self._lock:
                if not self._outbox:
                    self.sending = False
                    return
                data = self._outbox.popleft()
            try:
                self.channel.send(data)
            except (PacelineError, TimedOut):
                self.sending = False
                self.channel.close()
                return


class Parameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the process is told."""

    journal: str
    least: int
    target: int
    most: int
    settings: Settings = Settings()
    silence_s: float = 3.0
    replacements: int = 3
    begin: int = 0
    host: str = "127.0.0.1"  # to listen on
    port: int = 0  # 0: any
    token: str = ""  # else PACELINE_TOKEN
    work: Work | None = None  # None: only the launcher's host has members

    def rules(self) -> Rules:
        return Rules(
            least=self.least,
            target=self.target,
            most=self.most,
            settings=self.settings,
            silence_s=self.silence_s,
            replacements=self.replacements,
            open=self.work is not None,
            begin=self.begin,
        )


def main(arguments: list[str]) -> int:
    """Run a scheduler; see the top of this module."""
    try:
        text = Path(arguments[0]).read_text() if arguments else sys.stdin.readline()
        told = msgspec.json.decode(text, type=Parameters)
        token = told.token or os.environ.get("PACELINE_TOKEN", "")
        scheduler = Scheduler(told.rules(), token, told.journal, told.host, told.work, told.port)
    except (OSError, msgspec.DecodeError, PacelineError) as error:
        print(f"paceline: the scheduler cannot start: {error}", file=sys.stderr)
        return 2
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    print(msgspec.json.encode({"address": scheduler.address, "term": scheduler.term}).decode(), flush=True)
    scheduler.wait(stop)
    scheduler.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
