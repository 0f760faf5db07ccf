"""Puts requests that arrive close together into one batch for the engine, and gives each its own rows back.

Lives in the event loop of one replica, between those who read requests (`fast_lane`, `app`) and the engine. A batch is
taken when the engine is free and either it is full or its oldest request has waited `max_queue_delay_us`; with 0, all
that one turn of the loop has read goes together. While the engine computes, the next batch gathers by itself.

Every job that was taken in is settled exactly once: with its rows, or with Refused. A job that was withdrawn (its
connection is gone) is settled with nobody listening, and is not computed if that is still to be done.

Assumes that `run` returns rows in the order of the jobs. Small models run in the loop's own thread (`beside=False`),
since handing over to another thread costs more than they do; others in one thread beside it, so that the loop stays
awake. That is tried out with zeros: a model for which some values take long moves there with the first that do.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, Protocol, TypeVar

from paceline.serve.refused import Refused

Arrays = TypeVar("Arrays")
_LONG_S = 0.05  # of a batch in the loop's own thread; meanwhile deadlines pass without an answer


class Job(Generic[Arrays]):
    """One request: its rows, and who is told of the result."""

    __slots__ = ("arrays", "deadline", "failed", "rows", "settled", "since", "withdrawn")  # one per request

    def __init__(
        self,
        arrays: Arrays,
        rows: int,
        settled: Callable[[Any, int], None],  # with the rows of the result, and the version that made them
        failed: Callable[[Refused], None],
        deadline: float = math.inf,  # on the loop's clock
    ) -> None:
        self.arrays = arrays
        self.rows = rows
        self.settled = settled
        self.failed = failed
        self.deadline = deadline
        self.since = 0.0
        self.withdrawn = False


class Watch(Protocol):
    """Who counts batches."""

    def batch(self, rows: int) -> None: ...


# The results of one batch, one per job, and the version that made them.
Run = Callable[[Sequence[Any], Sequence[int]], tuple[Sequence[Any], int]]


class Batcher:
    """See the module. All methods are called in the loop's thread."""

    def __init__(
        self,
        run: Run,
        *,
        max_batch_size: int,
        max_queue_delay_us: int = 0,
        queue_limit: int = 1024,
        beside: bool = False,
        began: Callable[[], None] = lambda: None,  # called in that thread, first
        watch: Watch | None = None,
    ) -> None:
        self._run = run
        self._most = max_batch_size
        self._delay_s = max_queue_delay_us / 1e6
        self._limit = queue_limit
        self._watch = watch
        self._loop = asyncio.get_running_loop()
        self._began = began
        self._thread: ThreadPoolExecutor | None = None
        if beside:
            self._move()
        self._waiting: deque[Job[Any]] = deque()
        self._rows = 0  # that wait
        self._due: asyncio.Handle | None = None  # the next look at the queue
        self._due_later = False  # whether that is after the delay, and not at the end of this turn
        self._sweep: asyncio.TimerHandle | None = None  # the next look for deadlines
        self._sweep_when = math.inf
        self._busy = False
        self._closed = ""
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def waiting(self) -> int:
        """Items in the queue."""
        return self._rows

    def submit(self, job: Job[Any]) -> None:
        """Take a job in, or raise Refused: 413, 429 where too many wait, 503 after `close`."""
        if self._closed:
            raise Refused(503, self._closed, retry_after_s=1)
        if job.rows > self._most:
            raise Refused(413, f"{job.rows} items in one request, {self._most} are allowed: send several requests")
        if self._rows + job.rows > self._limit:
            raise Refused(429, f"{self._rows} items wait already, {self._limit} may", retry_after_s=1)
        now = job.since = self._loop.time()
        if job.deadline <= now:
            raise Refused(504, "the deadline had passed before the request was read")
        self._waiting.append(job)
        self._rows += job.rows
        self._idle.clear()
        if job.deadline < self._sweep_when:
            self._sweep_at(job.deadline)
        if not self._busy:
            self._look_soon(now)

    def withdraw(self, job: Job[Any]) -> None:
        """Nobody waits for this one any more."""
        job.withdrawn = True

    async def drained(self) -> None:
        """Until nothing waits and nothing is computed."""
        await self._idle.wait()

    def close(self, why: str) -> None:
        """Refuse what comes from now on, and what waits."""
        self._closed = why
        for job in self._take_all():
            self._fail(job, Refused(503, why, retry_after_s=1))
        for timer in (self._due, self._sweep):
            if timer:
                timer.cancel()
        if self._thread:
            self._thread.shutdown(wait=False)
        self._rest()

    def _move(self) -> None:
        """From now on beside the loop."""
        self._thread = ThreadPoolExecutor(1, "engine", self._began)

    def _look_soon(self, now: float) -> None:
        """Plan the next batch: at the end of this turn of the loop if it is due, else when it will be."""
        if self._due is not None:
            if self._rows < self._most or not self._due_later:
                return
            self._due.cancel()
        due = self._waiting[0].since + self._delay_s
        self._due_later = self._rows < self._most and due > now
        self._due = self._loop.call_at(due, self._look) if self._due_later else self._loop.call_soon(self._look)

    def _look(self) -> None:
        self._due = None
        if self._busy:
            return
        jobs = self._take()
        if jobs:
            self._compute(jobs)
        elif self._waiting:
            self._look_soon(self._loop.time())
        else:
            self._rest()

    def _take(self) -> list[Job[Any]]:
        """The next batch, without those that are withdrawn or too late."""
        jobs: list[Job[Any]] = []
        rows = 0
        now = self._loop.time()
        while self._waiting and rows + self._waiting[0].rows <= self._most:
            job = self._waiting.popleft()
            self._rows -= job.rows
            if job.withdrawn:
                continue
            if job.deadline <= now:
                self._fail(job, _late())
                continue
            jobs.append(job)
            rows += job.rows
        return jobs

    def _take_all(self) -> list[Job[Any]]:
        jobs = list(self._waiting)
        self._waiting.clear()
        self._rows = 0
        return jobs

    def _compute(self, jobs: list[Job[Any]]) -> None:
        self._busy = True
        if self._watch:
            self._watch.batch(sum(job.rows for job in jobs))
        if self._thread is None:
            began = time.monotonic()
            outcomes = self._attempt(jobs)
            if time.monotonic() - began > _LONG_S:
                self._move()
            self._settle(jobs, outcomes)
        else:
            future = self._loop.run_in_executor(self._thread, self._attempt, jobs)
            future.add_done_callback(lambda done: self._settle(jobs, done.result()))

    def _attempt(self, jobs: list[Job[Any]]) -> list[tuple[Any, int] | Refused]:
        """In the engine's thread. Where a batch fails, each job is tried alone: one bad request spoils no other."""
        try:
            results, version = self._run([job.arrays for job in jobs], [job.rows for job in jobs])
            return [(result, version) for result in results]
        except Refused as refused:
            if len(jobs) == 1:
                return [refused]
        except Exception as error:
            if len(jobs) == 1:
                return [Refused(500, f"the model failed: {type(error).__name__}: {error}")]
        return [outcome for job in jobs for outcome in self._attempt([job])]

    def _settle(self, jobs: list[Job[Any]], outcomes: list[tuple[Any, int] | Refused]) -> None:
        self._busy = False
        for job, outcome in zip(jobs, outcomes):
            if job.withdrawn:
                continue
            if isinstance(outcome, Refused):
                job.failed(outcome)
            else:
                job.settled(*outcome)
        if self._waiting:
            self._look_soon(self._loop.time())
        else:
            self._rest()

    def _fail(self, job: Job[Any], refused: Refused) -> None:
        if not job.withdrawn:
            job.failed(refused)

    def _rest(self) -> None:
        if not self._waiting and not self._busy:
            self._idle.set()

    def _sweep_at(self, when: float) -> None:
        if self._sweep:
            self._sweep.cancel()
        self._sweep_when = when
        self._sweep = self._loop.call_at(when, self._sweep_now)

    def _sweep_now(self) -> None:
        """Answer those whose deadline has passed; they need not wait for the engine to hear it."""
        self._sweep, self._sweep_when = None, math.inf
        now = self._loop.time()
        late = [job for job in self._waiting if job.deadline <= now]
        if late:
            self._waiting = deque(job for job in self._waiting if job.deadline > now)
            self._rows = sum(job.rows for job in self._waiting)
            for job in late:
                self._fail(job, _late())
        if self._waiting:
            earliest = min(job.deadline for job in self._waiting)
            if earliest < math.inf:
                self._sweep_at(max(earliest, now + 1e-3))
        else:
            self._rest()


def _late() -> Refused:
    return Refused(504, "the deadline passed before the request's turn came")
