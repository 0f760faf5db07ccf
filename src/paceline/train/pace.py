"""Where a run stands and how fast it goes, from its events: what both displays show.

Takes events in the order in which the first member emits them. Rates are sums that fade with time, so that
a short stall does not swing them and the first second of a run is already right. Epochs count from 0, as
`run.epochs()` gives them, and are shown from 1; `step` is the number of steps of the run that are done.
"""

from __future__ import annotations

import math
from typing import Any

from paceline.core.events import Event
from paceline.train.figures import value

_RATE_S = 5.0  # over about how many seconds the rate and the split are taken
_LEFT_S = 60.0  # and the steps per second behind the time left, which should not jump


class Faded:
    """Sums of which the past fades: after `over_s` seconds, a third of it is left."""

    def __init__(self, over_s: float, *names: str) -> None:
        self._over_s = over_s
        self.sums = dict.fromkeys(names, 0.0)

    def add(self, passed_s: float, /, **amounts: float) -> None:
        keep = math.exp(-max(passed_s, 0.0) / self._over_s)
        for name in self.sums:
            amount = amounts[name]
            self.sums[name] = self.sums[name] * keep + (amount if math.isfinite(amount) else 0.0)


class Pace:
    """The state of a run.

    >>> pace = Pace()
    >>> pace.take({"kind": "epoch", "time": 0.0, "epoch": 0, "epochs": 2, "steps": 10})
    >>> pace.take({"kind": "step", "time": 5.0, "epoch": 0, "step": 5, "samples": 50, "compute_s": 5.0})
    >>> pace.where(), pace.samples_per_s(), pace.left_s()
    ('epoch 1/2', 10.0, 15.0)
    """

    def __init__(self) -> None:
        self.epoch: int | None = None
        self.epochs: int | None = None
        self.step = 0
        self.stepped = False  # whether a step was seen
        self.epoch_begin = 0  # steps done before the first step of this epoch
        self.epoch_steps: int | None = None  # steps in an epoch, if known
        self.scalars: dict[str, Any] = {}
        self._told = False  # whether the run itself said how many steps an epoch has
        self._began_inside = False  # resumed within this epoch, so that its length cannot be learnt
        self._started: float | None = None
        self._last: float | None = None
        self._rate = Faded(_RATE_S, "samples", "seconds", "data", "compute", "wait")
        self._steps = Faded(_LEFT_S, "steps", "seconds")

    def take(self, event: Event) -> None:
        """Takes an event in; those that say nothing about the pace are ignored."""
        kind, now = event.get("kind"), value(event.get("time"))
        first = self.epoch is None
        if kind == "start":
            self.step = int(event.get("resumed_step") or 0)
            self._began_inside = self.step > 0
        elif kind == "epoch":
            self._begin_epoch(event)
        elif kind == "step":
            self._take_step(event, now)
        elif kind == "view":
            self._take_view(event, now)
        if kind in ("start", "epoch", "step", "end") and math.isfinite(now):
            if self._started is None:
                self._started = now
            if kind != "epoch" or first:  # what happens between epochs counts towards the time left
                self._last = now

    def _begin_epoch(self, event: Event) -> None:
        if not self._told and self.epoch is not None and not self._began_inside:
            self.epoch_steps = (self.step - self.epoch_begin) or None
        if self.epoch is not None:
            self._began_inside = False
        self.epoch = event.get("epoch")
        self.epochs = event.get("epochs") or self.epochs
        if event.get("steps"):
            self.epoch_steps, self._told = int(event["steps"]), True
        if event.get("step") is not None:
            self.epoch_begin, self._began_inside = int(event["step"]), False
            self.step = max(self.step, self.epoch_begin)  # who has not seen the steps before
        else:
            self.epoch_begin = self.step

    def _take_step(self, event: Event, now: float) -> None:
        step = int(event.get("step") or 0)
        times = {k: value(event.get(f"{k}_s") or 0.0) for k in ("data", "compute", "wait")}
        since = max(now - self._last, 0.0) if self._last is not None else 0.0
        timed = any(f"{k}_s" in event for k in times)
        seconds = sum(times.values()) if timed else since
        self._rate.add(seconds, samples=value(event.get("samples") or 0), seconds=seconds, **times)
        self._steps.add(since, steps=float(max(step - self.step, 0)), seconds=since)
        self.step, self.stepped = step, True
        if event.get("epoch") is not None:
            self.epoch = event["epoch"]
        self.scalars.update(event.get("scalars") or {})

    def _take_view(self, event: Event, now: float) -> None:
        """Others share what is left of the epoch."""
        if self.epoch is None:
            return
        if event.get("steps"):
            self.epoch_steps = int(event["steps"])
        if not self.stepped and math.isfinite(now):  # what went before was not seen, nor perhaps done here
            self.step = max(self.step, int(event.get("step") or 0))
            self._last = now

    def where(self) -> str:
        """ "epoch 3/10", or "" before the first."""
        if self.epoch is None:
            return ""
        return f"epoch {self.epoch + 1}" + (f"/{self.epochs}" if self.epochs else "")

    def within(self) -> int:
        """Steps done in this epoch."""
        return max(self.step - self.epoch_begin, 0)

    def done(self) -> float | None:
        """Which part of the run is done, from 0 to 1; of the epoch where their number is not known."""
        if not self.epoch_steps:
            return None
        part = min(self.within() / self.epoch_steps, 1.0)
        return (self.epoch + part) / self.epochs if self.epochs and self.epoch is not None else part

    def samples_per_s(self) -> float | None:
        sums = self._rate.sums
        return sums["samples"] / sums["seconds"] if sums["seconds"] and sums["samples"] else None

    def split(self) -> tuple[float, float, float] | None:
        """Shares of the time that went into data, compute and wait."""
        data, compute, wait = (self._rate.sums[k] for k in ("data", "compute", "wait"))
        whole = data + compute + wait
        return (data / whole, compute / whole, wait / whole) if whole > 0 else None

    def left_s(self) -> float | None:
        """Seconds to the end of the last epoch, or None where that cannot be known."""
        if not self.epoch_steps or not self.epochs or self.epoch is None:
            return None
        sums = self._steps.sums
        if sums["steps"] <= 0 or sums["seconds"] <= 0:
            return None
        steps = (self.epochs - 1 - self.epoch) * self.epoch_steps + max(self.epoch_steps - self.within(), 0)
        return max(steps, 0) * sums["seconds"] / sums["steps"]

    def epoch_left_s(self) -> float | None:
        """Seconds to the end of this epoch, or None where that cannot be known."""
        sums = self._steps.sums
        if not self.epoch_steps or sums["steps"] <= 0:
            return None
        return max(self.epoch_steps - self.within(), 0) * sums["seconds"] / sums["steps"]

    def elapsed_s(self) -> float:
        if self._started is None or self._last is None:
            return 0.0
        return self._last - self._started
