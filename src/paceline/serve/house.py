"""The parent of `paceline serve`: takes connections in, gives each to a replica, and looks after replicas and versions.

    one who asks --TCP--> the parent accepts --descriptor--> the replica with the fewest connections, from then on alone
    source --> keeper (here) --> shelf (files) --> every replica's swap

No request passes through here, only new connections: so they are spread evenly, none waits at a replica that is not
warm or has died, and a replica that is started again gets its share. A replica that dies is started again, after a
pause that doubles while it keeps dying. Control pages (`/versions/…`, `/metrics`) reach a replica and are asked of
us; `control` has the answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from paceline.core.errors import ConfigError
from paceline.serve import counts
from paceline.serve.control import Control, Tally
from paceline.serve.counts import Counts
from paceline.serve.door import Door, room
from paceline.serve.fast_lane import answer_bytes
from paceline.serve.keeper import Keeper
from paceline.serve.learner import Learner
from paceline.serve.messages import Ask, Closed, Drain, Failed, Learn, Line, Ready, Reply, Tell, Told
from paceline.serve.predict import refusal
from paceline.serve.private import private_folder
from paceline.serve.refused import Refused
from paceline.serve.replica import SETTINGS, SHELF
from paceline.serve.settings import Settings
from paceline.serve.signals import Signals

_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_STEADY_S = 60.0  # a replica that lived so long may die once without a longer pause
_TELL_S = 1.0  # how long counts of a replica are waited for
_WATCH_S = 1.0
_SILENT_S = 30.0  # a replica that does not answer for so long is stuck
_SLACK_S = 5.0
_TWICE_S = 0.5  # a signal to a process and to its group, as `timeout` sends it, comes twice
_FIRST_S = 3.0  # in which a version that is there is taken, or refused
_FULL = Refused(503, "no replica can take another connection now", retry_after_s=1)


class Seat:
    """Where one replica is, or will be again."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.process: subprocess.Popen[bytes] | None = None
        self.line: Line | None = None
        self.talk: socket.socket | None = None
        self.lane: socket.socket | None = None
        self.ready = False
        self.connections = 0
        self.counts = Counts()
        self.heard = 0.0  # when it last told its counts
        self.pause_s = _PAUSE_S


