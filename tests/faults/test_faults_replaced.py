"""Workers of runs with servers are killed and started again: nobody waits for them, and every sample counts once."""

from __future__ import annotations

from pathlib import Path

import pytest
from _served import Result, run_with

from paceline.launch.spec import Replacing
from paceline.testing.plan import FaultPlan

ARGS = ["--epochs", "4", "--step-s", "0.02"]
STRATEGIES = ["async", "bounded(staleness=2)", "sync", "sync(backups=1)"]


def clean(result: Result, *replaced: int) -> None:
    """The run came to its end, these members were started again, and everything counted once."""
    result.must_be_clean()
    assert sorted(e.rank for e in result.outcome.replaced) == sorted(replaced), result.output


def test_a_killed_worker_is_replaced(tmp_path: Path) -> None:
    plan = FaultPlan().kill(member=1, step=12)
    result = run_with(tmp_path, "async", members=2, plan=plan, args=[*ARGS, "--processes", "3"], replacing=Replacing())
    print(result.output)
    clean(result, 1)
    said = "[launcher] member 1 was killed by signal 9; the others go on; it is started again in 0.5 s (1 of 3)"
    assert said in result.output
    assert "[launcher] member 1 joined: 2 members train now" in result.output


@pytest.mark.slow
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_in_every_mode(strategy: str, servers: int, tmp_path: Path) -> None:
    plan = FaultPlan().kill(member=2, step=12)
    result = run_with(
        tmp_path,
        strategy,
        members=3,
        servers=servers,
        plan=plan,
        args=[*ARGS, "--processes", "4"],
        replacing=Replacing(),
    )
    print(result.output)
    clean(result, 2)
    assert "[launcher] member 2 joined: 3 members train now" in result.output


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES[:3])
def test_the_first_worker_is_replaced(strategy: str, tmp_path: Path) -> None:
    plan = FaultPlan().kill(member=0, step=12)
    result = run_with(tmp_path, strategy, members=2, plan=plan, args=[*ARGS, "--processes", "3"], replacing=Replacing())
    print(result.output)
    clean(result, 0)
    assert "[launcher] member 0 joined: 2 members train now" in result.output
