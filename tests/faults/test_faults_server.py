"""A server process is killed, or stopped for long: the run goes on from its last checkpoint, says what was lost, and
every sample counts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from _served import Result, run_with

from paceline.testing.plan import FaultPlan

ARGS = ["--epochs", "3", "--step-s", "0.02"]


def clean(result: Result) -> None:
    assert result.outcome.code == 0, result.output
    assert result.found.clean, f"{result.found}\n{result.output}"


def said(result: Result, server: int, how: str = "killed by signal 9") -> tuple[int, int, int]:
    """The first and the last version that were lost, and the step from which the run went on."""
    found = re.search(
        rf"\[launcher\] server {server} was lost \({how}\): versions (\d+) to (\d+) of its shard are "
        r"lost; all members go on from the checkpoint at step (\d+) \(time 1 of at most 3\)",
        result.output,
    )
    assert found, result.output
    first, last, step = map(int, found.groups())
    return first, last, step


@pytest.mark.slow
@pytest.mark.parametrize("server", [0, 1])
def test_in_sync_all_go_back_to_one_step(server: int, tmp_path: Path) -> None:
    """480 samples on two members in batches of 8: 30 steps in an epoch, and a checkpoint at its end."""
    plan = FaultPlan().kill(f"server {server}", step=41)
    result = run_with(tmp_path, "sync", members=2, servers=2, plan=plan, args=ARGS, forgives=False)
    clean(result)
    first, last, step = said(result, server)
    assert (first, step) == (31, 30)
    assert 40 <= last <= 60
    assert "Traceback" not in result.output  # nothing is wrong with the script
    assert len(re.findall(rf"\[[01]\] paceline: member [01] ends: .*server {server}", result.output)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["bounded(staleness=2)", "async"])
def test_without_lockstep_every_sample_still_counts_once(strategy: str, tmp_path: Path) -> None:
    """60 pushes in an epoch, whoever makes them."""
    plan = FaultPlan().kill("server 1", step=75)
    result = run_with(tmp_path, strategy, members=2, servers=2, plan=plan, args=ARGS)
    clean(result)
    first, last, _ = said(result, 1)
    assert (first - 1) % 60 == 0
    assert first > 1
    assert last >= 75


@pytest.mark.slow
def test_without_a_checkpoint_the_run_ends(tmp_path: Path) -> None:
    plan = FaultPlan().kill("server 0", step=5)
    result = run_with(tmp_path, "async", members=2, plan=plan, args=ARGS)
    assert result.outcome.code == 137
    assert "[launcher] server" not in result.output


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_a_server_that_is_stopped_for_long_is_lost_as_one_that_is_killed(strategy: str, tmp_path: Path) -> None:
    plan = FaultPlan().pause("server 1", step=75, for_s=40.0)
    result = run_with(
        tmp_path, strategy, members=2, servers=2, plan=plan, args=ARGS, forgives=strategy == "async", silence_s=1.0
    )
    clean(result)
    first, last, _ = said(result, 1, "stopped for 1 s")
    assert 1 < first <= last


@pytest.mark.slow
def test_without_a_checkpoint_a_stopped_server_is_waited_for(tmp_path: Path) -> None:
    plan = FaultPlan().pause("server 0", step=5, for_s=3.0)
    result = run_with(tmp_path, "async", members=2, plan=plan, args=ARGS, silence_s=1.0)
    clean(result)
    assert "[launcher] server" not in result.output
