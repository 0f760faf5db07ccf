"""What the sides of `bench.local` learn: four members as processes of this host, for real, several teams at once.

What comes out does not depend on how fast they are, so it may run on a GPU that all share (`--device cuda`), on another
machine, and in several goes: runs that a file of outcomes has are not made again.
"""

from __future__ import annotations

import math
import queue
import statistics
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
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

    @property
    def words(self) -> str:
        side = self.side.get("strategy", f"{self.name}, every {self.side['every']}")
        if codec := self.side.get("codec"):
            side += f", codec {codec}"
        return " ".join(
            filter(None, [self.task, self.case, f"{side}: {self.total} steps, lr {self.lr}, seed {self.seed}"])
        )


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


class Outcomes:
    """Runs by what they are; kept in a file as they come: what is there stays, should the benchmark be stopped."""

    def __init__(self, file: Path | None = None) -> None:
        self._file, self._lock = file, threading.Lock()
        self._runs: dict[str, Run] = {}
        if file and file.exists():
            self._runs = msgspec.json.decode(file.read_bytes(), type=dict[str, Run])

    def add(self, job: Job, run: Run) -> None:
        with self._lock:
            self._runs[job.words] = run
            if self._file:
                self._file.write_bytes(msgspec.json.encode(self._runs))

    def __contains__(self, job: Job) -> bool:
        return job.words in self._runs

    def __getitem__(self, job: Job) -> Run:
        return self._runs[job.words]


def run_all(jobs: Sequence[Job], num_teams: int, start: Callable[[], Team], outcomes: Outcomes) -> dict[Key, Run]:
    """Teams take job after job; a job that fails is told and left out."""
    waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
    missing = [job for job in jobs if job not in outcomes]
    for job in missing:
        waiting.put(job)
    count = min(num_teams, len(missing))
    threads = [threading.Thread(target=_work, args=(waiting, outcomes, start)) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {job.key: outcomes[job] for job in jobs if job in outcomes}


def _work(waiting: queue.SimpleQueue[Job], outcomes: Outcomes, start: Callable[[], Team]) -> None:
    while not waiting.empty():
        try:
            with start() as team:
                team.call("connect", described=team.call("describe"))
                while True:
                    job = waiting.get_nowait()
                    outcomes.add(job, train(team, job))
                    print(f"{job.words}: {outcomes[job].final:.4f} at the end", flush=True)
        except queue.Empty:
            return
        except TeamError as error:
            print(f"a run failed: {error}", file=sys.stderr, flush=True)


def train(team: Team, job: Job) -> Run:
    """By a team that is connected."""
    team.call("begin", task=job.task, side=job.side, lr=job.lr, seed=job.seed, total=job.total, case=job.case)
    # Looks come after whole rounds of most sides, whose weights are those of the last one.
    unit, done, curve = job.side.get("look", 50), 0, []
    every = max(1, math.ceil(job.total / LOOKS / unit) * unit)
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
