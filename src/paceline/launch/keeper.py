"""Keeps a scheduler's process alive: started again when it ends, since a run can do without one only for a while.

A scheduler keeps its state in a journal and comes back with the same address, so that members and agents need only
redial; see `membership.scheduler`. One that somebody has stopped is killed, so that it is. Its output goes to
logs/scheduler.log.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from paceline.core.errors import PacelineError
from paceline.core.lost import how
from paceline.membership.process import Process, Show, Start
from paceline.membership.stopped import Stopped
from paceline.membership.watch import Watch

_FIRST_WAIT_S = 0.1  # doubled with each restart within the window
_LONGEST_WAIT_S = 3.2
_WINDOW_S = 60.0
_RESTARTS = 10  # within the window
_END_S = 2.0  # between SIGTERM and SIGKILL


class Keeper:
    """One scheduler's process at a time. All calls come from the thread of the watch.

    Args:
        on_started: gets its address and its process number.
        say: gets what the user should know.
        silence_s: after which one that is stopped (SIGSTOP) is killed.
    """

    def __init__(
        self,
        start: Start,
        show: Show,
        log: Path,
        *,
        on_started: Callable[[str, int], None],
        say: Callable[[str], None],
        silence_s: float = 3.0,
    ) -> None:
        self._start = start
        self._show = show
        self._log = log
        self._on_started = on_started
        self._say = say
        self._stopped = Stopped(silence_s)
        self._process: Process | None = None
        self._known = False  # whether the present one has said its address
        self._at = 0.0  # when it may be started
        self._ends: deque[float] = deque()
        self._ending = False
        self.gave_up = ""  # why it is started no more

    def turn(self, watch: Watch, ended: list[Process]) -> None:
        """Called with each turn of the watch; `ended`: who has just ended."""
        if self._process in ended:
            self._note_end(self._process)
            self._process = None
        if self._process and not self._known and (address := _address(self._process.tail)):
            self._known = True
            self._on_started(address, self._process.pid)
        for process in self._stopped.too_long([self._process] if self._process else [], time.monotonic()):
            process.why = f"stopped for {self._stopped.silence_s:g} s"
            process.signal(signal.SIGKILL)
        if self._process or self._ending or self.gave_up or time.monotonic() < self._at:
            return
        try:
            self._process, self._known = watch.start(self._start, self._show, self._log), False
        except PacelineError as error:  # no room for it now
            self._wait(str(error), "")

    def end(self, watch: Watch) -> None:
        """End it; nothing is started any more."""
        self._ending = True
        process, deadline = self._process, time.monotonic() + _END_S
        if process is None:
            return
        process.signal(signal.SIGTERM)
        while process in watch.processes:
            watch.turn()
            if time.monotonic() > deadline:
                process.signal(signal.SIGKILL)

    def _note_end(self, process: Process | None) -> None:
        if process is not None and process.code is not None:
            self._wait(process.why or how(process.code), process.tail[-1] if process.tail else "")

    def _wait(self, end: str, line: str) -> None:
        """Before it is started again, if it is."""
        now = time.monotonic()
        self._ends.append(now)
        while now - self._ends[0] > _WINDOW_S:
            self._ends.popleft()
        if len(self._ends) > _RESTARTS:
            last = f", its last line: {line}" if line else ""
            self.gave_up = (
                f"the scheduler ended {len(self._ends)} times within {_WINDOW_S:g} s (last: {end}{last}); it is not "
                f"started again, so members that are lost now are not replaced: see {self._log}"
            )
            self._say(f"error: {self.gave_up}")
            return
        wait_s = min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2 ** (len(self._ends) - 1))
        self._at = now + wait_s
        self._say(f"the scheduler ended ({end}); it is started again in {wait_s:g} s, and the members go on meanwhile")


class _Said(msgspec.Struct):
    """The first line of a scheduler."""

    address: str


def _address(lines: Iterable[str]) -> str:
    for line in lines:
        with contextlib.suppress(msgspec.DecodeError):
            return msgspec.json.decode(line, type=_Said).address
    return ""
