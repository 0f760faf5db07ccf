"""Faults under all-reduce: whatever is killed, nothing that was committed is lost, and every sample counts once."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from _elastic import run_with

from paceline.testing.clocks import Clocks
from paceline.testing.disk import SmallDisk
from paceline.testing.plan import FaultPlan


def test_a_killed_member_is_replaced_and_nothing_is_lost(tmp_path: Path) -> None:
    result = run_with(tmp_path, FaultPlan().kill(member=2, step=7))
    result.must_be_clean()
    assert "member 2 is gone, 2 members go on" in result.output
    members = result.summary.members
    assert [m.rank for m in members] == [0, 1, 2]
    assert sum(m.samples for m in members) == result.summary.samples == result.found.samples
    assert 0 < members[2].samples < members[0].samples


@pytest.mark.slow
def test_there_are_as_many_members_as_were_asked_for(tmp_path: Path) -> None:
    plan = FaultPlan().scale(2, step=7).pause("scheduler", step=12, for_s=0.5).scale(3, step=12).scale(9, step=14)
    result = run_with(tmp_path, plan, args=["--processes", "4"])
    result.must_be_clean()
    assert "size=9: must be between 2 and 3" in result.injected[-1].missed
    assert [each.missed for each in result.injected[:-1]] == [""] * 3
    views = msgspec.json.decode((result.dir / "summary.json").read_bytes())["views"]
    assert (views["left"], views["joined"], views["lost"]) == (1, 1, 0)


def test_the_summary_has_a_row_for_a_member_that_was_lost_for_good(tmp_path: Path) -> None:
    plan = FaultPlan().kill(member=1, step=7).kill(member=0, step=20)
    result = run_with(tmp_path, plan, least=1, most=3, replacements=0)
    result.must_be_clean()
    summary = result.summary
    assert [(m.rank, m.gone) for m in summary.members] == [(0, "lost"), (1, "lost"), (2, "")]
    assert sum(m.samples for m in summary.members) == summary.samples == result.found.samples
    short, long, whole = sorted(summary.members, key=lambda m: m.samples)
    assert (short.rank, long.rank, whole.rank) == (1, 0, 2)
    assert short.seconds < long.seconds < whole.seconds
    assert summary.slowest is None  # nobody is left to compare with


def test_the_first_member_is_killed_and_another_one_leads(tmp_path: Path) -> None:
    result = run_with(tmp_path, FaultPlan().kill(member=0, step=9), progress="plain")
    result.must_be_clean()
    views = msgspec.json.decode((result.dir / "summary.json").read_bytes())["views"]
    assert (views["lost"], views["last"][0]["lost"]) == (1, [0])
    assert views["recovery_s"] > 0
    lines = re.findall(r"epoch \d+\S*", result.output)
    assert lines, result.output
    assert not [line for line in lines if "/" not in line], result.output  # who leads now knows how many there are
    events = map(msgspec.json.decode, (result.dir / "events" / "rank-0.jsonl").read_bytes().splitlines())
    lost = next(event for event in events if event["kind"] == "view")  # of 480 samples, 24 were in each step of three
    assert lost["steps"] == lost["step"] + -(-(480 - 24 * lost["step"]) // 16)  # and 16 are in those of two


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
    result = run_with(tmp_path, plan, epochs=6)
    result.must_be_clean()
    assert result.summary.samples == result.found.samples


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        FaultPlan().kill(member=1, step=5).kill(member=1, doing="healing"),
        FaultPlan().kill(member=1, step=5).pause(member=1, doing="healing", for_s=4.0),
        FaultPlan().kill(member=1, step=5).kill("scheduler", doing="healing").kill(member=0, doing="healing"),
    ],
    ids=str,
)
def test_faults_while_a_newcomer_gets_the_state(tmp_path: Path, plan: FaultPlan) -> None:
    run_with(tmp_path, plan, epochs=6, args=("--frozen-mb", "48"), checkpoint_every_s=60.0).must_be_clean()


@pytest.mark.slow
@pytest.mark.skipif(bool(SmallDisk.missing()), reason=SmallDisk.missing())
def test_a_full_disk_stops_nobody(tmp_path: Path) -> None:
    with SmallDisk(32 << 20) as disk:
        plan = FaultPlan().fill_disk(step=6, for_s=3.0).kill(member=2, step=20)
        result = run_with(tmp_path, plan, epochs=6, root=disk.dir, means={"disk": disk})
    result.must_be_clean()
    assert "No space left on device" in result.output


@pytest.mark.slow
@pytest.mark.skipif(bool(SmallDisk.missing()), reason=SmallDisk.missing())
def test_a_scheduler_that_dies_on_a_full_disk_takes_in_who_was_just_started(tmp_path: Path) -> None:
    args = ("--step-s", "0.05", "--again-s", "3")  # who is started again is there for 3 s before its first view
    with SmallDisk(32 << 20) as disk:
        plan = FaultPlan().fill_disk(step=6, for_s=12.0).kill(member=1, step=10).kill("scheduler", step=10, after_s=2.0)
        result = run_with(tmp_path, plan, epochs=12, args=args, root=disk.dir, means={"disk": disk})
        assert "cannot write its journal" in (result.dir / "logs" / "scheduler.log").read_text()
    result.must_be_clean()
    assert [e.code for e in result.outcome.ended if e.rank == 1] == [-9, 0], result.output  # nobody else was started


@pytest.mark.slow
@pytest.mark.parametrize("by_s", [-3600.0, 86400.0])
def test_clocks_that_jump_make_nobody_suspect(tmp_path: Path, by_s: float) -> None:
    with Clocks() as clocks:
        plan = FaultPlan().jump_clock(by_s, step=6).kill(member=1, step=20)
        result = run_with(tmp_path, plan, epochs=6, env=clocks.env, means={"clocks": clocks})
    result.must_be_clean()
    assert "member 0 is gone" not in result.output
    assert "member 2 is gone" not in result.output
