"""Faults between hosts: a host that dies, is cut off, comes back; a slow link, a flipped bit, an agent that is killed.

Hosts are network namespaces; each has an agent of its own, and the training's members on it.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from _hosts import CountedOuting, outing, run_with

from paceline.testing.hosts import Hosts
from paceline.testing.plan import FaultPlan

needs_hosts = pytest.mark.skipif(bool(Hosts.missing()), reason=Hosts.missing())
needs_relay = pytest.mark.skipif(bool(Hosts.missing(delay=True)), reason=Hosts.missing(delay=True))
pytestmark = needs_hosts


@pytest.mark.slow
def test_a_host_dies_and_the_others_go_on(tmp_path: Path) -> None:
    out, _ = run_with(tmp_path, FaultPlan().kill("host 1", step=10), 2, slots=(1, 1), least=1, epochs=2)
    assert re.search(r"member 1 was not heard: its host \S+ was silent for 1.5 s", out.output), out.output


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        FaultPlan().kill("host 2", step=10),
        FaultPlan().kill("host 1", step=10).kill("host 2", step=10),
        FaultPlan().kill(member=1, step=10),
        FaultPlan().kill("first", step=10),
        FaultPlan().kill("agent 1", step=10),
        FaultPlan().kill("scheduler", step=10).kill("host 2", step=12),
        FaultPlan().kill("agent 2", signal="TERM", step=10).kill("host 2", step=10, after_s=2.0),
        FaultPlan().pause("scheduler", for_s=1.0, step=10).kill("agent 2", signal="TERM", step=10).scale(3, step=12),
        FaultPlan().reset(host=1, step=10),
        FaultPlan().slow(host=1, rate="1mbit", for_s=3.0, step=10),
        FaultPlan().partition([2], for_s=0.7, step=10),
        FaultPlan().partition([2], for_s=6.0, step=10),
        FaultPlan().partition([2], for_s=6.0, step=10, way="in"),
        FaultPlan().partition([2], for_s=6.0, step=10, way="out"),
        FaultPlan().partition([1, 2], for_s=6.0, step=10),
    ],
    ids=str,
)
def test_faults(tmp_path: Path, plan: FaultPlan) -> None:
    run_with(tmp_path, plan, slots=(1, 2, 2), least=1, epochs=8, step_s=0.05)


@pytest.mark.slow
@needs_relay
@pytest.mark.parametrize("after_bytes", [0, 3000, 50_000])
def test_a_flipped_bit_is_noticed(tmp_path: Path, after_bytes: int) -> None:
    plan = FaultPlan().corrupt("host 1", step=10, after_bytes=after_bytes)
    run_with(tmp_path, plan, delay_ms=0.1, epochs=6, step_s=0.03)


@pytest.mark.slow
def test_who_stays_cut_off_stops_and_says_so(tmp_path: Path) -> None:
    with outing(tmp_path, epochs=8, step_s=0.05, wait_limit_s=5.0) as out:
        out.until(lambda: out.steps >= 10)
        out.hosts.partition([2])
        assert out.code("run") == 0, out.output
        assert out.code("agent-1") == 0
        assert out.code("agent-2") == 1
        out.check()
    assert "is cut off from the scheduler" in (out.dir / "logs" / "rank-2.log").read_text()
    assert re.search(r"over: the scheduler was not reached for \d", (tmp_path / "agent-2.out").read_text())


@pytest.mark.slow
def test_two_hosts_lose_each_other_and_both_reach_the_scheduler(tmp_path: Path) -> None:
    with outing(tmp_path, epochs=8, step_s=0.05) as out:
        out.until(lambda: out.steps >= 10)
        out.hosts.partition([1], [2])
        before = out.steps
        out.until(lambda: out.steps >= before + 15)  # the others go on meanwhile
        out.hosts.heal()
        assert out.code("run") == 0, out.output
        out.check()


@pytest.mark.slow
def test_who_was_replaced_while_it_was_cut_off_ends(tmp_path: Path) -> None:
    with outing(tmp_path, slots=(2, 1, 1), most=3, epochs=10, step_s=0.05) as out:
        # Ids 0 and 1 are on host 0, 2 on host 1; host 2 is free.
        out.until(lambda: out.steps >= 10)
        out.hosts.partition([1])
        out.until(lambda: "member 2 joined" in out.output)
        out.hosts.heal()
        assert out.code("run") == 0, out.output
        assert [out.code("agent-1"), out.code("agent-2")] == [0, 0]
        out.check()


@pytest.mark.slow
def test_a_host_that_gets_sigterm_is_drained(tmp_path: Path) -> None:
    with outing(tmp_path, slots=(1, 2, 1), most=3, epochs=8, step_s=0.05) as out:
        with out.faults(FaultPlan().kill("agent 1", signal="TERM", step=10)):
            assert out.code("agent-1", 60.0) == 143
            assert out.code("run") == 0, out.output
        out.check()
    assert "left early" in out.output or "has left" in out.output


@pytest.mark.slow
def test_the_launcher_starts_agents_on_hosts_of_a_list(tmp_path: Path) -> None:
    with Hosts(3) as hosts:
        names = [hosts.name(i) for i in range(3)]
        (tmp_path / "hosts.txt").write_text(f"{names[1]} 1\n{names[2]} 1\n")
        options = ["--hosts", str(tmp_path / "hosts.txt"), "--start-on", "ip netns exec {host}"]
        out = CountedOuting.of(tmp_path, hosts, slots=(1,), most=3, epochs=8, step_s=0.05, options=options)
        out.start()
        out.until(lambda: out.steps >= 10)
        (tmp_path / "hosts.txt").write_text(f"{names[1]} 1\n")
        out.until(lambda: f"host {names[2]} is not in" in out.output)
        assert out.code("run") == 0, out.output
        out.check()
