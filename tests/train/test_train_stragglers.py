"""Stragglers: found by their own time, with the reason, and told once."""

from __future__ import annotations

import pytest

from paceline.testing.cluster import Cluster
from paceline.train.stragglers import Pace, Stragglers

USUAL = Pace(0.001, 0.010, 0.010)


def told(slow: Pace, turns: int = 60, rank: int = 2) -> list[tuple[int, str]]:
    found = Stragglers()
    paces = [USUAL] * 4
    paces[rank] = slow
    return [(s.rank, s.reason) for _ in range(turns) for s in found.note(paces)]


@pytest.mark.parametrize(
    ("slow", "reason"),
    [
        (Pace(0.030, 0.010, 0.010), "data"),
        (Pace(0.001, 0.030, 0.010), "load"),
        (Pace(0.001, 0.030, 0.030), "compute"),
    ],
)
def test_the_reason_follows_from_where_its_own_time_goes(slow: Pace, reason: str) -> None:
    assert told(slow) == [(2, reason)]


@pytest.mark.parametrize(("queued_s", "reason"), [(0.018, "load"), (0.0005, "idle")])
def test_one_that_sleeps_is_told_from_one_that_others_crowd_out(queued_s: float, reason: str) -> None:
    usual = USUAL._replace(queued_s=0.0)
    found = Stragglers()
    slow = Pace(0.001, 0.030, 0.010, queued_s=queued_s)
    (named,) = [s for _ in range(60) for s in found.note([usual, usual, slow])]
    assert named.reason == reason
    assert ("its script sleeps" in named.text) == (reason == "idle")


def test_nobody_is_named_where_all_are_alike_or_for_a_single_slow_turn() -> None:
    assert told(USUAL) == []
    found = Stragglers()
    for turn in range(100):
        paces = [USUAL] * 3 + [Pace(0.0, 0.08 if turn == 50 else 0.011, 0.01)]
        assert found.note(paces) == []


@pytest.mark.parametrize("until", [2, 12])
def test_nobody_is_named_for_slow_turns_at_the_start(until: int) -> None:
    """The first member's, while it imports something."""
    found = Stragglers()
    for turn in range(100):
        slow = Pace(0.001, 0.060, 0.060) if turn < until else USUAL
        assert found.note([slow, USUAL, USUAL]) == []


@pytest.mark.parametrize("turn_s", [1.5, 30.0])
def test_nobody_is_named_for_having_been_stopped_once(turn_s: float) -> None:
    found = Stragglers()
    for turn in range(100):
        held_up = Pace(0.001, turn_s, 0.010, queued_s=0.0) if turn == 50 else USUAL
        assert found.note([USUAL, USUAL, held_up]) == []


def test_who_has_caught_up_and_falls_behind_again_is_told_again() -> None:
    found, story = Stragglers(), []
    for turn in range(300):
        slow = Pace(0.0, 0.03, 0.03) if turn // 100 != 1 else USUAL
        story += found.note([USUAL, USUAL, slow])
    assert [s.rank for s in story] == [2, 2]


def test_another_view_begins_anew() -> None:
    found = Stragglers()
    slow = Pace(0.0, 0.03, 0.03)
    for _ in range(35):
        assert not found.note([USUAL, USUAL, slow])
    for _ in range(35):
        assert not found.note([USUAL, slow])


def test_a_slow_member_is_named_by_the_first_and_not_who_waits_for_it() -> None:
    script = """
        import time, torch, paceline
        run = paceline.join(progress="off", checkpoint_keep=0)
        model = torch.nn.Linear(4, 2)
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        loader = run.loader(torch.randn(240, 4), batch_size=2)
        for epoch in run.epochs(1):
            for x in loader:
                optimizer.zero_grad()
                if run.rank == 1:
                    time.sleep(0.02)
                model(x).sum().backward()
                optimizer.step()
    """
    first, second = Cluster(2).run(script)
    assert first.output.count("member 1 takes") == 1
    assert "its script sleeps" in first.output
    assert "takes" not in second.output
