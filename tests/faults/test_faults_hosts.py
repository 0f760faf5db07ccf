"""Faults between hosts: a host that dies, is cut off, comes back; a slow link, a flipped bit, an agent that is killed.

Hosts are network namespaces; each has an agent of its own, and the training's members on it.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from _hosts import run_with

from paceline.testing.hosts import Hosts
from paceline.testing.plan import FaultPlan

needs_hosts = pytest.mark.skipif(bool(Hosts.missing()), reason=Hosts.missing())
needs_relay = pytest.mark.skipif(bool(Hosts.missing(delay=True)), reason=Hosts.missing(delay=True))
pytestmark = needs_hosts


def test_a_host_dies_and_the_others_go_on(tmp_path: Path) -> None:
    out, _ = run_with(tmp_path, FaultPlan().kill("host 1", step=10), 2, slots=(1, 1), least=1)
    assert re.search(r"member 1 was not heard: its host \S+ was silent for 1.5 s", out.output), out.output


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        FaultPlan().kill("host 2", step=10),
        FaultPlan().kill("host 1", step=10).kill("host 2", step=10),
        FaultPlan().kill(member=1, step=10),
        FaultPlan().kill("first", step=10),
        FaultPlan().kill("agent 0", step=10),
        FaultPlan().kill("scheduler", step=10).kill("host 2", step=12),
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
    run_with(tmp_path, plan, slots=(1, 2, 2), epochs=8, step_s=0.05)


@pytest.mark.slow
@needs_relay
@pytest.mark.parametrize("after_bytes", [0, 3000, 50_000])
def test_a_flipped_bit_is_noticed(tmp_path: Path, after_bytes: int) -> None:
    plan = FaultPlan().corrupt("host 1", step=10, after_bytes=after_bytes)
    run_with(tmp_path, plan, delay_ms=0.1, epochs=6, step_s=0.03)
