"""Labelled samples on their way back into the run that is served: from `/learn` into the run's input queue.

    replica: /learn, checked and packed --> here, in the parent: a bounded queue --> one thread --> Outsider.upload

Whoever posts never waits for the run. What does not fit gets 429. Where the run is gone, or takes no samples, requests
get 503 with the reason, but for one now and then, to see whether that has changed. A sample that was taken in here is
uploaded once, or counted: as refused by the run, or as lost, where the run ended while it was under way.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from paceline.core.errors import ConfigError, PacelineError
from paceline.serve.refused import Refused
from paceline.serve.sources import RunSource, Source
from paceline.server.outside.outsider import Outsider, Stopped
from paceline.server.outside.samples import unpack

LIMIT = 4096  # samples that may wait here; the run's own queue holds many more
_TOGETHER = 256  # samples in one upload
_ROOM_S = 2.0  # that an upload waits for room in the run's queue before it says that there is none
_AGAIN_S = 2.0  # between two attempts


class Learning(msgspec.Struct, frozen=True, kw_only=True):
    """How samples are getting on."""

    waiting: int = 0  # here, for the run
    uploaded: int = 0
    refused: int = 0  # by the run: of another form than it takes, or it takes no more
    lost: int = 0  # under way when the run ended
    words: str = ""  # what is wrong; empty: nothing is


class Learner:
    """See the module. `connect` reaches the run; it may fail, and is then called again."""

    def __init__(self, connect: Callable[[], Outsider], limit: int = LIMIT) -> None:
        self._connect = connect
        self._limit = limit
        self._waiting: deque[bytes] = deque()
        self._under_way = 0
        self._uploaded = self._refused = self._lost = 0
        self._words = ""
        self._shut = False  # nothing is taken in, but for a try
        self._try_at = 0.0
        self._closed = False
        self._changed = threading.Condition()
        self._run: Outsider | None = None
        threading.Thread(target=self._carry, name="learner", daemon=True).start()

    def put(self, samples: Sequence[bytes]) -> Learning:
        """Take samples in, all or none; Refused: 429 where too many wait, 503 where the run takes none."""
        with self._changed:
            held = len(self._waiting) + self._under_way
            if self._shut:
                now = time.monotonic()
                if held or now < self._try_at:
                    raise Refused(503, self._words, retry_after_s=int(_AGAIN_S))
                self._try_at = now + _AGAIN_S
            if len(samples) > self._limit:
                raise Refused(413, f"{len(samples)} samples in one request, {self._limit} are allowed")
            if held + len(samples) > self._limit:
                why = f"{held} samples wait for the run already, {self._limit} may"
                raise Refused(429, f"{why}: {self._words}" if self._words else why, retry_after_s=1)
            self._waiting.extend(samples)
            self._changed.notify_all()
            return self._state()

    def state(self) -> Learning:
        with self._changed:
            return self._state()

    def close(self) -> None:
        """End; what waits is not uploaded any more. An upload that waits for room is left behind."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _state(self) -> Learning:
        return Learning(
            waiting=len(self._waiting) + self._under_way,
            uploaded=self._uploaded,
            refused=self._refused,
            lost=self._lost,
            words=self._words,
        )

    # The thread.

    def _carry(self) -> None:
        while some := self._next():
            try:
                self._run = self._run or self._connect()
                self._run.upload(map(unpack, some), wait_s=_ROOM_S)
                self._settle(uploaded=len(some))
            except Stopped as stopped:
                left = some[stopped.taken :]
                self._settle(str(stopped), uploaded=stopped.taken, back=left, shut=not stopped.asked)
            except PacelineError as error:
                if self._run is None:
                    self._settle(str(error), back=some, shut=True)
                elif isinstance(error, ConfigError):
                    self._settle(str(error), refused=len(some), shut=True)
                else:
                    self._settle(str(error), lost=len(some), shut=True)
                self._leave()
        self._leave()

    def _next(self) -> list[bytes]:
        """What goes together next; empty: it is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if self._closed:
                return []
            some = [self._waiting.popleft() for _ in range(min(_TOGETHER, len(self._waiting)))]
            self._under_way = len(some)
            return some

    def _settle(
        self,
        words: str = "",
        *,
        uploaded: int = 0,
        refused: int = 0,
        lost: int = 0,
        back: Sequence[bytes] = (),
        shut: bool = False,
    ) -> None:
        with self._changed:
            self._words, self._shut = words, shut
            self._uploaded += uploaded
            self._refused += refused
            self._lost += lost
            self._waiting.extendleft(reversed(back))
            self._under_way = 0
            if shut:
                self._try_at = time.monotonic() + _AGAIN_S
                self._changed.wait_for(lambda: self._closed, _AGAIN_S)

    def _leave(self) -> None:
        if self._run is not None:
            self._run.close()
            self._run = None


def make_learner(source: Source) -> Learner | None:
    """For the run that is served; None: it is none, so nothing can learn."""
    if not isinstance(source, RunSource):
        return None
    return Learner(source.connect)


def text(state: Learning) -> str:
    """In the format that Prometheus reads."""
    lines = [
        "# HELP paceline_serve_learn_samples_total Samples of /learn, by what became of them.",
        "# TYPE paceline_serve_learn_samples_total counter",
    ]
    outcomes = {"uploaded": state.uploaded, "refused": state.refused, "lost": state.lost}
    lines += [f'paceline_serve_learn_samples_total{{outcome="{name}"}} {n}' for name, n in outcomes.items()]
    lines += [
        "# HELP paceline_serve_learn_waiting Samples of /learn that wait for the run.",
        "# TYPE paceline_serve_learn_waiting gauge",
        f"paceline_serve_learn_waiting {state.waiting}",
    ]
    return "\n".join(lines) + "\n"
