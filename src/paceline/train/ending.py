"""How a run ends on one member: its outcome, the summary, the report, and everything closed, however the script ends.

`gather` is called when training is over and all members are there; what it collects is shown when the process ends,
after the script's own last words. A member that ends by an exception says so in its events, and closing its wires
tells the others at once.
"""

from __future__ import annotations

import atexit
import gc
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from paceline.core import lost, trained
from paceline.core.events import Event, Events
from paceline.core.status import Status
from paceline.train.earlier import with_lost
from paceline.transport.group import Group


class Ending:
    """Runs once: by `run.close()`, or at exit."""

    def __init__(self, *, directory: Path, script: str, events: Events, status: Status, first: bool, host: str) -> None:
        self.script = script
        self.start: Event | None = None  # the event with which training began
        # Where members come and go: rows of those who do not tell themselves, and how long all have trained
        self.others: Callable[[], tuple[list[dict[str, Any]], float]] = lambda: ([], 0.0)
        self.left_early = False  # the script left its last loop over epochs before the end, but not by an exception
        self._directory = directory
        self._events = events
        self._status = status
        self.first = first  # the one that says what became of the run
        self._host = host
        self._began = time.monotonic()
        self._members: list[dict[str, Any]] = []
        self._failure: str | None = None
        self._closers: list[Callable[[], None]] = []
        self._finish: Callable[[], Mapping[str, Any]] | None = None
        self._closed = False
        self._hook = sys.excepthook

    def watch(self, finish: Callable[[], Mapping[str, Any]], closers: list[Callable[[], None]]) -> None:
        """From now on the end of the process ends the run."""
        self._finish = finish
        self._closers = closers
        sys.excepthook = self._excepthook
        atexit.register(self._at_exit)

    def gather(self, group: Group, totals: Mapping[str, Any]) -> None:
        """All members tell the first one what they did; `totals` is this one's."""
        mine = json.dumps({"rank": group.rank, **totals, "host": self._host}).encode()
        self._members = [json.loads(told) for told in group.exchange(mine)]

    def fail(self, error: BaseException) -> None:
        self._failure = f"{type(error).__name__}: {error}"

    def close(self, finish: Callable[[], Mapping[str, Any]]) -> None:
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        if sys.excepthook == self._excepthook:
            sys.excepthook = self._hook
        self._status.set(f"failed: {self._failure}" if self._failure else "ending")
        try:
            last = dict(finish())
            self._say(last)
        finally:
            self._status.set(f"failed: {self._failure}" if self._failure else self._outcome)
            for closer in self._closers:
                closer()

    @property
    def failed(self) -> bool:
        return self._failure is not None

    @property
    def _outcome(self) -> str:
        if self._failure:
            return "failed"
        return "left early" if self.left_early else "finished"

    def _say(self, last: dict[str, Any]) -> None:
        members = self._members or [{**last, "host": self._host}]
        seconds, known = time.monotonic() - self._began, trained.read(self._directory)
        if known and known.lost:
            members = with_lost(members, known, self._directory)
            seconds = max(seconds, time.time() - known.began)  # this one may have come late
        others, trained_s = self.others()
        told = {member.get("rank") for member in members}
        end: Event = {
            "outcome": self._outcome,
            "step": last.get("step", 0),
            "seconds": seconds,
            "members": [*members, *(row for row in others if row["rank"] not in told)],
        }
        if trained_s:
            end["trained_s"] = trained_s
        if gone := lost.read(self._directory):
            end["lost"] = [msgspec.structs.asdict(one) for one in gone]
        if self._failure:
            end["reason"] = self._failure
        self._events.emit("end", **end)
        if not self.first or not last.get("step"):
            return
        from paceline.train.history import read
        from paceline.train.report import write_report
        from paceline.train.shown import print_summary
        from paceline.train.summary import summarise, write_summary

        summary = summarise({"kind": "end", **end}, self.start)
        try:
            history = read(self._directory)
            summary = summarise({"kind": "end", **end}, self.start, history.views)
            write_summary(summary, self._directory)
            report = write_report(self._directory, history)
        except OSError as error:  # a full disk at the very end takes nothing from the training
            print(f"paceline: the report could not be written: {error}", file=sys.stderr)
            report = None
        if not self._failure:
            print_summary(summary)
            if report:
                print(f"report: {report}", file=sys.stderr)

    def _excepthook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self.fail(error)
        self._hook(kind, error, trace)

    def _at_exit(self) -> None:
        if self._finish:
            self.close(self._finish)
        gc.freeze()  # else Python looks through all of torch's objects, for seconds, before the process ends
