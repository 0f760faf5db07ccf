"""What happened in a run, one line each, for both displays: epochs that ended, metrics, checkpoints, warnings.

The line of an epoch waits for the means over it ("epoch/loss" and the like, which come right after its last
step) and shows them instead of the last values. Tiny epochs and frequent checkpoints are thinned out.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

from paceline.core.events import Event
from paceline.train import figures
from paceline.train.pace import Pace

SPLIT = ("data", "compute", "wait")
MEAN = "epoch/"  # begins the name of a metric that is the mean of a scalar over an epoch
_MANY_EPOCHS = 100  # after which their ends are told at most once a second
_CHECKPOINT_S = 30.0  # between two checkpoints that are told


class Story:
    """Takes all events into `pace`, and says which lines they are worth."""

    def __init__(self, brief: bool = False) -> None:
        self.pace = Pace()
        self._brief = brief  # an epoch's line says nothing that a display shows anyway
        self._means: dict[str, Any] = {}
        self._epoch_over = False
        self._told_step = 0  # of the last line about an epoch
        self._num_epochs = 0
        self._epoch_at = self._checkpoint_at = -1e9

    def take(self, event: Event) -> Iterator[tuple[str, str]]:
        """(kind, line), in order; the kind of an epoch's line is "epoch"."""
        kind, pace = event.get("kind"), self.pace
        if kind == "step":
            pace.take(event)
            self._epoch_over = pace.within() == pace.epoch_steps
            return
        if kind == "metric" and str(event.get("name")).startswith(MEAN):
            self._means[str(event["name"]).removeprefix(MEAN)] = event.get("value")
            self._epoch_over = True
            if set(self._means) < set(pace.scalars):
                return  # more of them follow
        if self._epoch_over or kind in ("epoch", "end"):
            yield from self.epoch(last=kind == "end")
        pace.take(event)
        if kind == "checkpoint":
            if time.monotonic() - self._checkpoint_at < _CHECKPOINT_S:
                return
            self._checkpoint_at = time.monotonic()
        if text := happening(event, pace):
            yield str(kind), text

    def epoch(self, last: bool = False) -> Iterator[tuple[str, str]]:
        """The line of the epoch that is over, if it was not told."""
        means, self._means, self._epoch_over = self._means, {}, False
        if not self.pace.stepped or self.pace.step == self._told_step:
            return
        self._num_epochs += 1
        if self._num_epochs > _MANY_EPOCHS and time.monotonic() - self._epoch_at < 1.0 and not last:
            return
        self._epoch_at = time.monotonic()
        self._told_step = self.pace.step
        yield "epoch", standing(self.pace, means, self._brief)


def standing(pace: Pace, means: Mapping[str, Any] | None = None, brief: bool = False) -> str:
    """Where a run stands, in one line; `means` are shown instead of the last values.

    >>> pace = Pace()
    >>> pace.take({"kind": "step", "time": 1.0, "epoch": 0, "step": 3, "scalars": {"loss": 0.25}})
    >>> standing(pace)
    'epoch 1  step 3  loss 0.2500'
    """
    parts = [pace.where(), f"step {pace.step}"]
    scalars = pace.scalars | {name: x for name, x in (means or {}).items() if name in pace.scalars}
    parts += [f"{figures.clean(name)} {figures.number(x)}" for name, x in scalars.items()]
    if (rate := pace.samples_per_s()) is not None:
        parts.append(f"{figures.count(rate)} samples/s")
    if not brief and (split := pace.split()) is not None:
        parts.append(" ".join(f"{n} {figures.percent(x)}" for n, x in zip(SPLIT, split)))
    if not brief and (left := pace.left_s()) is not None:
        parts.append(f"left {figures.duration(left)}")
    return "  ".join(filter(None, parts))


def happening(event: Event, pace: Pace) -> str:
    """The line for an event that is no step, or "" where it needs none."""
    kind = event.get("kind")
    if kind == "start":
        parts = [f"run {figures.clean(event.get('name') or '')}".rstrip()]
        parts.append(figures.members(event.get("size") or 1))
        parts += [figures.clean(event[key]) for key in ("strategy", "device") if event.get(key)]
        if event.get("resumed_step"):
            parts.append(f"resumed at step {event['resumed_step']}")
        return "  ".join(parts)
    if kind == "metric" and not str(event.get("name")).startswith(MEAN):
        step = event.get("step")
        parts = [pace.where(), f"step {pace.step if step is None else step}"]
        parts.append(f"{figures.clean(event.get('name'))} {figures.number(event.get('value'))}")
        return "  ".join(filter(None, parts))
    if kind == "checkpoint":
        cost = f"{figures.size(event.get('bytes'))} in {figures.value(event.get('seconds')):.2f} s"
        path = figures.clean(_short(str(event.get("path") or "")), 500)
        return f"checkpoint  step {event.get('step')}  {cost}  {path}".rstrip()
    if kind == "checkpoint_failed":
        return f"warning: checkpoint not written: {figures.clean(event.get('reason'), 2000)}"
    if kind == "warning":
        return f"warning: {figures.clean(event.get('message'), 2000)}"
    if kind == "end" and event.get("outcome") not in ("finished", "left early"):  # these end with the summary
        seconds = figures.duration(event.get("seconds", pace.elapsed_s()))
        outcome = figures.clean(event.get("outcome") or "ended")
        return f"{outcome}  step {event.get('step', pace.step)}  after {seconds}"
    return ""


def _short(path: str) -> str:
    """Seen from here, where that is shorter."""
    try:
        return min(os.path.relpath(path), path, key=len) if path else ""
    except (OSError, ValueError):  # the working directory is gone
        return path
