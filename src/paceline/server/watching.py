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
from paceline.server.visits import Doing, Progress

_TAIL_BYTES = 1 << 18  # of the events, at most, that one look reads
_LOOK_S = 0.2  # between two looks at the files
_SPAN_S = 10.0  # over which samples per second are taken


class Watching:
    """Reads one run's directory, however many watch."""

    def __init__(self, directory: Path, since: float) -> None:
        self._events = directory / "events" / "rank-0.jsonl"
        self._status = directory / "status"
        self._since = since  # older events are of an earlier start
        self._lock = threading.Lock()
        self._looked = 0.0
        self._at = -1  # in the events; -1: not read yet
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
        try:
            size = self._events.stat().st_size
            first = self._at < 0
            if first or size - self._at > _TAIL_BYTES or size < self._at:
                self._at, self._rest = max(0, size - _TAIL_BYTES), b""
                first = self._at > 0
            with self._events.open("rb") as file:
                file.seek(self._at)
                data = self._rest + file.read(_TAIL_BYTES)
                self._at = file.tell()
        except OSError:
            return
        *lines, self._rest = data.split(b"\n")
        for line in lines[1:] if first and self._at > _TAIL_BYTES else lines:
            try:
                event = json.loads(line)
                if isinstance(event, dict) and float(event["time"]) >= self._since:
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
