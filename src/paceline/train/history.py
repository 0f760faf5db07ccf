"""A run as its event files tell it: curves, epochs, resumes, where each member's time went.

Reads events/rank-*.jsonl of a run directory, of a run that ended, failed, was killed or still goes on. A
line that was torn by a kill is left out (what a resumed run appended to it is not). Where a run was
resumed, the steps that it did again replace those it had done before: every curve is one line. Scalars and
throughput come from the first member, times from every member.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from paceline.core.events import Event
from paceline.train.figures import value
from paceline.train.views import Counted, Views

Floats = npt.NDArray[np.float64]


class _Line(msgspec.Struct):
    """The fields of the event that there are many of; the others are read as plain objects."""

    kind: Any = None
    time: Any = 0.0
    rank: Any = None
    step: Any = 0
    samples: Any = 0
    scalars: Any = None
    data_s: Any = 0.0
    compute_s: Any = 0.0
    wait_s: Any = 0.0
    late: Any = False  # of a start


class Curve:
    """Values against steps, which rise."""

    def __init__(self) -> None:
        self._steps = array("q")
        self._values: list[Any] = []

    def add(self, step: int, x: Any) -> None:
        if self._steps and step <= self._steps[-1]:
            self.forget(step - 1)  # a step that is done again
        self._steps.append(step)
        self._values.append(x)

    def forget(self, after: int) -> None:
        """Drops what came after step `after`."""
        keep = bisect_right(self._steps, after)
        del self._steps[keep:], self._values[keep:]

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def steps(self) -> Floats:
        return np.array(self._steps, dtype=np.float64)

    @property
    def values(self) -> Floats:
        try:
            return np.array(self._values, dtype=np.float64)  # takes "nan" and "inf" as JSON lines write them
        except (TypeError, ValueError):
            return np.array([value(x) for x in self._values], dtype=np.float64)


class Times:
    """One member's seconds per event: data, compute, wait; and the samples of that event."""

    def __init__(self) -> None:
        self._rows = array("d")

    def add(self, line: _Line) -> None:
        data, compute, wait = value(line.data_s), value(line.compute_s), value(line.wait_s)
        self._rows.extend((value(line.time), value(line.samples), data, compute, wait))

    @property
    def rows(self) -> Floats:
        """Columns samples, data, compute, wait; what is not a number counts as none."""
        rows = np.array(self._rows, dtype=np.float64).reshape(-1, 5)
        rows = rows[np.argsort(rows[:, 0], kind="stable"), 1:]  # a member that came to lead has written two files
        return np.where(np.isfinite(rows) & (rows > 0), rows, 0.0)


class History:
    """What `read` found."""

    def __init__(self) -> None:
        self.starts: list[Event] = []  # one for the run and one for each time that it was resumed
        self.end: Event | None = None
        self.scalars: dict[str, Curve] = {}
        self.metrics: dict[str, Curve] = {}
        self.epochs = Curve()  # at which step each epoch began
        self.times: dict[int, Times] = {}  # by rank; in an elastic run, by the members' numbers for life
        self.first = Times()  # of the first member, whoever that was at the time
        self.checkpoints: list[Event] = []
        self.counted = Counted()  # changes of view since the last start
        self.stragglers: list[Event] = []  # and changes of shares
        self.warnings: Counter[tuple[int, str]] = Counter()  # (rank, message), in the order of their first time
        self.step = 0
        self.began = 0.0
        self.last = 0.0
        self.elapsed_s = 0.0  # over all parts of a resumed run, without the time between them
        self.unread = 0  # lines that could not be read

    @property
    def views(self) -> Views | None:
        return self.counted.views

    @property
    def resumed_steps(self) -> list[int]:
        return [int(value(s["resumed_step"])) for s in self.starts if s.get("resumed_step")]


def read(run_dir: Path) -> History:
    """Reads all event files of a run; an empty history where there are none."""
    history = History()
    found = [(int(m[1]), p) for p in (run_dir / "events").glob("*.jsonl") if (m := _NAME.fullmatch(p.name))]
    for rank, path in sorted(found):
        _read_file(path, rank, history)
    return history


_NAME = re.compile(r"rank-(\d{1,9})\.jsonl")


def _read_file(path: Path, rank: int, history: History) -> None:
    decode_step, decode_any = msgspec.json.Decoder(_Line).decode, msgspec.json.Decoder().decode
    part_began = 0.0
    with path.open("rb") as file:
        for raw in file:
            line = raw
            try:
                event = decode_step(line)
            except ValueError:
                # A torn line to which a resumed run appended: the whole event at its end still counts.
                at = line.rfind(b'{"kind"')
                line = line[max(at, 0) :]
                try:
                    event = decode_step(line)
                except ValueError:
                    history.unread += bool(line.strip())
                    continue
            kind = event.kind
            if kind == "step":
                who = event.rank if isinstance(event.rank, int) else rank  # who leads writes to the first file
                history.times.setdefault(who, Times()).add(event)
                if rank == 0:
                    history.first.add(event)
                    _take_step(event, history)
            elif kind in ("warning", "checkpoint_failed"):
                whole = decode_any(line)
                message = whole.get("message") or f"checkpoint not written: {whole.get('reason')}"
                history.warnings[rank, str(message)] += 1
            elif rank == 0:
                _take(decode_any(line), history)
            if rank == 0 and isinstance(event.time, float):
                if (kind == "start" and not event.late) or not part_began:
                    history.elapsed_s += history.last - part_began if part_began else 0.0
                    part_began = event.time
                    history.began = history.began or event.time
                history.last = event.time
    if rank == 0 and part_began:
        history.elapsed_s += history.last - part_began


def _take_step(event: _Line, history: History) -> None:
    if not isinstance(event.step, int):
        return
    history.step = event.step
    if isinstance(event.scalars, dict):
        for name, x in event.scalars.items():
            curve = history.scalars.get(name)
            if curve is None:
                curve = history.scalars[name] = Curve()
            curve.add(event.step, x)


def _take(event: Event, history: History) -> None:
    kind = event.get("kind")
    if kind == "start" and event.get("late") and history.starts:
        history.end = None  # of who was lost and is replaced by this one: the run goes on, and so do its curves
        return
    if kind == "start":
        history.starts.append(event)
        history.end, history.counted = None, Counted()
        resumed = int(value(event.get("resumed_step") or 0))
        for curve in (*history.scalars.values(), *history.metrics.values(), history.epochs):
            curve.forget(resumed)
        history.step = resumed
        history.checkpoints = [c for c in history.checkpoints if value(c.get("step")) <= resumed]
    elif kind == "epoch":
        step = event.get("step")
        history.epochs.add(int(value(history.step if step is None else step)), event.get("epoch"))
    elif kind == "metric":
        step = event.get("step")
        curve = history.metrics.setdefault(str(event.get("name")), Curve())
        curve.add(int(value(history.step if step is None else step)), event.get("value"))
    elif kind == "checkpoint":
        history.checkpoints.append(event)
    elif kind == "view":
        began = history.starts[-1].get("time") if history.starts else 0.0
        history.counted.add(event, value(began or 0.0))
    elif kind in ("straggler", "shares"):
        history.stragglers.append(event)
    elif kind == "end":
        history.end = event
