"""One server, as a worker reaches it: a thread that sends, and one that receives."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

import torch

from paceline.core.errors import Interrupted
from paceline.core.status import Status
from paceline.server import messages as m
from paceline.server.connection import Connection, bytes_of
from paceline.server.part import Part


class Port:
    """One server, as this worker reaches it: a thread that sends, and one that receives."""

    def __init__(self, server: int, connection: Connection, limit_s: float, status: Status) -> None:
        self.server = server
        self.limit_s = limit_s
        self.memory = connection.memory
        self.parts: dict[int, Part] = {}
        self.shown_bytes = 0  # gradients in shared memory
        self._channel = connection.channel
        self._channel.name = f"server {server}"
        self._channel.send_limit_s = limit_s
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], Future[None] | None] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._left = False
        self._threads = [
            threading.Thread(target=work, name=f"paceline-server-{server}", daemon=True)
            for work in (self._send, self._receive)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def sent_bytes(self) -> int:
        return self._channel.sent_bytes + self.shown_bytes

    def send(self, work: Callable[[], None], done: Future[None] | None = None) -> None:
        with self._lock:
            if self._error is None:
                self._jobs.put((work, done))
                return
        if done is not None and not done.done():
            done.set_exception(self._error)

    def say(self, message: m.ToServer, body: torch.Tensor | None = None) -> None:
        self._channel.send(m.encode(message))
        if body is not None and body.numel():
            self._channel.send_raw(bytes_of(body))

    def read(self, into: torch.Tensor) -> None:
        self._channel.recv_raw_into(bytes_of(into), self.limit_s)

    def leave(self, *, said: bool) -> None:
        """Hang up; say goodbye before, behind what was sent."""
        with self._lock:
            if self._left:
                return
            self._left = True
        self._jobs.put(None)
        if said:
            self._threads[0].join(self.limit_s)
        self._channel.close()
        self._threads[1].join(self.limit_s)

    def _send(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                job[0]()
            if self._error is None:
                self.say(m.Leave())
        except BaseException as error:
            # The server may have said why it hung up: that word comes first, and through the other thread.
            self._threads[1].join(2.0)
            self._fail(error)

    def _receive(self) -> None:
        try:
            while True:
                self._take(m.decode_to_worker(self._channel.listen()))
        except BaseException as error:
            self._fail(error)

    def _take(self, message: m.ToWorker) -> None:
        if isinstance(message, m.Refused):
            raise message.error()
        part = self.parts.get(message.table)
        if part is None:
            raise Interrupted(f"server {self.server} speaks of table {message.table}, which nobody has opened")
        if isinstance(message, m.Opened):
            part.opened(message)
        elif isinstance(message, m.Weights):
            part.arrived(message)
        elif isinstance(message, m.State):
            part.state_arrived(message)
        else:
            part.dropped, part.reason = True, message.reason
            part._table.note_dropped(message.step, f"at server {self.server}: {message.reason}")

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if self._error is None:
                self._error = error
            first = self._error
        self._channel.close()
        for part in self.parts.values():
            if part._done and not part._done.done():
                part._done.set_exception(first)
