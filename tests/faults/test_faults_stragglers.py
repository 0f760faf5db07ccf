"""A member that is slower than the others: it gets less, leaves, or is named for its link; nothing is lost by that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from _elastic import run_with
from _hosts import outing

from paceline.core.settings import Settings
from paceline.testing import train_counted
from paceline.testing.cluster import Cluster
from paceline.testing.hosts import Hosts
from paceline.testing.ledger import Ledger
from paceline.testing.plan import FaultPlan

SLOW = ("--sample-s", "0.001", "--slow", "1")
needs_hosts = pytest.mark.skipif(bool(Hosts.missing()), reason=Hosts.missing())


def events(directory: Path, kind: str, rank: int = 0) -> list[dict[str, Any]]:
    lines = (directory / "events" / f"rank-{rank}.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def samples_given(ledger: Path, member: int) -> list[int]:
    """By a member in each of its steps."""
    (file,) = ledger.glob(f"member-{member}-*.jsonl")
    steps = [line for line in map(json.loads, file.read_text().splitlines()) if line["type"] == "step"]
    return [len(step["samples"]) for step in steps]


def test_a_slow_member_gets_less_and_every_sample_counts_once(tmp_path: Path) -> None:
    args = ["--ledger", str(tmp_path / "ledger"), "--epochs", "5", *SLOW]
    settings = Settings(stragglers="less", root=str(tmp_path), name="it", progress="off")
    members = Cluster(3).run(Path(train_counted.__file__), args, settings=settings)
    assert [member.code for member in members] == [0, 0, 0], members
    found = Ledger.read(tmp_path / "ledger").check(5)
    assert found.clean, found  # equal weights on all after each step, too
    assert found.steps == 100  # as many global batches as with equal shares
    told = [events(tmp_path / "it", "shares", rank) for rank in range(3)]
    assert told[0], members[0].output
    assert all([t["samples"] for t in other] == [t["samples"] for t in told[0]] for other in told)
    first, *_ = told[0]
    given = [samples_given(tmp_path / "ledger", member) for member in range(3)]
    before, after = first["step"], first["step"] + 1
    assert [steps[before - 1] for steps in given] == [8, 8, 8]
    assert [steps[after - 1] for steps in given] == first["samples"]
    assert first["samples"][1] <= 6, first
    assert "takes" in members[0].output
    assert members[0].output.count("member 1 takes") == 1


@pytest.mark.slow
def test_members_are_lost_after_shares_have_changed(tmp_path: Path) -> None:
    plan = FaultPlan().kill(member=2, step=70).kill(member=0, step=190)
    result = run_with(tmp_path, plan, most=3, epochs=16, args=SLOW, stragglers="less")
    result.must_be_clean()
    told = {tuple(event["samples"]) for rank in (0, 1, 2) for event in events(result.dir, "shares", rank)}
    assert told, result.output


@pytest.mark.slow
@pytest.mark.parametrize("slow", [1, 0])
def test_a_member_that_stays_slow_leaves_and_the_others_go_on(tmp_path: Path, slow: int) -> None:
    args = ("--sample-s", "0.001", "--slow", str(slow))
    result = run_with(tmp_path, FaultPlan(), most=3, epochs=12, args=args, stragglers="drop")
    result.must_be_clean()
    assert f"member {slow} takes" in result.output
    assert "it is asked to leave" in result.output
    assert f"member {slow} is gone, 2 members go on" in result.output
    assert len(list((tmp_path / "ledger").glob("member-*.jsonl"))) == 3, "it was replaced"
    (dropped,) = [e for e in events(result.dir, "straggler") if e["done"] == "asked to leave"]
    assert dropped["member"] == slow


@pytest.mark.slow
def test_nobody_leaves_where_all_are_needed(tmp_path: Path) -> None:
    result = run_with(tmp_path, FaultPlan(), least=2, most=2, epochs=6, args=SLOW, stragglers="drop")
    result.must_be_clean()
    assert "it is kept, since there must be 2 members" in result.output
    assert not events(result.dir, "view")


@pytest.mark.slow
@needs_hosts
@pytest.mark.parametrize(("rates", "named"), [(("100mbit", "100mbit", "20mbit"), True), (("100mbit",) * 3, False)])
def test_a_host_with_a_slow_link_is_named_for_it(tmp_path: Path, rates: tuple[str, ...], named: bool) -> None:
    with outing(tmp_path, rate=rates, epochs=3, args=["--width", "10000"]) as out:
        assert out.code("run") == 0, out.output
        for name in out.programs:
            out.code(name, 60.0)
        out.check()
    told = events(out.dir, "straggler")
    assert [(t["member"], t["reason"]) for t in told] == ([(2, "network")] if named else []), out.output
    if named:
        assert 3 < told[0]["times"] < 8
        assert "[0] paceline: member 2 is held up by the network: its link to member 0 carries" in out.output
