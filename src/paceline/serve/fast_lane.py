"""The short way for requests to /predict: from the bytes of a connection to the batcher, without ASGI in between.

A protocol for uvicorn. A request that is plain (POST /predict, a Content-Length that is not large, nothing unusual in
its head) is taken here; every other one goes to uvicorn's own protocol and so to the app, which answers /predict too,
and alike. Who asks again on the same connection sends the same head but for its length: a head is parsed once, by
httptools, and then known by its bytes.

Assumes that `install` was called with the replica's Predict before the first connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from paceline.serve.batcher import Job
from paceline.serve.predict import VERSION, Answer, Head, Predict, refusal
from paceline.serve.refused import Refused

START = b"POST /predict HTTP/1.1\r\n"
LATE = "paceline.late"  # in the state of a request that was cut off since it did not come to its end
WHOLE_S = 60.0  # in which a request must have come whole, from its first byte on
_KEPT_S = 75.0  # a connection on which nobody asks
_SMALL_BYTES = 256 << 10  # longer bodies come in many pieces, which the app collects
_HEAD_BYTES = 16 << 10
_STATUS = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n".encode() for s in HTTPStatus}


class Plan:
    """What a head says, understood once."""

    __slots__ = ("close", "head", "length")

    def __init__(self, head: Head | Refused, length: int, close: bool) -> None:
        self.head = head
        self.length = length
        self.close = close


class FastLane(HttpToolsProtocol):
    """See the module. Requests of one connection are answered in their order, one at a time."""

    predict: Predict
    closed: Callable[[], None]  # called with the end of each connection

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._held = b""  # bytes that are not a whole request yet, or came while one is under way
        self._known = b""  # the head that `_plan` is of
        self._plan: Plan | None = None
        self._job: Job[Any] | None = None
        self._busy = False
        self._leaving = False
        self._begun = self._ended = self._answered = 0  # messages in uvicorn's protocol
        self._since = 0.0  # when a request began, or it became the other side's turn; on the loop's clock
        self._unsent, self._sent_at = 0, 0.0  # bytes of answers that wait, and when they became fewer

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since = self.loop.time()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._job is not None:
            self.predict.withdraw(self._job)
            self._job = None
        super().connection_lost(exc)
        self.closed()

    @property
    def idle(self) -> bool:
        """Whether no request is under way, not even in part."""
        return not self._busy and not self._held and self._begun == self._ended == self._answered

    def tend(self) -> None:
        """Close where nobody asks, where a request does not come to its end, and where nobody reads answers; to be
        called now and then."""
        now, unsent = self.loop.time(), self.transport.get_write_buffer_size()
        if not self._unsent or unsent < self._unsent:
            self._sent_at = now
        self._unsent = unsent
        if unsent and now - self._sent_at > WHOLE_S:
            self.transport.abort()
            return
        if self._busy or self._answered < self._ended or self.flow.write_paused or self.transport.is_closing():
            return  # the next word is ours, or on its way
        waited_s = self.loop.time() - self._since
        if self.idle:
            if waited_s > _KEPT_S:
                self.transport.close()
        elif waited_s > WHOLE_S:
            late = Refused(408, f"the request has not come to its end within {WHOLE_S:g} s")
            if self._held:
                self.transport.write(answer_bytes(self.predict.refuse(late), close=True))
            elif self._answered < self._begun:  # else it was answered, refused say, before its end
                self.transport.write(answer_bytes(refusal(late), close=True))
                self.scope["state"][LATE] = True
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        if self._begun != self._ended or self._begun != self._answered:
            super().data_received(data)
            return
        if self._held:
            data = self._held + data
        if self._busy or self.flow.write_paused:
            self._hold(data)
            return
        self._read(data)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._read_on_soon()

    def _read(self, data: bytes) -> None:
        """Take the request at the beginning of `data`, if it is there."""
        end = data.find(b"\r\n\r\n") + 4
        if end < 4:
            if len(data) < _HEAD_BYTES and START.startswith(data[: len(START)]):
                self._hold(data)
            else:
                self._pass_on(data)
            return
        if (head := data[:end]) != self._known:
            self._plan = self._understood(head) if head.startswith(START) else None
            self._known = head
        plan = self._plan
        if plan is None:
            self._pass_on(data)
            return
        stop = end + plan.length
        if len(data) < stop:
            self._hold(data)
            return
        self._busy = True
        self._keep(data[stop:])
        if isinstance(plan.head, Refused):
            self._answer(self.predict.refuse(plan.head))
        else:
            self._job = self.predict.begin(plan.head, data[end:stop], self._answer)
            if not self._busy:  # it was refused, and is answered
                self._job = None

    def _pass_on(self, data: bytes) -> None:
        super().data_received(data)
        self._held = b""  # now only: `on_message_begin` asks

    def _hold(self, data: bytes) -> None:
        if not self._held:
            self._since = self.loop.time()
        self._keep(data)

    def _keep(self, data: bytes) -> None:
        """For later. No more is read from one who is that far ahead of us that this must be several requests."""
        self._held = data
        if len(data) > _SMALL_BYTES + _HEAD_BYTES:
            self.flow.pause_reading()
        else:
            self.flow.resume_reading()

    def _understood(self, head: bytes) -> Plan | None:
        """None: it is not plain."""
        found = _Headers()
        parser = httptools.HttpRequestParser(found)
        try:
            parser.feed_data(head)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            return None
        lengths = [value for name, value in found.pairs if name == "content-length"]
        names = {name for name, _ in found.pairs}
        if len(lengths) != 1 or not lengths[0].isdecimal() or names & {"transfer-encoding", "expect", "upgrade"}:
            return None
        length = int(lengths[0])
        if length > min(_SMALL_BYTES, self.predict.settings.max_body_bytes):
            return None
        close = not parser.should_keep_alive()
        try:
            return Plan(self.predict.head(dict(found.pairs)), length, close)
        except Refused as refused:
            return Plan(refused, length, close)

    def _answer(self, answer: Answer) -> None:
        self._busy = False
        self._job = None
        plan = self._plan
        close = self._leaving or plan is None or plan.close
        if not self.transport.is_closing():
            self.transport.write(answer_bytes(answer, close=close))
        if close:
            self.transport.close()
            return
        self._since = self.loop.time()
        self._read_on_soon()

    def _read_on_soon(self) -> None:
        if self._held and not self.flow.write_paused:
            self.loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        if self._held and not (self._busy or self.flow.write_paused or self.transport.is_closing()):
            self._read(self._held)

    def shutdown(self) -> None:
        """Say with the next answer that it is the last. `leave` closes those that do not ask again."""
        self._leaving = True
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False

    def leave(self) -> None:
        """Close if nothing is under way."""
        if self.idle:
            self.transport.close()

    # What uvicorn's parser calls, counted: only between whole messages may bytes be taken here.

    def on_message_begin(self) -> None:
        self._begun += 1
        if not self._held:  # else it began earlier
            self._since = self.loop.time()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self._leaving and self.cycle is not None:
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        self._ended += 1
        self._since = self.loop.time()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._answered += 1
        self._since = self.loop.time()
        super().on_response_complete()
        self._unset_keepalive_if_required()  # `replica` looks after idle connections, with one timer for all


class _Headers:
    """Collects what httptools finds."""

    def __init__(self) -> None:
        self.pairs: list[tuple[str, str]] = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self.pairs.append((name.decode("latin-1").lower(), value.decode("latin-1")))


def answer_bytes(answer: Answer, *, close: bool) -> bytes:
    """Head and body, for one write."""
    more = f"{VERSION}: {answer.version}\r\n" if answer.version else ""
    if answer.retry_after_s:
        more += f"Retry-After: {answer.retry_after_s}\r\n"
    if answer.status == 401:
        more += "WWW-Authenticate: Bearer\r\n"
    if close:
        more += "Connection: close\r\n"
    head = f"Content-Type: {answer.kind}\r\nContent-Length: {len(answer.body)}\r\n{more}\r\n"
    return _STATUS[answer.status] + head.encode() + answer.body
