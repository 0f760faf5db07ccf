"""What /predict does, whichever way a request comes in: understand its head and body, wait for the batch, answer.

`fast_lane` brings small requests on kept connections, `app` all others; both speak of a `Head` and of bytes here, so
they answer alike. Refused requests get a JSON body {"error": "…"}.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from paceline.serve import bodies
from paceline.serve.batcher import Batcher, Job
from paceline.serve.counts import Counts
from paceline.serve.engine import Engine, Rows
from paceline.serve.permit import permit
from paceline.serve.refused import Refused
from paceline.serve.settings import JSON, SAFETENSORS, Settings

VERSION = "X-Paceline-Version"
DEADLINE = "X-Paceline-Deadline-Ms"
_KINDS = (JSON, SAFETENSORS)


class Head(NamedTuple):
    """What the head of a request says of its body and of the answer that is wanted."""

    kind: str
    answer: str
    within_s: float


class Answer(NamedTuple):
    """What goes out."""

    status: int
    kind: str
    body: bytes
    version: int = 0  # 0: no version made it
    retry_after_s: int = 0


class Predict:
    """Before `ready` every request gets 503."""

    def __init__(self, settings: Settings, counts: Counts) -> None:
        self.settings = settings
        self.counts = counts
        self._batcher: Batcher | None = None
        self._clock = asyncio.get_running_loop().time

    def ready(self, engine: Engine, batcher: Batcher) -> None:
        """The engine is warm."""
        self._readers = {
            JSON: bodies.json_reader(engine.inputs),
            SAFETENSORS: bodies.safetensors_reader(engine.inputs),
        }
        self._json = bodies.json_writer(engine.outputs)
        self._safetensors = bodies.safetensors_writer(engine.outputs)
        self._batcher = batcher

    def head(self, headers: Mapping[str, str]) -> Head:
        """By names in small letters; Refused: 401, 406, 415, 421, 422."""
        permit(self.settings.token, headers)
        kind = headers.get("content-type", JSON).partition(";")[0].strip().lower()
        if kind not in _KINDS:
            raise Refused(415, f"content-type {kind!r}: {' and '.join(_KINDS)} are understood")
        return Head(kind, _answer_kind(headers.get("accept", ""), kind), self._within(headers.get(DEADLINE.lower())))

    def begin(self, head: Head, body: bytes, tell: Callable[[Answer], None]) -> Job[Any] | None:
        """Take a request in; `tell` gets the answer, at once where it is refused, and then there is no job."""
        began = time.perf_counter()
        try:
            batcher = self._batcher
            if batcher is None:
                raise Refused(503, "no version is loaded yet: /ready says when", retry_after_s=1)
            arrays = self._readers[head.kind](body)
            job = Job(
                arrays,
                len(arrays[0]),
                lambda rows, version: self._tell(tell, self._answer(head, rows, version), began),
                lambda refused: self._tell(tell, refusal(refused), began),
                self._clock() + head.within_s,
            )
            batcher.submit(job)
        except Refused as refused:
            self._tell(tell, refusal(refused), began)
            return None
        return job

    def withdraw(self, job: Job[Any]) -> None:
        """Who asked has gone."""
        if self._batcher:
            self._batcher.withdraw(job)

    async def answer(self, head: Head, body: bytes) -> Answer:
        """As `begin`, for a coroutine; cancelling it withdraws the request."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        job = self.begin(head, body, future.set_result)
        try:
            return await future
        finally:
            if job and (future.cancelled() or not future.done()):
                self.withdraw(job)

    def refuse(self, refused: Refused) -> Answer:
        """The answer to a request whose head was refused, counted."""
        self.counts.answered(refused.status, 0.0)
        return refusal(refused)

    def _answer(self, head: Head, rows: Rows, version: int) -> Answer:
        if head.answer == JSON:
            return Answer(200, JSON, self._json(rows.lists(), version), version)
        return Answer(200, SAFETENSORS, self._safetensors(rows.arrays(), version), version)

    def _tell(self, tell: Callable[[Answer], None], answer: Answer, began: float) -> None:
        self.counts.answered(answer.status, time.perf_counter() - began)
        tell(answer)

    def _within(self, text: str | None) -> float:
        if text is None:
            return self.settings.deadline_ms / 1e3
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            raise Refused(422, f"{DEADLINE}: {text!r} is not a number of milliseconds above 0")
        return value / 1e3


def refusal(refused: Refused) -> Answer:
    """As an answer."""
    body = msgspec.json.encode({"error": refused.why})
    return Answer(refused.status, JSON, body, retry_after_s=refused.retry_after_s)


def _answer_kind(accept: str, kind: str) -> str:
    """What Accept asks for; where it leaves the choice, the kind of the body."""
    wanted = [part.partition(";")[0].strip().lower() for part in accept.split(",") if part.strip()]
    if not wanted or kind in wanted:
        return kind
    for one in wanted:
        if one in _KINDS:
            return one
        if one in ("*/*", "application/*"):
            return kind
    raise Refused(406, f"accept {accept!r}: answers are {' or '.join(_KINDS)}")
