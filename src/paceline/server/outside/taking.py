"""A worker's side of the input queue: it asks at the run's first desk for the samples of its batches."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from paceline.core.errors import Interrupted, TimedOut
from paceline.server.messages import UPLOADS
from paceline.server.outside import visits as v
from paceline.server.outside.samples import pack, unpack
from paceline.transport.channel import Channel
from paceline.transport.wires import Wires

_ANSWER_S = 40.0


class Taker:
    """Fetches samples; see `paceline.data.uploads.Queue`.

    Args:
        desk: the rank of the member with the first desk.
        size: how many members keep step; 1 where each goes its own pace.
        limit: samples of an epoch; 0: as many as come.
        like: a sample whose form all must have; None: any.
        rest: called where this worker has nothing to do for a while.
    """

    def __init__(
        self,
        wires: Wires,
        desk: int,
        *,
        size: int,
        limit: int = 0,
        like: Any = None,
        rest: Callable[[], None] = lambda: None,
    ) -> None:
        self._wires = wires
        self._desk = desk
        self._size = size
        self._limit = limit
        self._like = b"" if like is None else pack(like)
        self.rest = rest if size == 1 else lambda: None
        self._channel: Channel | None = None
        self._asking = threading.Lock()
        self._sending = threading.Lock()

    def take(
        self, course: str, number: int, batch_size: int, waits: Callable[[], None]
    ) -> tuple[list[Any], int, int] | None:
        """Samples, how many of them count, and how many all members have; None: the course is over."""
        wires = self._wires
        ask = v.Take(
            course=course, number=number, batch_size=batch_size, size=self._size, limit=self._limit, like=self._like
        )
        deadline = time.monotonic() + wires.limit_s
        before = wires.status.what
        with self._asking:
            while True:
                self._send(ask)
                answer = v.decode_from_desk(self._channel_now().recv(_ANSWER_S))
                if not isinstance(answer, v.Soon):
                    break
                wires.status.set("waiting for uploads")
                waits()
                if time.monotonic() > deadline:
                    raise TimedOut(
                        f"not enough samples for a batch were uploaded within {wires.limit_s:g} s: upload more, call "
                        "finish_uploads() after the last, or raise --wait-limit-s"
                    )
        if wires.status.what == "waiting for uploads":
            wires.status.set(before)
        if isinstance(answer, v.Refused):
            raise answer.error()
        if not isinstance(answer, v.Given):
            raise Interrupted(f"the desk said {type(answer).__name__} instead of samples")
        return ([unpack(sample) for sample in answer.samples], answer.real, answer.total) if answer.samples else None

    def done(self, course: str, count: int) -> None:
        """The first `count` batches of a course are trained."""
        if self._size == 1:
            self._send(v.Done(course, count))

    def named(self, course: str) -> str:
        """Where each worker goes its own pace, its pushes come to the server that has the desk."""
        return UPLOADS + course if self._size == 1 else ""

    def _send(self, message: v.ToDesk) -> None:
        with self._sending:
            self._channel_now().send(v.encode(message))

    def _channel_now(self) -> Channel:
        if self._channel is None:
            channel = self._wires.visit(self._desk)
            channel.send(v.encode(v.Visit(rank=self._wires.rank)))
            answer = v.decode_from_desk(channel.recv(_ANSWER_S))
            if isinstance(answer, v.Refused):
                raise answer.error()
            self._channel = channel
        return self._channel
