"""Faults between and within rounds, of members that train apart: every sample counts once, and anchors are alike.

A step of the ledger is a round here: what counted is read off the weights that members have agreed on.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from _elastic import run_with

from paceline.testing.plan import FaultPlan

ROUNDS = "local(every=5)"
SLOWLY = ("--step-s", "0.05")  # replacements come while the others train


def test_a_member_is_killed_between_rounds_and_the_others_keep_what_they_have_learnt(tmp_path: Path) -> None:
    result = run_with(tmp_path, FaultPlan().kill(member=2, step=7), strategy=ROUNDS)
    result.must_be_clean()
    assert "member 2 is gone, 2 members go on" in result.output


def test_the_first_member_is_killed_in_the_exchange(tmp_path: Path) -> None:
    result = run_with(tmp_path, FaultPlan().kill(member=0, doing="averaging"), strategy=ROUNDS)
    result.must_be_clean()
    assert "member 0 is gone" in result.output


def test_who_is_late_is_left_out_and_brings_its_work_later(tmp_path: Path) -> None:
    words = "local(every=5, quorum=2, grace_s=0.2)"
    args = ("--step-s", "0", "--sample-s", "0.005", "--slow", "2", "--samples", "720")
    result = run_with(tmp_path, FaultPlan(), strategy=words, epochs=2, args=args)
    result.must_be_clean()
    assert "member 2 is late for a round, 2 members go on" in result.output
    assert "member 2 was late for 3 rounds" in result.output
    assert "0 lost, 0 replaced, 0 joined" in result.output


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        FaultPlan().kill(member=1, step=7).kill(member=2, step=7),
        FaultPlan().kill(member=1, step=4).kill(member=2, step=40).kill(member=0, step=80),
        FaultPlan().kill(member=1, doing="averaging"),
        FaultPlan().pause(member=1, step=8, for_s=4.0),
        FaultPlan().pause(member=1, step=8, for_s=0.5),
        FaultPlan().pause(member=0, doing="averaging", for_s=2.5),
        FaultPlan().kill("scheduler", step=6).kill(member=2, step=6),
        FaultPlan().kill(member=1, doing="checkpointing"),
        FaultPlan().kill(member=0, doing="checkpointing"),
        FaultPlan().kill(member=1, step=5).kill(member=0, doing="healing"),
    ],
    ids=str,
)
def test_faults(tmp_path: Path, plan: FaultPlan) -> None:
    run_with(tmp_path, plan, strategy=ROUNDS, epochs=6, args=SLOWLY).must_be_clean()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("words", [ROUNDS, "local(every=7, quorum=2, grace_s=0.3, codec='topk(0.3)')"])
def test_faults_at_random(tmp_path: Path, words: str, seed: int) -> None:
    plan = FaultPlan.random(seed=seed, faults=5, members=3, steps=100)
    run_with(tmp_path, plan, strategy=words, epochs=7, args=SLOWLY).must_be_clean()


@pytest.mark.slow
@pytest.mark.parametrize("slow", [0, 2])
def test_a_loss_while_another_one_is_late(tmp_path: Path, slow: int) -> None:
    args = ("--step-s", "0", "--sample-s", "0.006", "--slow", str(slow), "--samples", "960")
    plan = FaultPlan().kill(member=1, step=22)
    words = "local(every=5, quorum=2, grace_s=0.3)"
    run_with(tmp_path, plan, strategy=words, epochs=3, args=args).must_be_clean()
