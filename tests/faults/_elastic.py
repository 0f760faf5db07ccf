"""An elastic run of the counted training, with faults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from _carried import Kept, Result, carry_out

from paceline.core.settings import Settings
from paceline.launch.elastic import ElasticJob
from paceline.launch.spec import Elastic, JobSpec
from paceline.testing.plan import FaultPlan

LIMIT_S = 150.0


def run_with(
    tmp_path: Path,
    plan: FaultPlan,
    *,
    least: int = 2,
    most: int = 3,
    epochs: int = 3,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    root: Path | None = None,
    means: Mapping[str, Any] | None = None,
    checkpoint_every_s: float = 0.5,
    stragglers: str = "tell",
    strategy: str = "allreduce",
    silence_s: float = 1.5,
    replacements: int = 3,
    progress: str = "off",
) -> Result:
    """Train to the end while the plan is carried out."""
    kept, ledger = Kept(), tmp_path / "ledger"
    spec = JobSpec(
        script="paceline.testing.train_counted",
        module=True,
        args=("--ledger", str(ledger), "--epochs", str(epochs), "--step-s", "0.01", *args),
        num_members=most,
        settings=Settings().with_(
            root=str(root or tmp_path / "runs"),
            name="it",
            progress=progress,
            wait_limit_s=60.0,
            checkpoint_every_s=checkpoint_every_s,
            stragglers=stragglers,
            strategy=strategy,
        ),
        threads=1,
        elastic=(elastic := Elastic(least=least, most=most, silence_s=silence_s, replacements=replacements)),
        env=env or {},
    )
    return carry_out(plan, ElasticJob(spec, elastic, kept, say=kept.say), kept, ledger, LIMIT_S, **(means or {}))
