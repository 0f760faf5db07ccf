"""The soak of bench.chaos: what a surviving member, the launcher and the scheduler have more of with each re-forming.

Members other than the first are killed one after the other, every few seconds, and replaced. The slope is that of a
line through the samples of the second half of the run, by the number of the view at that time; a run that leaks nothing
has flat lines. Memory may rise a little while allocators settle, so its goal is in kilobytes, the others' in fractions
of one.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from bench._chaos_runs import AnyJob, Setup, carry_out
from bench.harness import Figure, Report
from paceline.testing import processes
from paceline.testing.ledger import Ledger
from paceline.testing.plan import FaultPlan

EVERY_S = 2.0  # between the time when all train, and the next kill
_SAMPLE_S = 1.0
_KINDS = ("rss_kb", "descriptors", "threads", "sockets")
_GOALS = {"rss_kb": "<= 20", "descriptors": "<= 0.02", "threads": "<= 0.02", "sockets": "<= 0.02"}
_CURVE = 12  # points that are printed


@dataclass
class Watching:
    """Samples a run and kills its members."""

    until: float
    seed: int
    samples: dict[str, list[tuple[float, dict[str, float]]]] = field(default_factory=dict)  # by who: when, what
    kills: int = 0

    def __post_init__(self) -> None:
        self._dice = Random(self.seed)
        self._kill_at = self._sample_at = 0.0
        self._stopped = False
        self._members: processes.Members | None = None

    def __call__(self, job: AnyJob) -> None:
        now = time.monotonic()
        pids = job.pids
        if len([pid for pid in pids if pid]) < 2:
            return
        if now >= self.until and not self._stopped:
            self._stopped = True
            job.stop()
        if self._stopped:
            return
        if now >= self._sample_at:
            self._sample_at = now + _SAMPLE_S
            self._sample("member", pids[0], now)
            self._sample("launcher", os.getpid(), now)
            for scheduler in processes.find("scheduler", job.token)[:1]:
                self._sample("scheduler", scheduler.pid, now)
            self.samples.setdefault("machine", []).append((now, {"shm": float(len(os.listdir("/dev/shm")))}))
        members = self._members = self._members or processes.Members(job.dir)
        members.look()
        if sum(members.doing[id] == "training" for id in members.alive) < len(pids):
            self._kill_at = now + EVERY_S  # not before all train: what is killed on its way makes no view
        elif now >= self._kill_at:
            self._kill_at = now + EVERY_S
            job.kill(self._dice.randrange(1, len(pids)), 9)
            self.kills += 1

    def _sample(self, who: str, pid: int, now: float) -> None:
        with contextlib.suppress(OSError):  # it has just ended
            self.samples.setdefault(who, []).append((now, _of(pid)))


def _of(pid: int) -> dict[str, float]:
    at = Path(f"/proc/{pid}")
    pages = int((at / "statm").read_text().split()[1])
    links = [_link(fd) for fd in (at / "fd").iterdir()]
    return {
        "rss_kb": pages * os.sysconf("SC_PAGE_SIZE") / 1024,
        "descriptors": float(len(links)),
        "threads": float(len(list((at / "task").iterdir()))),
        "sockets": float(sum(link.startswith("socket:") for link in links)),
    }


def _link(fd: Path) -> str:
    try:
        return os.readlink(fd)
    except OSError:
        return ""


def add_figures(report: Report, options: argparse.Namespace) -> None:
    minutes = options.minutes or (0.5 if options.quick else 30.0)
    setup = Setup(
        name="soak",
        strategy="allreduce",
        members=3,
        least=1,
        epochs=1_000_000,
        step_s=0.02,
        limit_s=60 * minutes + 120.0,
    )
    watching = Watching(until=time.monotonic() + 60 * minutes, seed=options.seed)
    result = carry_out(setup, FaultPlan(), watching)
    if result.outcome is None:
        report.note(f"the soak did not end: {result.problems}; files in {setup.dir}")
        return
    views = _views(setup.dir / "ledger")
    for who, samples in watching.samples.items():
        for kind in samples[0][1]:
            points = [(float(_view(views, at)), values[kind]) for at, values in samples]
            _print_curve(f"{who} {kind}", points)
            goal = "<= 0.02" if kind == "shm" else _GOALS[kind]
            slope = _slope(points[len(points) // 2 :])
            value = f"{points[len(points) // 2][1]:g} .. {points[-1][1]:g}"
            report.add(Figure(name=f"{who}_{kind}_per_reforming", value=slope, ours=value, goal=goal))
    last = _view(views, float("inf"))
    report.note(
        f"soak: {minutes:g} minutes, {watching.kills} kills, {last} views, seed {options.seed}; /dev/shm is all's"
    )


def _views(ledger: Path) -> list[tuple[float, int]]:
    """When the first member took its first step in each view."""
    found: dict[int, float] = {}
    for written in Ledger.read(ledger).written:
        if written.member == 0:
            for line in written.steps:
                found[line.view] = min(found.get(line.view, line.at), line.at)
    return sorted((at, view) for view, at in found.items())


def _view(views: list[tuple[float, int]], at: float) -> int:
    index = bisect_right(views, (at, 1 << 60)) - 1
    return views[index][1] if index >= 0 else 0


def _slope(points: list[tuple[float, float]]) -> float:
    """Of the line with the least squares."""
    x0, y0 = sum(x for x, _ in points) / len(points), sum(y for _, y in points) / len(points)
    square = sum((x - x0) ** 2 for x, _ in points)
    return sum((x - x0) * (y - y0) for x, y in points) / square if square else 0.0


def _print_curve(name: str, points: list[tuple[float, float]]) -> None:
    every = max(1, len(points) // _CURVE)
    told = "  ".join(f"{x:g}:{y:g}" for x, y in points[::every])
    print(f"{name} by view: {told}", file=sys.stderr)
