"""Workers of runs with servers are stopped (SIGSTOP): for long, and they are lost as if killed; else nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from _served import Result, run_with

from paceline.core import lost
from paceline.launch.spec import Replacing
from paceline.testing.plan import FaultPlan

SILENCE_S = 1.0


def train(tmp_path: Path, strategy: str, plan: FaultPlan, *, processes: int = 0, **options: Any) -> Result:
    """Those who are left wait in the second epoch until so many processes have begun."""
    args = ["--epochs", "3", "--samples", "240", "--step-s", "0.02", "--processes", str(processes)]
    options = {"replacing": Replacing(), "members": 2} | options
    return run_with(tmp_path, strategy, plan=plan, args=args, silence_s=SILENCE_S, **options)


def long(member: int) -> FaultPlan:
    return FaultPlan().pause(member=member, step=7, for_s=20.0)


@pytest.mark.parametrize(
    ("strategy", "member"),
    [
        ("sync", 1),
        pytest.param("sync", 0, marks=pytest.mark.slow),
        pytest.param("async", 1, marks=pytest.mark.slow),
        pytest.param("async", 0, marks=pytest.mark.slow),
        pytest.param("bounded(staleness=2)", 1, marks=pytest.mark.slow),
    ],
)
def test_a_long_stop_is_a_loss(strategy: str, member: int, tmp_path: Path) -> None:
    """In sync the others stand still until it is ended; it is started again, and never comes back as it was."""
    result = train(tmp_path, strategy, long(member), processes=3, servers=2)
    result.must_be_clean()
    assert [(e.rank, e.how) for e in result.outcome.replaced] == [(member, "stopped for 1 s")], result.output
    assert f"[launcher] member {member} was stopped for 1 s; the others go on; it is started again" in result.output
    assert f"[launcher] member {member} joined: 2 members train now" in result.output
    assert [(one.rank, one.how) for one in lost.read(result.dir)] == [(member, "stopped for 1 s")]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["async", "sync"])
def test_two_long_stops_at_once(strategy: str, tmp_path: Path) -> None:
    plan = FaultPlan().pause(member=1, step=7, for_s=20.0).pause(member=2, step=7, for_s=20.0)
    result = train(tmp_path, strategy, plan, members=3, processes=5)
    result.must_be_clean()
    assert sorted(e.rank for e in result.outcome.replaced) == [1, 2], result.output


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["async", "sync"])
def test_a_short_stop_is_waited_for(strategy: str, tmp_path: Path) -> None:
    result = train(tmp_path, strategy, FaultPlan().pause(member=1, step=7, for_s=0.4 * SILENCE_S))
    result.must_be_clean()
    assert not result.outcome.replaced
    assert not result.outcome.lost


@pytest.mark.slow
def test_without_replacements_the_others_go_on(tmp_path: Path) -> None:
    result = train(tmp_path, "async", long(1), replacing=None)
    result.must_be_clean()
    assert [(e.rank, e.how) for e in result.outcome.lost] == [(1, "stopped for 1 s")], result.output
