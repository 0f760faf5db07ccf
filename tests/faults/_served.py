"""A run with server processes, with faults, and what its ledger says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from _elastic import Kept

from paceline.core.settings import Settings
from paceline.launch.local import Local
from paceline.launch.spec import JobSpec
from paceline.membership.agent import Outcome
from paceline.testing.cluster import leftovers
from paceline.testing.faults import Faults, Injected
from paceline.testing.ledger import Findings, Ledger
from paceline.testing.plan import FaultPlan

LIMIT_S = 120.0


@dataclass
class Result:
    outcome: Outcome
    found: Findings
    output: str
    dir: Path
    injected: list[Injected] = field(default_factory=list)


def run_with(
    tmp_path: Path,
    strategy: str,
    *,
    members: int = 3,
    servers: int = 1,
    plan: FaultPlan | None = None,
    script: str = "paceline.testing.train_counted",
    args: Sequence[str] = (),
    forgives: bool = True,
    **settings: object,
) -> Result:
    """Train to the end while the plan is carried out; nothing may be left behind."""
    kept, ledger = Kept(), tmp_path / "ledger"
    spec = JobSpec(
        script=script,
        module=not script.endswith(".py"),
        args=("--ledger", str(ledger), *args),
        num_members=members,
        num_servers=servers,
        forgives=forgives,
        settings=Settings().with_(
            root=str(tmp_path / "runs"), name="it", progress="off", wait_limit_s=60.0, strategy=strategy, **settings
        ),
        threads=1,
    )
    job = Local(kept, say=kept.say).start(spec)
    try:
        with Faults(plan or FaultPlan(), job) as faults:
            outcome = job.wait(LIMIT_S)
            assert outcome is not None, f"it hangs:\n{kept.text}"
        injected, pending = list(faults.injected), list(faults.pending)
    finally:
        for _ in range(2):
            if job.poll() is None:
                job.stop()
        job.wait(30.0)
    assert not pending, f"not every fault happened: {pending}\n{kept.text}"
    assert not leftovers(job.token)
    return Result(outcome, Ledger.read(ledger).check(), kept.text, job.dir, injected)
