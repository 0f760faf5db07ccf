"""The members of one host where members come and go: started and ended at a scheduler's orders.

The counterpart of `agent`, whose members are the same from beginning to end. It knows no rules: what is lost, what is
replaced and when the run is over the scheduler decides. It reports what only it can see: processes that run, have
ended or stand still. While no scheduler can be reached, the members go on.

A member that is started again comes from a standby where one waits: a process that has imported torch already.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from paceline.core.errors import PacelineError
from paceline.membership import agent, orders
from paceline.membership.process import Process, Show, Start
from paceline.membership.watch import Watch

_LOOK_S = 0.25  # for processes that are stopped
_STANDBY_KILLS = 3  # of those that wait, after which none is started: there may be no memory for them


@dataclass(frozen=True, kw_only=True)
class Means:
    """What members are made of."""

    start: Callable[[int, bool], Start]  # by id, and whether it is the first time
    standby: Start | None = None
    order: Callable[[int], bytes] = lambda id: b""  # what a standby is told to become a member
    standbys: int = 0  # how many wait
    warm_after_s: float = 2.0  # after a member's start: a standby's import must not slow down that of the members
    logs: Path | None = None


class _End(NamedTuple):
    """A member that has ended; its last lines may still be on their way."""

    process: Process
    asked: bool  # told to stop
    before: bool  # the run was over: what fails then is made good for


class Crew:
    """Members that come and go. `obey`, `stop`, `kill` and `resize` may be called from any thread.

    Args:
        report: to the scheduler. Beats go out by themselves; one is reported when other processes are stopped.
        drain_s: how long members have to leave after SIGTERM; `notice_s`: to end by themselves once the run is over
            without having finished; `grace_s` lies between their SIGTERM and SIGKILL.
    """

    def __init__(
        self,
        means: Means,
        show: Show,
        *,
        report: Callable[[orders.FromAgent], None],
        drain_s: float = 10.0,
        notice_s: float = 3.0,
        grace_s: float = 5.0,
        on_started: Callable[[int, int], None] = lambda id, pid: None,
        on_lost: Callable[[int, int], None] = lambda id, code: None,  # failed before the run was over
    ) -> None:
        self._means = means
        self._show = show
        self._report = report
        self._drain_s = drain_s
        self._notice_s = notice_s
        self._grace_s = grace_s
        self._on_started = on_started
        self._on_lost = on_lost
        self._orders: deque[orders.ToAgent] = deque()
        self._lock = threading.Lock()
        self._running: dict[int, Process] = {}  # by id
        self._standbys: list[Process] = []
        self._no_standbys = means.standby is None  # or they end by themselves
        self._standby_kills = 0
        self._seen: set[int] = set()  # ids that were started before
        self._asked: dict[int, float] = {}  # process numbers that were told to end, and when
        self._started_at = 0.0
        self._looked_at = 0.0
        self._paused: tuple[int, ...] = ()
        self._ended: list[_End] = []
        self._stops: deque[int] = deque()
        self._stop_at: float | None = None  # when those who still run are asked to end
        self.stopped_by = 0
        self.over: str | None = None  # why the run is over; "": it has finished
        self.over_at = 0.0  # since when, by time.monotonic()

    # ---- from any thread

    def obey(self, order: orders.ToAgent) -> None:
        self._orders.append(order)

    def stop(self, number: int = signal.SIGTERM) -> None:
        """SIGTERM: let the members leave, then ask them to end; any other: ask at once; a second time: kill."""
        self._stops.append(number)

    def kill(self, id: int, number: int) -> None:
        """Send a signal to one member and what it started."""
        with self._lock:
            process = self._running.get(id)
        if process:
            process.signal(number)

    def resize(self) -> None:
        with self._lock:
            processes = list(self._running.values())
        for process in processes:
            process.resize()

    @property
    def running(self) -> dict[int, int]:
        """Process numbers by id."""
        with self._lock:
            return {id: process.pid for id, process in self._running.items()}

    @property
    def ending(self) -> bool:
        """Whether nothing more will be started."""
        return self.over is not None or bool(self.stopped_by)

    # ---- in the thread of the watch

    @property
    def gone(self) -> bool:
        """Whether no member is left and none will be started."""
        return not self._running and self.ending

    def turn(self, watch: Watch, ended: list[Process]) -> None:
        """Called with each turn of the watch; `ended`: who has just ended."""
        for process in ended:
            self._note_end(process)
        while self._stops:  # before orders: nothing is started any more
            self._begin_to_stop(self._stops.popleft())
        while self._orders:
            self._carry_out(watch, self._orders.popleft())
        now = time.monotonic()
        if self._stop_at is not None and now >= self._stop_at:
            self._stop_at = None
            for process in self._running.values():
                self._ask(process)
        for process in self._running.values():
            if now - self._asked.get(process.pid, now) >= self._grace_s:
                process.signal(signal.SIGKILL)
        if now - self._looked_at >= _LOOK_S:
            self._looked_at = now
            paused = tuple(id for id, process in self._running.items() if process.paused)
            if paused != self._paused:
                self._paused = paused
                self._report(orders.Beat(paused))
        while self.ending and self._standbys:  # so that nobody has to wait for their end later
            self._standbys.pop().signal(signal.SIGKILL)
        if not (self._no_standbys or self.ending):
            self._warm_up(watch, now)

    @property
    def well(self) -> bool:
        """Whether the last process of each id ended well."""
        last = {e.process.rank: e.process.code for e in self._ended}
        return bool(last) and not any(last.values())

    def outcome(self) -> agent.Outcome:
        """How it ended: if the run has finished, who was lost on the way; else the last end of each id, of which one
        is to blame."""
        if self.over == "":
            # Who comes when the run has just finished is refused, and is not to blame for that.
            ended = [agent.Ended.of(e.process, asked=e.asked, losable=e.before) for e in self._ended]
            ended = [replace(e, losable=e.losable or e.followed) for e in ended]
            return agent.Outcome(tuple(ended), self.stopped_by)
        all_ended = [agent.Ended.of(e.process, asked=e.asked, losable=False) for e in self._ended]
        last = {e.rank: e for e in all_ended}
        replaced = tuple(e for e in all_ended if e is not last[e.rank])
        return agent.Outcome(tuple(last[id] for id in sorted(last)), self.stopped_by, replaced=replaced)

    def _carry_out(self, watch: Watch, order: orders.ToAgent) -> None:
        if isinstance(order, orders.Start):
            if order.id not in self._running and not self.ending:
                self._start(watch, order.id)
        elif isinstance(order, orders.Stop):
            if process := self._running.get(order.id):
                self._ask(process)
        elif self.over is None:
            self.over = order.reason if isinstance(order, orders.Over) else order.message
            self.over_at = time.monotonic()
            if self.over:
                self._stop_at = time.monotonic() + self._notice_s

    def _start(self, watch: Watch, id: int) -> None:
        log = self._means.logs / f"rank-{id}.log" if self._means.logs else None
        again = id in self._seen
        self._standbys = [standby for standby in self._standbys if standby.code is None]
        if again and self._standbys:
            process = self._standbys.pop(0)
            process.become(id, log, self._means.order(id))
        else:
            try:
                process = watch.start(self._means.start(id, not again), self._show, log)
            except PacelineError as error:  # no room for it now: the others go on, and the scheduler may try again
                self._show.line(id, "err", f"paceline: {error}")
                self._report(orders.Ended(id, 1))
                return
        with self._lock:
            self._running[id] = process
        self._seen.add(id)
        self._started_at = time.monotonic()
        self._report(orders.Started(id, process.pid))
        self._on_started(id, process.pid)

    def _note_end(self, process: Process) -> None:
        assert process.code is not None
        if process in self._standbys:  # nobody told it to end: it cannot import what it must, or was killed
            self._standbys.remove(process)
            self._standby_kills += process.code < 0
            self._no_standbys = process.code >= 0 or self._standby_kills >= _STANDBY_KILLS
            self._started_at = time.monotonic()  # the next one after a rest
        if self._running.get(process.rank) is not process:
            return
        with self._lock:
            del self._running[process.rank]
        asked = self._asked.pop(process.pid, None) is not None
        self._ended.append(_End(process, asked, self.over is None))
        error = agent.sure_error(process.tail) if process.code > 0 and not asked else ""
        self._report(orders.Ended(process.rank, process.code, error))
        if process.code and not asked and self.over is None:
            self._on_lost(process.rank, process.code)

    def _begin_to_stop(self, number: int) -> None:
        if self.stopped_by:
            for process in self._running.values():
                self._asked.setdefault(process.pid, 0.0)
                process.signal(signal.SIGKILL)
            return
        self.stopped_by = number
        drains = number == signal.SIGTERM and self._running and self.over is None
        self._stop_at = time.monotonic() + (self._drain_s if drains else 0.0)
        if drains:
            self._report(orders.DrainHost())

    def _ask(self, process: Process) -> None:
        self._asked.setdefault(process.pid, time.monotonic())
        process.signal(signal.SIGTERM)

    def _warm_up(self, watch: Watch, now: float) -> None:
        assert self._means.standby is not None
        rested = now - self._started_at >= self._means.warm_after_s
        if len(self._standbys) < self._means.standbys and self._running and rested:
            try:
                self._standbys.append(watch.start(self._means.standby, self._show, None))
            except PacelineError:  # no room for one
                self._no_standbys = True
