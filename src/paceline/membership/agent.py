"""The agent of a host: starts its members, watches them, passes on what they print, and leaves nothing
behind.

Runs in the launcher's process, on one thread that lives as long as the members. It knows nothing of
training: a busy member cannot look dead to it, since it watches processes and not their answers.

Some members may be lost, and started again (`Again`), while the others go on; one without which the run can go on, and
that is stopped for too long, is killed, so that it cannot come back to a run that has gone on without it. When one
fails that is needed, the others are given a moment to notice and end by themselves, so that their last words are their
own; then they get SIGTERM, and SIGKILL if they are still there some seconds later.
"""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from paceline.core.errors import PacelineError
from paceline.core.lost import how
from paceline.membership.lines import clean
from paceline.membership.process import Process, Show, Start
from paceline.membership.stopped import Stopped
from paceline.membership.watch import Watch

# What a member says when it ends because another one did: it is not the one to blame.
_FOLLOWED = re.compile(
    r"paceline\.core\.errors\.Interrupted:|paceline: member \d+ ends: |.*Connection (closed|reset) by peer"
)
_FOLLOWERS = ("Interrupted:", "Dismissed:")
_SURE = re.compile(r"paceline\.core\.errors\.ConfigError: (.*)")


def sure_error(tail: Iterable[str]) -> str:
    """What a member ended by, if it was an error that would come again (ConfigError), by its last lines; else "".

    >>> sure_error(["Traceback", "paceline.core.errors.ConfigError: lr=-1: give more", "failed  step 3"])
    'lr=-1: give more'
    """
    found = [match for line in tail if (match := _SURE.match(clean(line, colours=False)))]
    return found[-1][1] if found else ""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How one member ended."""

    rank: int
    code: int  # negative: the signal that killed it
    seconds: float
    tail: tuple[str, ...]  # its last lines
    asked: bool  # whether it had been told to stop
    losable: bool = False  # the others can go on without it
    at: float  # time.monotonic()
    pid: int = 0
    error: str = ""  # what it said it failed of, before its process ended
    why: str = ""  # its agent killed it

    @classmethod
    def of(cls, process: Process, *, asked: bool, losable: bool) -> Ended:
        assert process.code is not None
        return cls(
            rank=process.rank,
            code=process.code,
            seconds=process.ended - process.began,
            tail=tuple(process.tail),
            asked=asked,
            losable=losable,
            at=process.ended,
            pid=process.pid,
            why=process.why,
        )

    @property
    def how(self) -> str:
        """How it ended, in words."""
        return self.why or how(self.code)

    @property
    def failed(self) -> bool:
        return self.code != 0 and (not self.asked or bool(self.error))

    @property
    def followed(self) -> bool:
        """Whether its last words say that it ended because another member did."""
        return self.error.startswith(_FOLLOWERS) or any(_FOLLOWED.match(line) for line in self.tail)

    @property
    def sure(self) -> str:
        """The error by which it ended, if that would come again; else ""."""
        return sure_error(self.tail) if self.code > 0 else ""


@dataclass(frozen=True)
class Outcome:
    """How all of them ended, in the order of ranks."""

    ended: tuple[Ended, ...]
    stopped_by: int = 0  # the signal with which `stop` was called
    unfinished: bool = False  # the run could not go on, though perhaps no process failed
    replaced: tuple[Ended, ...] = ()  # those that were started again

    @property
    def lost(self) -> list[Ended]:
        """Those that failed while the others went on. Who followed the failure to blame may have ended before it."""
        first = self.first_failed
        all_ = [e for e in (*self.replaced, *self.ended) if e.failed and e.losable]
        return [e for e in all_ if not first or (e.at < first.at and not e.followed)]

    @property
    def first_failed(self) -> Ended | None:
        """The failure to blame: the earliest that did not follow from another's.

        Where one that was needed followed, the others could not go on without the one that was lost after all; where
        all followed, it was one that was started again.
        """
        failed = [e for e in self.ended if e.failed]
        first = min((e for e in failed if not e.losable), key=lambda e: (e.followed, e.at), default=None)
        if first is None and not self.unfinished:
            return None
        if first is None or first.followed:
            first = min(failed, key=lambda e: (e.followed, e.at), default=None)
        if first is None or first.followed:
            before = [e for e in self.replaced if e.failed]
            first = min([*before, *failed], key=lambda e: (e.followed, e.at), default=None)
        return first

    @property
    def code(self) -> int:
        """The exit code of the whole, as a shell counts."""
        if self.stopped_by:
            return 128 + self.stopped_by
        if first := self.first_failed:
            return 1 if first.error and first.code < 0 else first.code if first.code > 0 else 128 - first.code
        return int(self.unfinished)


class Again(Protocol):
    """Who decides about members that are lost; see `paceline.launch.replacing`."""

    @property
    def begun(self) -> bool:
        """Whether members can be replaced by now."""

    @property
    def reason(self) -> str:
        """Why the run cannot go on; "": it can."""

    @property
    def joining(self) -> Collection[int]:
        """Ranks that were started again and do not take part yet."""

    def lost(self, rank: int, how: str, error: str = "") -> float | None:
        """In how many seconds it is started again; None: not any more. `error`: what it ended by, if that would come
        again."""

    def started(self, rank: int) -> None: ...
    def look(self) -> None: ...


class Agent:
    """Runs the members of one host to their end."""

    def __init__(
        self,
        starts: Sequence[Start],
        show: Show,
        *,
        logs: Path | None = None,
        losable: Sequence[int] = (),  # ranks whose failure stops nobody
        again: Again | None = None,  # those of them that are started again
        stopped: Sequence[Stopped] = (),  # who is looked at, and for how long they may be stopped
        notice_s: float = 3.0,  # for the others to notice a failure
        grace_s: float = 5.0,  # between SIGTERM and SIGKILL
        serving: Sequence[int] = (),  # ranks that are there for the others, and end after them
        alone_s: float = 10.0,  # for these to notice that they are alone
        on_started: Callable[[list[int]], None] = lambda pids: None,
        on_ended: Callable[[int, int], None] = lambda rank, code: None,
        on_lost: Callable[[int, str], None] = lambda rank, how: None,  # one that is losable
    ) -> None:
        self._starts = starts
        self._show = show
        self._logs = logs
        self._losable = frozenset(losable)
        self._again = again
        self._stopped = stopped
        self._due: dict[int, float] = {}  # by rank: when it is started again
        self._replaced: list[Process] = []
        self._needed: set[int] = set()  # processes of losable ranks without which the others cannot go on
        self._serving = frozenset(serving)
        self._alone_s = alone_s
        self._alone_at: float | None = None  # since when nobody else is left
        self._notice_s = notice_s
        self._grace_s = grace_s
        self._on_started = on_started
        self._on_ended = on_ended
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._processes: list[Process] = []
        self._asked: set[int] = set()  # ranks that were told to stop while they ran
        self._failed_at: float | None = None
        self._asked_at: float | None = None
        self._killed = False
        self._stopped_by = 0
        self._over = False

    def run(self) -> Outcome:
        """Start the members and stay until all have ended.

        The kernel ties the members to the thread that calls this, so they cannot outlive it.
        """
        with Watch() as watch:
            self._start_all(watch)
            while watch.processes or self._due:
                self._turn(watch)
                self._start_due(watch)
        with self._lock:
            self._over = True
        ended, replaced = (tuple(map(self._ending, ps)) for ps in (self._processes, self._replaced))
        return Outcome(ended, self._stopped_by, replaced=replaced)

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Ask all to stop; a second time, kill them. May be called from any thread; `number` says why."""
        with self._lock:
            if self._over:
                return
            again, self._stopped_by = bool(self._stopped_by), self._stopped_by or number
        if again:
            self._kill()
        else:
            self._ask()

    def kill(self, rank: int, number: int) -> None:
        """Send a signal to one member."""
        self._processes[rank].signal(number)

    def resize(self) -> None:
        """Our terminal has another size."""
        for process in list(self._processes):
            process.resize()

    def _start_all(self, watch: Watch) -> None:
        for start in self._starts:
            if self._stopped_by:
                break
            process = watch.start(start, self._show, self._logs / f"rank-{start.rank}.log" if self._logs else None)
            with self._lock:
                self._processes.append(process)
        if self._stopped_by:  # between one start and the next
            self._ask()
        self._on_started([p.pid for p in self._processes])

    def _turn(self, watch: Watch) -> None:
        for process in watch.turn():
            assert process.code is not None
            if process.code and process.rank not in self._asked:
                self._note_failure(process)
            self._on_ended(process.rank, process.code)
        now = time.monotonic()
        for stopped in self._stopped if not self._failed_at and not self._asked_at else ():
            running = [p for p in self._processes if p.rank in stopped.ranks and p.code is None]
            for process in stopped.too_long(running, now):
                process.why = f"stopped for {stopped.silence_s:g} s"
                process.signal(signal.SIGKILL)
        if self._failed_at and not self._asked_at and now - self._failed_at >= self._notice_s:
            self._ask()
        if self._serving and not self._asked_at and self._are_alone(now):
            self._ask()
        if self._asked_at and not self._killed and now - self._asked_at >= self._grace_s:
            self._kill()

    def _are_alone(self, now: float) -> bool:
        """Whether those who serve were without the others for too long: these may have joined and never trained."""
        others = [p for p in self._processes if p.rank not in self._serving]
        if self._due or any(p.code is None for p in others):
            self._alone_at = None
            return False
        self._alone_at = self._alone_at or now
        return now - self._alone_at >= self._alone_s

    def _note_failure(self, process: Process) -> None:
        assert process.code is not None
        again, losable = self._again, process.rank in self._losable
        words = process.why or how(process.code)
        if losable and again and self._failed_at is None:
            losable = again.begun
            error = sure_error(process.tail) if process.code > 0 else ""
            if losable and (wait_s := again.lost(process.rank, words, error)) is not None:
                self._due[process.rank] = time.monotonic() + wait_s
            losable = losable and not again.reason
        if not losable:
            self._needed.add(process.pid)
            self._failed_at = self._failed_at or time.monotonic()
            if again and again.reason:  # the others would notice nothing
                self._ask()
        elif self._failed_at is None:
            self._on_lost(process.rank, words)

    def _start_due(self, watch: Watch) -> None:
        """Start again who is due, unless the run comes to its end."""
        if self._again is None:
            return
        self._again.look()
        finished = any(p.code == 0 for p in self._processes)
        if self._failed_at or self._asked_at or finished:
            self._due.clear()
        for rank in self._again.joining if finished else ():  # there is nothing left for them to do
            self._asked.add(rank)
            self._processes[rank].signal(signal.SIGKILL)
        for rank in [rank for rank, at in self._due.items() if time.monotonic() >= at]:
            del self._due[rank]
            log = self._logs / f"rank-{rank}.log" if self._logs else None
            try:
                process = watch.start(self._starts[rank], self._show, log)
            except PacelineError as error:  # no room for it now: that counts as one more loss
                self._show.line(rank, "err", f"paceline: {error}")
                self._note_failure(self._processes[rank])
                continue
            with self._lock:
                self._replaced.append(self._processes[rank])
                self._processes[rank] = process
            self._again.started(rank)
            self._on_started([p.pid for p in self._processes])

    def _ask(self) -> None:
        self._send(signal.SIGTERM)
        self._asked_at = self._asked_at or time.monotonic()

    def _kill(self) -> None:
        self._killed = True
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        with self._lock:
            for process in self._processes:
                if process.code is None:
                    self._asked.add(process.rank)
                    process.signal(number)

    def _ending(self, process: Process) -> Ended:
        rank = process.rank
        losable = rank in self._losable and process.pid not in self._needed
        return Ended.of(process, asked=rank in self._asked and process not in self._replaced, losable=losable)
