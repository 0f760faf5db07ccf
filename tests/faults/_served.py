"""A run with server processes, with faults, and what its ledger says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from _carried import Kept, Result, carry_out

from paceline.core.settings import Settings
from paceline.launch.local import Local
from paceline.launch.spec import JobSpec, Replacing
from paceline.testing.plan import FaultPlan

LIMIT_S = 120.0


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
    labels: tuple[str, ...] = (),
    replacing: Replacing | None = None,
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
        labels=labels,
        replacing=replacing,
        settings=Settings().with_(
            root=str(tmp_path / "runs"), name="it", progress="off", wait_limit_s=60.0, strategy=strategy, **settings
        ),
        threads=1,
    )
    return carry_out(plan or FaultPlan(), Local(kept, say=kept.say).start(spec), kept, ledger, LIMIT_S)
