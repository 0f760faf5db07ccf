"""Faults under all-reduce: whatever is killed, nothing that was committed is lost, and every sample counts once."""

from __future__ import annotations

from pathlib import Path

import pytest
from _elastic import Result, run_with

from paceline.testing.plan import FaultPlan


def clean(result: Result) -> None:
    assert result.outcome.code == 0, result.output
    assert result.found.clean, f"{result.found}\n{result.output}"


def test_a_killed_member_is_replaced_and_nothing_is_lost(tmp_path: Path) -> None:
    result = run_with(tmp_path, FaultPlan().kill(member=2, step=7))
    clean(result)
    assert "member 2 is gone, 2 members go on" in result.output


def test_the_first_member_is_killed_and_another_one_leads(tmp_path: Path) -> None:
    result = run_with(tmp_path, FaultPlan().kill(member=0, step=9))
    clean(result)
    assert (result.dir / "summary.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        FaultPlan().kill(member=1, step=5).kill(member=2, step=5),
        FaultPlan().kill("scheduler", step=6),
        FaultPlan().kill("scheduler", step=6).kill(member=2, step=6),
        FaultPlan().kill(member=1, step=4).kill(member=2, step=30).kill(member=0, step=50),
        FaultPlan().pause(member=1, step=8, for_s=4.0),
        FaultPlan().pause(member=1, step=8, for_s=0.5),
        FaultPlan().kill(member=1, doing="checkpointing"),
        FaultPlan().kill(member=0, doing="checkpointing"),
    ],
    ids=str,
)
def test_faults(tmp_path: Path, plan: FaultPlan) -> None:
    clean(run_with(tmp_path, plan, epochs=6))
