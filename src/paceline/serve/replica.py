"""One replica: a process with its own model, event loop and batcher, which answers the connections it is given.

Started by `house` as `python -m paceline.serve.replica`, with two sockets that it inherits: on one the two talk
(`messages`), on the other accepted connections come in. The loop runs from the beginning, so that /health answers and
/predict says 503 while the model is made, measured and warmed in a thread; `Ready` tells the parent when that is done.
Ends when the parent says so, and by itself when the parent is gone.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import itertools
import os
import signal
import socket
import sys
import traceback
from email.utils import formatdate
from pathlib import Path

import msgspec
import uvicorn
from uvicorn.server import ServerState

from paceline.core.errors import PacelineError
from paceline.serve.app import describe, make_app
from paceline.serve.batcher import Batcher
from paceline.serve.counts import Counts
from paceline.serve.engine import Engine
from paceline.serve.fast_lane import FastLane
from paceline.serve.labelled import Labelled
from paceline.serve.messages import Ask, Closed, Downward, Drain, Failed, Learn, Line, Ready, Reply, Tell, Told
from paceline.serve.predict import Predict, refusal
from paceline.serve.prepare import Prepared, prepare
from paceline.serve.private import remove_left
from paceline.serve.refused import Refused
from paceline.serve.settings import Settings

SETTINGS = "settings.json"  # in the private directory
SHELF = "versions"
_LEAVE_S = 1.0  # after which a connection that does not ask again is closed, when the replica ends
_RELAY_S = 10.0
_TICK_S = 1.0
_GIVEN = 16  # connections that are taken at a time


class Replica:
    """What runs in the process."""

    def __init__(self, directory: Path, talk: socket.socket, lane: socket.socket) -> None:
        self._settings = msgspec.json.decode((directory / SETTINGS).read_bytes(), type=Settings)
        self._shelf = directory / SHELF
        self._talk, self._lane = talk, lane
        self._counts = Counts()
        self._engine: Engine | None = None
        self._batcher: Batcher | None = None
        self._asked: dict[int, asyncio.Future[Reply]] = {}
        self._numbers = itertools.count(1)
        self._over = asyncio.Event()
        self._taking: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._line = await Line.over(self._talk)
        self._predict = Predict(self._settings, self._counts)
        self._labelled = Labelled(self._settings)
        self._app = make_app(self._predict, self._labelled, self._relay, self._not_ready)
        FastLane.predict = self._predict
        FastLane.closed = lambda *_: self._line.send(Closed())
        self._config = uvicorn.Config(self._app, http=FastLane, ws="none", lifespan="off", log_config=None)
        self._config.load()
        self._state = ServerState()
        self._lane.setblocking(False)
        self._loop.add_reader(self._lane.fileno(), self._take)
        listening = asyncio.create_task(self._listen())
        ticking = asyncio.create_task(self._tick())
        preparing = asyncio.create_task(self._prepare())
        await self._over.wait()
        await self._drain()
        for task in (listening, ticking, preparing):
            task.cancel()
        self._line.close()

    async def _prepare(self) -> None:
        try:
            made = await asyncio.to_thread(prepare, self._settings, self._shelf)
        except PacelineError as error:
            self._line.send(Failed(str(error)))
            return
        except Exception as error:  # the user's own code
            traceback.print_exc()
            self._line.send(Failed(f"{type(error).__name__}: {error}"))
            return
        self._start(made)

    def _start(self, made: Prepared) -> None:
        settings = self._settings
        made.use_threads()
        self._engine = made.engine
        self._batcher = Batcher(
            made.engine.run,
            max_batch_size=settings.max_batch_size,
            max_queue_delay_us=settings.max_queue_delay_us,
            queue_limit=settings.queue_limit,
            beside=made.beside,
            began=made.use_threads,
            watch=self._counts,
        )
        self._predict.ready(made.engine, self._batcher)
        self._labelled.ready(made.engine.inputs, made.engine.outputs)
        describe(self._app, made.engine.inputs, made.engine.outputs, self._labelled.label)
        self._line.send(Ready(made.said))

    def _not_ready(self) -> str:
        return "" if self._engine else "no version is loaded yet"

    # Connections.

    def _take(self) -> None:
        """Connections that the parent has accepted."""
        try:
            data, ancillary, _, _ = self._lane.recvmsg(1, socket.CMSG_SPACE(_GIVEN * 4))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._loop.remove_reader(self._lane.fileno())
            return
        if not data:  # the parent is gone
            self._loop.remove_reader(self._lane.fileno())
            self._over.set()
            return
        descriptors = array.array("i")
        for level, kind, held in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(held[: len(held) - len(held) % descriptors.itemsize])
        if not descriptors:  # there was none left here: the kernel has closed the connection
            self._line.send(Closed())
        for descriptor in descriptors:
            task = self._loop.create_task(self._connect(socket.socket(fileno=descriptor)))
            self._taking.add(task)
            task.add_done_callback(self._taking.discard)

    async def _connect(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            await self._loop.connect_accepted_socket(self._protocol, connection)
        except OSError:
            connection.close()
            self._line.send(Closed())

    def _protocol(self) -> FastLane:
        return FastLane(config=self._config, server_state=self._state, app_state={}, _loop=self._loop)

    @property
    def _connections(self) -> list[FastLane]:
        return [connection for connection in self._state.connections if isinstance(connection, FastLane)]

    async def _tick(self) -> None:
        """Once a second: the date for answers, and an end to connections that are left alone."""
        while True:
            self._state.default_headers = [(b"date", formatdate(usegmt=True).encode())]
            for connection in self._connections:
                connection.tend()
            await asyncio.sleep(_TICK_S)

    async def _drain(self) -> None:
        """Answer all that is under way or comes on open connections, then close them."""
        while self._taking:
            await asyncio.wait(set(self._taking))
        for connection in self._connections:
            connection.shutdown()
        deadline = self._loop.time() + self._settings.drain_s
        leave_at = self._loop.time() + _LEAVE_S
        while self._state.connections and self._loop.time() < deadline:
            await asyncio.sleep(0.02)
            if self._loop.time() > leave_at:
                for connection in self._connections:
                    connection.leave()
        if self._batcher:
            self._batcher.close("this replica ends")

    # The parent.

    async def _listen(self) -> None:
        while (message := await self._line.from_parent()) is not None:
            self._heard(message)
            if isinstance(message, Drain):
                break
        self._over.set()
        while (message := await self._line.from_parent()) is not None:  # answers may still be under way
            self._heard(message)

    def _heard(self, message: Downward) -> None:
        if isinstance(message, Tell):
            self._line.send(Told(message.number, self._now()))
        elif isinstance(message, Reply) and (future := self._asked.get(message.number)) and not future.done():
            future.set_result(message)

    def _now(self) -> Counts:
        counts = self._counts
        counts.queue = self._batcher.waiting if self._batcher else 0
        counts.connections = len(self._state.connections)
        if self._engine:
            counts.version, counts.swaps = self._engine.version, self._engine.swaps
        return counts

    async def _relay(self, what: str | list[bytes], version: int | None) -> tuple[int, str, bytes]:
        number = next(self._numbers)
        future = self._asked[number] = self._loop.create_future()
        self._line.send(Ask(number, what, version) if isinstance(what, str) else Learn(number, what))
        try:
            reply = await asyncio.wait_for(future, _RELAY_S)
        except TimeoutError:
            answer = refusal(Refused(503, f"the parent has not answered within {_RELAY_S:g} s", retry_after_s=1))
            return answer.status, answer.kind, answer.body
        finally:
            del self._asked[number]
        return reply.status, reply.kind, reply.body


def main(argv: list[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says when to end
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    directory, talk, lane = argv

    async def run() -> None:
        await Replica(Path(directory), socket.socket(fileno=int(talk)), socket.socket(fileno=int(lane))).run()
        remove_left(Path(directory))  # if the parent was killed
        sys.stdout.flush()
        os._exit(0)  # here: the loop's end would wait for threads that load, compute, or wait for a first version

    import uvloop

    uvloop.run(run())


if __name__ == "__main__":
    main(sys.argv[1:])
