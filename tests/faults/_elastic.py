"""An elastic run of the counted training, with faults, and what its ledger says."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.core.settings import Settings
from paceline.launch.elastic import ElasticJob
from paceline.launch.spec import Elastic, JobSpec
from paceline.membership.agent import Outcome
from paceline.testing.cluster import leftovers
from paceline.testing.faults import Faults, Injected
from paceline.testing.ledger import Findings, Ledger
from paceline.testing.plan import FaultPlan

LIMIT_S = 150.0


class Kept:
    """What members print, and what the launcher says."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def line(self, rank: int, stream: str, text: str) -> None:
        self.lines.append(f"[{rank}] {text}")

    def raw(self, data: bytes) -> None:
        self.lines.append(data.decode(errors="replace"))

    def say(self, text: str) -> None:
        self.lines.append(f"[launcher] {text}")

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


@dataclass
class Result:
    outcome: Outcome
    found: Findings
    output: str
    dir: Path
    injected: list[Injected] = field(default_factory=list)


def run_with(
    tmp_path: Path,
    plan: FaultPlan,
    *,
    least: int = 2,
    most: int = 3,
    epochs: int = 3,
    args: Sequence[str] = (),
    elastic: dict[str, float] | None = None,
    **settings: object,
) -> Result:
    """Train to the end while the plan is carried out; nothing may be left behind."""
    kept, ledger = Kept(), tmp_path / "ledger"
    spec = JobSpec(
        script="paceline.testing.train_counted",
        module=True,
        args=("--ledger", str(ledger), "--epochs", str(epochs), "--step-s", "0.01", *args),
        num_members=most,
        settings=Settings().with_(
            root=str(tmp_path / "runs"), name="it", progress="off", wait_limit_s=60.0, **settings
        ),
        threads=1,
        elastic=Elastic(least=least, most=most, **{"silence_s": 1.5, **(elastic or {})}),
    )
    with _job(spec, kept) as job:
        with Faults(plan, job) as faults:
            outcome = job.wait(LIMIT_S)
            assert outcome is not None, f"it hangs:\n{kept.text}"
        injected, pending = list(faults.injected), list(faults.pending)
    assert not pending, f"not every fault happened: {pending}\n{kept.text}"
    assert not leftovers(job.token)
    return Result(outcome, Ledger.read(ledger).check(), kept.text, job.dir, injected)


@contextlib.contextmanager
def _job(spec: JobSpec, kept: Kept) -> Iterator[ElasticJob]:
    assert spec.elastic
    job = ElasticJob(spec, spec.elastic, kept, say=kept.say)
    try:
        yield job
    finally:
        job.stop()
        job.stop()
        job.wait(30.0)
