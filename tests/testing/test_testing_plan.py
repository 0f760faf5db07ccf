"""Plans of faults: they read as the code that makes them, survive JSON, and are the same for the same seed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import ConfigError
from paceline.testing.plan import KINDS, FaultPlan

EVERYTHING = (
    FaultPlan()
    .kill(member=2, step=7)
    .kill("scheduler", step=7, doing="checkpointing", after_s=0.1)
    .kill("host 1", at_s=2.5, signal="TERM")
    .pause(member="first", step=9, for_s=2)
    .partition((0, 2), step=1, for_s=0.5, way="out")
    .slow(1, "1mbit", step=4, for_s=1)
    .reset(0, step=5)
    .corrupt(member=1, step=6, after_bytes=1000)
    .fill_disk(step=8, for_s=1)
    .jump_clock(-3600, step=9)
    .jump_clock(5, member=1, step=9)
    .scale(3, step=9)
)


def test_every_kind_reads_as_the_code_that_makes_it() -> None:
    assert eval(repr(EVERYTHING)) == EVERYTHING
    assert FaultPlan.from_json(EVERYTHING.to_json()) == EVERYTHING
    assert {fault.__struct_config__.tag for fault in EVERYTHING.faults} == set(KINDS)
    assert repr(FaultPlan().kill(member=2, step=7)) == "FaultPlan().kill(member=2, step=7)"
    assert repr(FaultPlan().kill("agent 0", at_s=1.0)) == "FaultPlan().kill('agent 0', at_s=1.0)"


def test_a_plan_does_not_change_when_another_is_made_from_it() -> None:
    one = FaultPlan().kill(member=1, step=3)
    other = one.kill(member=2, step=3)
    assert len(one.faults) == 1
    assert len(other.faults) == 2
    assert hash(one) == hash(FaultPlan().kill(member=1, step=3))


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 1 << 40),
    faults=st.integers(0, 20),
    members=st.integers(1, 9),
    steps=st.integers(2, 500),
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=5),
)
def test_random_plans(seed: int, faults: int, members: int, steps: int, kinds: list[str]) -> None:
    plan = FaultPlan.random(seed, faults, members, steps, kinds, hosts=3)
    assert f"seed={seed}" in repr(plan)
    assert f"seed={seed}" in str(plan)
    assert len(str(plan).splitlines()) == faults + 1
    assert eval(repr(plan)) == plan
    assert FaultPlan.from_json(plan.to_json()) == plan
    more = plan.kill("scheduler", step=1)
    assert eval(repr(more)) == more
    assert eval(repr(FaultPlan(plan.faults))).faults == plan.faults  # without the seed, as a chain
    for fault in plan.faults:
        assert fault.step is not None
        assert 1 <= fault.step < steps
    assert [f.step for f in plan.faults] == sorted(f.step or 0 for f in plan.faults)


def test_another_seed_is_another_plan() -> None:
    plans = {FaultPlan.random(seed, 5, 4, 100).faults for seed in range(20)}
    assert len(plans) == 20


def test_bad_input() -> None:
    plan = FaultPlan()
    with pytest.raises(ConfigError, match=r"target='': give member=2, or 'first'"):
        plan.kill(step=1)
    with pytest.raises(ConfigError, match="give one of them"):
        plan.kill("scheduler", member=1, step=1)
    with pytest.raises(ConfigError, match="target='membr 1'"):
        plan.pause("membr 1", for_s=1)
    with pytest.raises(ConfigError, match="not both"):
        plan.kill(member=1, step=1, at_s=1)
    with pytest.raises(ConfigError, match=r"for_s=-1: must be 0 or more"):
        plan.pause(member=1, for_s=-1)
    with pytest.raises(ConfigError, match=r"size=-1: must be 0 or more"):
        plan.scale(-1)
    with pytest.raises(ConfigError, match="signal='KIL': did you mean 'KILL'"):
        plan.kill(member=1, signal="KIL")
    with pytest.raises(ConfigError, match="write it as 100mbit"):
        plan.slow(1, "fast", for_s=1)
    with pytest.raises(ConfigError, match="did you mean 'pause'"):
        FaultPlan.random(1, 1, 1, 10, kinds=["pausee"])
    with pytest.raises(ConfigError, match="happen between 2 hosts"):
        FaultPlan.random(1, 1, 1, 10, kinds=["partition"])
    with pytest.raises(ConfigError, match="2 or more steps"):
        FaultPlan.random(1, 1, 1, 1)
    with pytest.raises(ConfigError, match="no plan of faults"):
        FaultPlan.from_json('{"faults": [{"kind": "explode"}]}')
