"""What the sides of `bench.local` learn: four members as processes of this host, for real, several teams at once.

What comes out does not depend on how fast they are, so it may run on a GPU that all share (`--device cuda`).
"""

from __future__ import annotations

import math
import queue
import statistics
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from bench._network_accuracy import _T_95
from bench.team import Team, TeamError

Key = tuple[str, str, int, str]  # task, name, seed, case
LOOKS = 20  # at the data that was held out, in a run


class Job(NamedTuple):
    """One run."""

    task: str
    name: str
    side: dict[str, Any]
    seed: int
    lr: float
    total: int
    case: str = ""

    @property
    def key(self) -> Key:
        return self.task, self.name, self.seed, self.case


class Run(msgspec.Struct):
    """What came of it."""

    curve: list[tuple[int, float]]  # (steps, loss or accuracy)

    @property
    def final(self) -> float:
        return self.curve[-1][1]

    def to_target(self, target: float, rising: bool) -> float:
        """Steps until it was there for good or better; infinite where it never was.

        >>> Run([(10, 2.0), (20, 1.0)]).to_target(1.5, rising=False)
        20.0
        """
        return next((float(n) for n, v in self.curve if (v >= target if rising else v <= target)), math.inf)


Runs = dict[str, list[Run]]  # by side, a run for each seed


def run_all(jobs: Sequence[Job], num_teams: int, start: Callable[[], Team]) -> dict[Key, Run]:
    """Teams take job after job; a job that fails is told and left out."""
    waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)
    found: list[tuple[Job, Run]] = []
    threads = [
        threading.Thread(target=_work, args=(waiting, found, start)) for _ in range(max(1, min(num_teams, len(jobs))))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    by_key = {job.key: run for job, run in found}
    return {job.key: by_key[job.key] for job in jobs if job.key in by_key}


def _work(waiting: queue.SimpleQueue[Job], found: list[tuple[Job, Run]], start: Callable[[], Team]) -> None:
    while not waiting.empty():
        try:
            with start() as team:
                team.call("connect", described=team.call("describe"))
                while True:
                    job = waiting.get_nowait()
                    found.append((job, _train(team, job)))
                    value = found[-1][1].final
                    print(f"{job.task} {job.case} {job.name}, seed {job.seed}: {value:.4f} at the end", flush=True)
        except queue.Empty:
            return
        except TeamError as error:
            print(f"a run failed: {error}", file=sys.stderr, flush=True)


def _train(team: Team, job: Job) -> Run:
    team.call("begin", task=job.task, side=job.side, lr=job.lr, seed=job.seed, total=job.total, case=job.case)
    # Looks come after whole rounds of most sides, whose weights are those of the last one.
    every, done, curve = max(1, math.ceil(job.total / LOOKS / 50) * 50), 0, []
    while done < job.total:
        steps = min(every, job.total - done)
        done += steps
        curve.append((done, sum(team.call("train", steps=steps))))
    team.call("end")
    return Run(curve)


def gap(plain: Sequence[Run], ours: Sequence[Run], rising: bool) -> tuple[float, float]:
    """How far ours ends behind, seed by seed: the mean, and half of its interval of 95 %."""
    behind = [(a.final - b.final) if rising else (b.final - a.final) for a, b in zip(plain, ours)]
    if len(behind) < 2:
        return behind[0], math.inf
    half = _T_95.get(len(behind), 2.6) * statistics.stdev(behind) / math.sqrt(len(behind))
    return statistics.mean(behind), half
