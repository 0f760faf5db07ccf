"""How a run is getting on, from the files that it writes anyway: the first member's events, everyone's status.

Nothing is asked of the members. Where the run's directory is not on this host, what is not there is not told.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from paceline.core import status
from paceline.server.outside.visits import Doing, Progress

_TAIL_BYTES = 1 << 18  # of the events, at most, that one look reads
_HEAD_BYTES = 1 << 14  # in which the start is told
_LOOK_S = 0.2  # between two looks at the files
_SPAN_S = 10.0  # over which samples per second are taken


class Watching:
    """Reads one run's directory, however many watch."""

    def __init__(self, directory: Path) -> None:
        self._events = directory / "events" / "rank-0.jsonl"
        self._status = directory / "status"
        self._lock = threading.Lock()
        self._looked = 0.0
        self._begin = self._at = _size(self._events)  # what is there already is of an earlier start
        self._rest = b""  # of a line that is still being written
        self._members: tuple[Doing, ...] = ()
        self._steps: deque[tuple[float, float]] = deque()  # time, samples
        self._epochs: int | None = None
        self._scalars: dict[str, float] = {}
        self._step = self._epoch = 0
        self.outcome = ""  # when the first member has said how it ended

    def progress(self, **more: int) -> Progress:
        with self._lock:
            if time.monotonic() - self._looked > _LOOK_S:
                self._looked = time.monotonic()
                self._read()
                self._members = tuple(self._doing())
            return Progress(
                state=self.outcome or "running",
                epoch=self._epoch,
                epochs=self._epochs,
                step=self._step,
                loss=self._scalars.get("loss"),
                scalars=dict(self._scalars),
                samples_per_s=self._rate(),
                members=self._members,
                **more,
            )

    def again(self) -> None:
        """Look at the files the next time, however short ago that was."""
        self._looked = 0.0

    def _doing(self) -> list[Doing]:
        ranks = sorted(int(path.name[5:]) for path in self._status.glob("rank-*") if path.name[5:].isdecimal())
        found = [status.read(self._status / f"rank-{rank}", rank) for rank in ranks]
        return [Doing(rank=s.rank, step=s.step, epoch=s.epoch, what=s.what) for s in found if s]

    def _read(self) -> None:
        size = _size(self._events)
        if size < self._at:  # another file in its place
            self._begin = self._at = 0
        try:
            with self._events.open("rb") as file:
                if size - self._at > _TAIL_BYTES:  # nobody has looked for long
                    if self._at == self._begin:
                        file.seek(self._at)
                        self._lines(file.read(_HEAD_BYTES).split(b"\n"), {"start"})
                    self._at, self._rest = size - _TAIL_BYTES, b""
                file.seek(self._at)
                data = self._rest + file.read(_TAIL_BYTES)
                self._at = file.tell()
        except OSError:
            return
        *lines, self._rest = data.split(b"\n")
        self._lines(lines)

    def _lines(self, lines: list[bytes], kinds: set[str] | None = None) -> None:
        for line in lines:
            try:
                event = json.loads(line)
                if kinds is None or event["kind"] in kinds:
                    self._take(event)
            except (ValueError, KeyError, TypeError, AttributeError):
                continue  # half a line, or an event that we do not know

    def _take(self, event: dict[str, Any]) -> None:
        kind = event["kind"]
        if kind in ("start", "epoch"):
            self._epochs = event.get("epochs", self._epochs)
            self._epoch = int(event.get("epoch", event.get("resumed_epoch") or 0))
        elif kind == "step":
            self._epoch, self._step = int(event["epoch"]), int(event["step"])
            self._scalars.update({name: float(value) for name, value in event["scalars"].items()})
            self._steps.append((float(event["time"]), float(event["samples"])))
            while self._steps[-1][0] - self._steps[0][0] > _SPAN_S:
                self._steps.popleft()
        elif kind == "end":
            self.outcome = str(event["outcome"])

    def _rate(self) -> float | None:
        if len(self._steps) < 2:
            return None
        seconds = self._steps[-1][0] - self._steps[0][0]
        samples = sum(samples for _, samples in self._steps) - self._steps[0][1]
        return samples / seconds if seconds > 0 else None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
