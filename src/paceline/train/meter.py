"""Measures the steps of one member and tells of them in events, at most ten times a second.

Scalars logged between two events are averaged where they are. A device is never waited for: what lies on one is asked
for when an event is due and told with the next one, when it has long arrived.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from paceline.core.events import Events
from paceline.core.status import Status
from paceline.core.step import StepReport

_PERIOD_S = 0.1


class Scalars:
    """Running means of logged values, by any thread; tensors stay where they are until `take`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, Any] = {}
        self._counts: dict[str, int] = {}
        self._asked: dict[str, tuple[Any, int]] = {}  # on their way from a device since the last `take`

    def add(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            value = value.detach() if isinstance(value, torch.Tensor) else float(value)
            with self._lock:
                if name in self._sums:
                    self._sums[name] = self._sums[name] + value
                    self._counts[name] += 1
                else:
                    self._sums[name] = value
                    self._counts[name] = 1

    def take(self, *, wait: bool = False) -> dict[str, tuple[float, int]]:
        """Sum and count by name, and start anew; sums on a device are given the next time, or now with `wait`."""
        taken = {name: (float(total), count) for name, (total, count) in self._asked.items()}
        self._asked.clear()
        with self._lock:
            sums, counts = self._sums, self._counts
            self._sums, self._counts = {}, {}
        for name, total in sums.items():
            count = counts[name]
            if isinstance(total, torch.Tensor) and total.device.type != "cpu" and not wait:
                self._asked[name] = (total.to("cpu", non_blocking=True), count)
                continue
            old = taken.get(name, (0.0, 0))
            taken[name] = (old[0] + float(total), old[1] + count)
        return taken


class Meter:
    """Times of steps, from readings that only grow: data wait, member wait, bytes and samples."""

    def __init__(
        self,
        events: Events,
        status: Status,
        *,
        size: float,
        readings: Callable[[], tuple[float, float, int, float]],
    ) -> None:
        self.step = 0
        self.epoch = 0
        self.threads = 1  # that wait side by side
        self.totals = {"samples": 0.0, "seconds": 0.0, "data_s": 0.0, "compute_s": 0.0, "wait_s": 0.0}
        self.totals["sent_bytes"] = 0
        self._events = events
        self._status = status
        self.size = size  # times this member's samples are those of all
        self._readings = readings
        self._scalars = Scalars()
        self._epoch_scalars: dict[str, tuple[float, int]] = {}
        self._since = dict.fromkeys(self.totals, 0.0)
        self._told_at = 0.0
        self.start()

    def start(self) -> None:
        """Begin to measure from now: what lies before (set-up, evaluation) belongs to no step."""
        self._last = time.monotonic()
        self._before = self._readings()

    def waited(self, seconds: float) -> None:
        """This member has waited for the others between two epochs, or for a batch that they might leave to it.

        What it has sent meanwhile counts: those who train apart hold their last round there.
        """
        data_s, _, sent, _ = self._readings()
        seconds += max(data_s - self._before[0], 0.0)
        more = {"seconds": seconds, "wait_s": seconds, "sent_bytes": sent - self._before[2]}
        self._before = (data_s, self._before[1], sent, self._before[3])
        for key, value in more.items():
            self.totals[key] += value
            self._since[key] += value

    def log(self, values: dict[str, Any]) -> None:
        self._scalars.add(values)

    def after_step(self) -> StepReport:
        now = time.monotonic()
        data_s, wait_s, sent, samples = self._readings()
        before, self._before = self._before, (data_s, wait_s, sent, samples)
        seconds, self._last = now - self._last, now
        waits = (data_s - before[0]) / self.threads, (wait_s - before[1]) / self.threads
        self.step += 1
        self._status.at(self.step, self.epoch)
        report = StepReport(
            step=self.step,
            samples=max(samples - before[3], 0.0),  # of a turn that was dropped they are taken back
            data_s=waits[0],
            wait_s=waits[1],
            compute_s=max(seconds - sum(waits), 0.0),
            sent_bytes=sent - before[2],
        )
        for key in ("samples", "data_s", "compute_s", "wait_s", "sent_bytes"):
            value = getattr(report, key)
            self.totals[key] += value
            self._since[key] += value
        self.totals["seconds"] += seconds
        self._since["seconds"] += seconds
        if now - self._told_at >= _PERIOD_S:
            self._told_at = now
            self._tell()
        return report

    def _tell(self, *, wait: bool = False) -> None:
        taken = self._scalars.take(wait=wait)
        for name, (total, count) in taken.items():
            old = self._epoch_scalars.get(name, (0.0, 0))
            self._epoch_scalars[name] = (old[0] + total, old[1] + count)
        since = dict(self._since)
        since["samples"] *= self.size
        since["sent_bytes"] = int(since["sent_bytes"])
        scalars = {name: total / count for name, (total, count) in taken.items()}
        self._events.emit("step", epoch=self.epoch, step=self.step, scalars=scalars, **since)
        self._since = dict.fromkeys(self._since, 0.0)

    def end_epoch(self) -> dict[str, tuple[float, int]]:
        """Tell what is left; sums and counts of this epoch's scalars on this member."""
        self._tell(wait=True)
        taken, self._epoch_scalars = self._epoch_scalars, {}
        return taken
