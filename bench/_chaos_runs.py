"""One run of bench.chaos: started as `paceline run` does, broken by a plan, held to account by its ledger."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from bench._chaos_train import BATCH_SIZE, SAMPLES
from paceline.core.errors import PacelineError
from paceline.core.settings import Settings
from paceline.launch import servers
from paceline.launch.elastic import ElasticJob
from paceline.launch.local import Local, LocalJob
from paceline.launch.spec import Elastic, JobSpec, Replacing
from paceline.membership.agent import Outcome
from paceline.testing.cluster import leftovers
from paceline.testing.faults import Faults, Injected
from paceline.testing.ledger import Findings, Ledger
from paceline.testing.plan import FaultPlan, Scale

ROOT = Path(".bench") / "chaos"
_SCALED_S = 15.0  # for members to leave, with a scheduler that sleeps or is started again
AnyJob = LocalJob | ElasticJob


class Kept:
    """What members print, and what the launcher says."""

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file = file.open("w", buffering=1)

    def line(self, rank: int, stream: str, text: str) -> None:
        self._file.write(f"{time.monotonic():.3f} [{rank}] {text}\n")

    def raw(self, data: bytes) -> None:
        self._file.write(data.decode(errors="replace"))

    def say(self, text: str) -> None:
        self.line(-1, "out", text)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A run to be broken."""

    name: str
    strategy: str
    members: int
    epochs: int
    least: int = 0  # of an elastic run
    num_servers: int = 0
    num_hosts: int = 0  # 0: all on this machine
    replaced: bool = False  # with servers: lost workers are started again
    silence_s: float = 1.0
    standbys: int = 1
    step_s: float = 0.005
    seed: int = 0
    heard: bool = False
    limit_s: float = 120.0
    checkpoint_keep: int = 2

    @property
    def dir(self) -> Path:
        return ROOT / self.name

    def args(self) -> list[str]:
        """Of the script."""
        args = ["--ledger", str((self.dir / "ledger").absolute()), "--epochs", str(self.epochs)]
        return [*args, "--step-s", str(self.step_s), *(["--heard"] if self.heard else [])]

    def spec(self) -> JobSpec:
        settings = Settings().with_(
            root=str((self.dir / "runs").absolute()),
            name="it",
            strategy=self.strategy,
            servers=str(self.num_servers) if self.num_servers else "auto",
            progress="off",
            join_limit_s=60.0,
            wait_limit_s=60.0,
            seed=self.seed,
            checkpoint_keep=self.checkpoint_keep,
        )
        elastic = Elastic(
            least=self.least or self.members,
            most=self.members,
            replacements=100_000,
            silence_s=self.silence_s,
            standbys=self.standbys,
        )
        return JobSpec(
            script="bench._chaos_train",
            module=True,
            args=tuple(self.args()),
            num_members=self.members,
            num_servers=self.num_servers,
            forgives=self.replaced or servers.forgives(self.strategy, self.num_servers),
            replacing=Replacing(least=1, replacements=100) if self.replaced else None,
            silence_s=self.silence_s,
            settings=settings,
            threads=1,
            elastic=elastic if self.least else None,
            env={"PYTHONFAULTHANDLER": "1"},
        )


@dataclass
class Result:
    """How a run went. `problems` is empty where all is well."""

    setup: Setup
    plan: FaultPlan
    seconds: float = 0.0
    outcome: Outcome | None = None  # None: it hung
    found: Findings | None = None
    injected: list[Injected] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def hit(self) -> list[Injected]:
        return [each for each in self.injected if not each.missed]


def epochs_for(steps: int, members: int) -> int:
    """So many epochs that there are at least so many steps, with all members there."""
    return max(2, math.ceil(steps / math.ceil(SAMPLES / (BATCH_SIZE * members))))


def carry_out(setup: Setup, plan: FaultPlan, watch: Callable[[AnyJob], object] | None = None) -> Result:
    """Train to the end while the plan is carried out; `watch` is called ten times a second."""
    shutil.rmtree(setup.dir, ignore_errors=True)
    kept, result, began = Kept(setup.dir / "output"), Result(setup, plan), time.monotonic()
    job = Local(kept, say=kept.say).start(setup.spec())
    try:
        with Faults(plan, job) as faults:
            deadline = began + setup.limit_s
            while result.outcome is None and time.monotonic() < deadline:
                result.outcome = job.wait(0.1)
                if watch and result.outcome is None:
                    watch(job)
            result.injected = list(faults.injected)
            if result.outcome is None:
                _show_where_they_hang(job)
        result.seconds = time.monotonic() - began
    except PacelineError as error:
        result.problems.append(f"{type(error).__name__}: {error}")
    finally:
        for _ in range(2):
            if _runs(job):
                job.stop()
        _end(job)
    left = leftovers(job.token)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    judge(result, left)
    return result


def judge(result: Result, left: dict[int, str]) -> None:
    """Note what was not as it must be."""
    ledger, problems = result.setup.dir / "ledger", result.problems
    if result.outcome is None:
        if not problems:
            problems.append(f"it did not end within {result.setup.limit_s:g} s")
    elif result.outcome.code and not _after_the_end(result):
        codes = [f"{e.rank}: {e.code}{' asked' * e.asked}{' losable' * e.losable}" for e in result.outcome.ended]
        problems.append(f"it ended with code {result.outcome.code}; its members: {', '.join(codes)}")
    elif "backups" in result.setup.strategy:  # a ledger cannot tell which of a member's steps was in which round
        ends = {written.end.weights for written in Ledger.read(ledger).written if written.end}
        problems += ["members ended with different weights"] if len(ends) > 1 else []
    elif ledger.exists():
        result.found = Ledger.read(ledger).check()
        problems += _too_many(result)
        result.accuracies = [json.loads(f.read_text()) for f in ledger.glob("accuracy-*.json")]
    problems += [f"a process outlived the run: {command}" for command in left.values()]


def _after_the_end(result: Result) -> bool:
    """Whether a fault hit one that had trained to the end and was about to exit, whose code is the run's then."""
    ended = {written.pid for written in Ledger.read(result.setup.dir / "ledger").written if written.end}
    return any(ended & set(each.pids) for each in result.hit)


def _too_many(result: Result) -> list[str]:
    """Views of more members than were asked for last, with steps a while after that."""
    asked = [(each.monotonic, each.fault.size) for each in result.hit if isinstance(each.fault, Scale)]
    found = {}
    for (at, size), (later, _) in zip(asked, [*asked[1:], (math.inf, 0)]):
        for written in Ledger.read(result.setup.dir / "ledger").written:
            for step in written.steps:
                if at + _SCALED_S < step.at < later and len(step.members) > size:
                    found[step.view] = f"{len(step.members)} members in view {step.view}, where {size} were asked for"
    return list(found.values())


def _show_where_they_hang(job: AnyJob) -> None:
    for rank in range(len(job.pids)):
        job.kill(rank, signal.SIGABRT)  # prints every thread's stack
    time.sleep(1.0)


def _runs(job: AnyJob) -> bool:
    try:
        return job.poll() is None
    except PacelineError:
        return False


def _end(job: AnyJob) -> None:
    with contextlib.suppress(PacelineError):  # told already
        job.wait(30.0)
