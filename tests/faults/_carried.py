"""A plan of faults carried out on a job, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from paceline.launch.elastic import ElasticJob
from paceline.launch.local import LocalJob
from paceline.membership.agent import Outcome
from paceline.testing.cluster import leftovers
from paceline.testing.faults import Faults, Injected
from paceline.testing.ledger import Findings, Ledger
from paceline.testing.plan import FaultPlan
from paceline.train.summary import Summary


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
    injected: list[Injected]

    def must_be_clean(self) -> None:
        assert self.outcome.code == 0, self.output
        assert self.found.clean, f"{self.found}\n{self.output}"

    @property
    def summary(self) -> Summary:
        return msgspec.json.decode((self.dir / "summary.json").read_bytes(), type=Summary)


def carry_out(
    plan: FaultPlan, job: ElasticJob | LocalJob, kept: Kept, ledger: Path, limit_s: float, **means: Any
) -> Result:
    """Wait for the job's end meanwhile; nothing may be left behind, and every fault must have happened."""
    try:
        with Faults(plan, job, **means) as faults:
            outcome = job.wait(limit_s)
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