class House:
    """See the module. `say` prints a line for whoever started it."""

    def __init__(
        self,
        settings: Settings,
        listener: socket.socket,
        directory: Path,
        control: Control,
        *,
        say: Callable[[str], None],
        started: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._door = Door(listener, self._give, answer_bytes(refusal(_FULL), close=True), say=say)
        self._room = room()  # for connections, in each replica
        self._directory = directory
        self._control = control
        self._say = say
        self._started = started  # once, with how replicas compute
        self._seats = [Seat(index) for index in range(settings.replicas)]
        self._gone = Counts()  # of replicas that have ended
        self._starts = 0
        self._numbers = itertools.count(1)
        self._told: dict[int, asyncio.Future[Counts]] = {}
        self._ending = asyncio.Event()
        self._ended_at = -math.inf
        self._why = ""  # why nothing can be served
        self._answering: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Until `end`; the exit code."""
        self._loop = asyncio.get_running_loop()
        self._door.open()
        seats = [asyncio.create_task(self._keep(seat)) for seat in self._seats]
        watching = asyncio.create_task(self._watch())
        await self._ending.wait()
        watching.cancel()
        if self._why:
            self._kill()
            await asyncio.wait(seats)
            raise ConfigError(self._why)
        return await self._drain(seats)

    def end(self) -> None:
        """When the requests under way are answered; asked again, at once."""
        now = time.monotonic()
        if self._ending.is_set() and now - self._ended_at > _TWICE_S:
            self._say("ends at once")
            self._kill()
        elif not self._ending.is_set():
            self._ended_at = now
            self._ending.set()

    def _kill(self) -> None:
        for seat in self._seats:
            if seat.process:
                seat.process.kill()

    async def _drain(self, seats: list[asyncio.Task[None]]) -> int:
        self._say("ends when the requests under way are answered")
        self._door.close()
        for seat in self._seats:
            if seat.line:
                seat.line.send(Drain())
        _, left = await asyncio.wait(seats, timeout=self._settings.drain_s + _SLACK_S)
        if left:
            self._say(f"{len(left)} replicas have not ended within {self._settings.drain_s:g} s and are killed")
            self._kill()
            await asyncio.wait(seats, timeout=_SLACK_S)
        return 1 if left else 0

    # Connections.

    def _give(self, connection: socket.socket) -> bool:
        """To a replica that is ready, or to one that says that it is not; False where none can take it."""
        there = [seat for seat in self._seats if seat.lane and seat.connections < self._room]
        for seat in sorted(there, key=lambda s: (not s.ready, s.connections)):
            try:
                assert seat.lane
                socket.send_fds(seat.lane, [b"c"], [connection.fileno()])
                seat.connections += 1
                return True
            except OSError:  # it has just died, or does not read
                continue
        return False

    # Replicas.

    async def _keep(self, seat: Seat) -> None:
        """Start the replica of this seat, again and again, until the end."""
        while not self._ending.is_set():
            began = time.monotonic()
            try:
                process = self._start(seat)
                await self._attend(seat)
                self._hang_up(seat)  # no connection more, although it may not have ended yet
                code = await asyncio.to_thread(_ended, process)
            finally:
                self._leave(seat)
            if self._ending.is_set():
                return
            if time.monotonic() - began > _STEADY_S:
                seat.pause_s = _PAUSE_S
            self._say(f"replica {seat.index} has ended ({_how(code)}) and is started again in {seat.pause_s:g} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), seat.pause_s)
            seat.pause_s = min(2 * seat.pause_s, _LONGEST_PAUSE_S)

    def _start(self, seat: Seat) -> subprocess.Popen[bytes]:
        talk, their_talk = socket.socketpair()
        lane, their_lane = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        lane.setblocking(False)
        with their_talk, their_lane:
            ends = (their_talk.fileno(), their_lane.fileno())
            words = [sys.executable, "-m", "paceline.serve.replica", str(self._directory), *map(str, ends)]
            process = subprocess.Popen(
                words, pass_fds=ends, stdin=subprocess.DEVNULL, start_new_session=True, env=_environment(self._settings)
            )
        seat.process, seat.lane, seat.talk = process, lane, talk
        self._starts += 1
        return process

    async def _attend(self, seat: Seat) -> None:
        """Hear what the replica says, until it is gone."""
        assert seat.talk
        line = seat.line = await Line.over(seat.talk)
        if self._ending.is_set():
            line.send(Drain())
        while (message := await line.from_replica()) is not None:
            if isinstance(message, Ready):
                seat.ready, seat.heard = True, time.monotonic()
                self._started(message.said)
            elif isinstance(message, Failed):
                self._failed(seat, message.why)
            elif isinstance(message, Closed):
                seat.connections -= 1
            elif isinstance(message, Told):
                seat.counts, seat.heard = message.counts, time.monotonic()
                if (future := self._told.get(message.number)) and not future.done():
                    future.set_result(message.counts)
            else:
                task = asyncio.create_task(self._reply(line, message))
                self._answering.add(task)
                task.add_done_callback(self._answering.discard)

    def _failed(self, seat: Seat, why: str) -> None:
        assert seat.process
        if not any(one.ready for one in self._seats) and self._starts <= len(self._seats):
            self._why = why  # the first ones already: it is the model, or what was asked for
            self._ending.set()
        else:
            self._say(f"replica {seat.index} cannot serve: {why}")
            seat.process.kill()

    def _leave(self, seat: Seat) -> None:
        """Forget a replica that has ended, but not what it has counted."""
        self._hang_up(seat)
        if seat.process and seat.process.poll() is None:
            seat.process.kill()
            seat.process.wait()
        ended = msgspec.structs.replace(seat.counts, queue=0, connections=0, version=0)
        self._gone = counts.total([self._gone, ended])
        seat.process, seat.connections, seat.counts = None, 0, Counts()

    def _hang_up(self, seat: Seat) -> None:
        if seat.line:
            seat.line.close()
        if seat.lane:
            seat.lane.close()
        seat.line, seat.lane, seat.ready = None, None, False

    async def _watch(self) -> None:
        """Ask replicas for their counts; one that does not answer for long is killed."""
        while True:
            await asyncio.sleep(_WATCH_S)
            await self._collect()
            await self._control.write_down(self._summed())
            for seat in self._seats:
                if seat.ready and seat.process and time.monotonic() - seat.heard > _SILENT_S:
                    self._say(f"replica {seat.index} has not answered for {_SILENT_S:g} s")
                    seat.process.kill()

    async def _collect(self) -> None:
        """The counts of now, of all replicas that answer."""
        asked = []
        for seat in self._seats:
            if seat.line and seat.ready:
                number = next(self._numbers)
                self._told[number] = future = self._loop.create_future()
                seat.line.send(Tell(number))
                asked.append((number, future))
        if asked:
            await asyncio.wait([future for _, future in asked], timeout=_TELL_S)
        for number, _ in asked:
            del self._told[number]

    async def _reply(self, line: Line, ask: Ask | Learn) -> None:
        """What one who asks wants of the parent."""
        if isinstance(ask, Ask) and ask.what == "metrics":
            await self._collect()
        status, kind, body = await self._control.reply(ask, Tally(self._summed(), self._states(), self._starts))
        line.send(Reply(ask.number, status, kind, body))

    def _states(self) -> dict[str, int]:
        states = {"ready": 0, "starting": 0, "down": 0}
        for seat in self._seats:
            states["ready" if seat.ready else "starting" if seat.process else "down"] += 1
        return states

    def _summed(self) -> Counts:
        return counts.total([self._gone, *(seat.counts for seat in self._seats)])


def serve(
    settings: Settings,
    listener: socket.socket,
    make_keeper: Callable[[Path], Keeper],
    learner: Learner | None = None,
    *,
    say: Callable[[str], None],
    started: Callable[[str], None],
) -> int:
    """Serve until told to end; the exit code."""
    with Signals() as signals, private_folder() as directory:
        (directory / SHELF).mkdir()
        (directory / SETTINGS).write_bytes(msgspec.json.encode(settings))
        keeper = make_keeper(directory / SHELF)
        keeper.start()
        try:
            if not keeper.wait(_FIRST_S):
                stands = keeper.state()
                if refused := [refusal for refusal in stands.refusals if refusal.number is None]:
                    raise ConfigError(refused[-1].reason)
                say(f"waits for the first version: {stands.source}")
            control = Control(settings.name, keeper, learner)
            house = functools.partial(House, settings, listener, directory, control, say=say, started=started)
            return asyncio.run(_run(house, signals))
        finally:
            if learner:
                learner.close()
            keeper.close()


async def _run(make: Callable[[], House], signals: Signals) -> int:
    house = make()
    signals.to(house.end)
    return await house.run()


def _environment(settings: Settings) -> dict[str, str]:
    """Threads are set before torch is imported, so that all threads of the replica agree."""
    threads = settings.threads or max(1, len(os.sched_getaffinity(0)) // settings.replicas)
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


def _ended(process: subprocess.Popen[bytes]) -> int:
    """The exit code of a replica that has hung up."""
    try:
        return process.wait(_SLACK_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
