"""Training in virtual time: what it computes is what plain SGD computes, and who waits is who would wait."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional as F

from bench import _delays
from bench import _network_accuracy as fashion
from bench._simulation import Outcome, Plan, Simulation
from bench.models import small_cnn


@pytest.fixture(autouse=True)
def few_images(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the benchmark
    draw = torch.Generator().manual_seed(5)
    images = torch.randint(256, (256, 1, 28, 28), generator=draw, dtype=torch.uint8)
    labels = torch.randint(10, (256,), generator=draw)
    monkeypatch.setattr(fashion, "_data", lambda part: (images, labels))
    monkeypatch.setattr(fashion, "DEVICE", "cpu")
    yield
    torch.set_num_threads(threads)


def _plain(plan: Plan, together: int) -> list[torch.Tensor]:
    """The same samples in the same order, `together` batches in a step."""
    torch.manual_seed(plan.seed)
    model = small_cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=plan.lr, momentum=plan.momentum)
    total = round(plan.epochs * 256 / plan.batch)
    order = fashion._order(256, 1000 * plan.seed)
    for first in range(0, total, together):
        warm = max(1, total // 10)
        share = min(1.0, (first + 1) / warm) * 0.5 * (1 + math.cos(math.pi * first / total))
        optimizer.param_groups[0]["lr"] = plan.lr * share
        x, y = fashion._batch("train", order[first * plan.batch : (first + together) * plan.batch])
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def _weights(simulation: Simulation) -> list[torch.Tensor]:
    simulation._use(simulation.shard.weights(0, 0))
    return [p.detach().clone() for p in simulation.parameters]


@pytest.mark.parametrize("gate", ["sync", "bounded(staleness=2)", "async"])
def test_one_worker_is_plain_sgd_bit_for_bit(gate: str) -> None:
    plan = Plan(workers=1, gate=gate, delays="steady", lr=0.05, batch=16, epochs=1.0)
    simulation = Simulation(plan)
    outcome = simulation.run()
    assert outcome.time == 16
    assert outcome.max_age == 0
    for ours, plain in zip(_weights(simulation), _plain(plan, 1)):
        assert torch.equal(ours, plain)


def test_sync_is_plain_sgd_with_the_batches_of_all() -> None:
    plan = Plan(workers=4, gate="sync", delays="steady", lr=0.05, batch=16, epochs=1.0, push=0.5)
    simulation = Simulation(plan)
    outcome = simulation.run()
    assert outcome.time == 4 * 10.5  # the slowest, and the push behind which nobody stands
    for ours, plain in zip(_weights(simulation), _plain(plan, 4)):
        torch.testing.assert_close(ours, plain, rtol=1e-3, atol=1e-5)


def test_async_waits_for_nobody_and_pushes_are_old() -> None:
    outcome = Simulation(Plan(workers=4, gate="async", delays="steady", lr=0.01, batch=4, epochs=1.0)).run()
    assert 64 / 2.35 - 10 < outcome.time < 64 / 2.35 + 10
    assert outcome.max_age >= 10  # of the slowest: the others push 22 times while it computes once


def test_a_bound_holds() -> None:
    simulation = Simulation(Plan(workers=4, gate="bounded(staleness=2)", delays="steady", lr=0.01, batch=4, epochs=1.0))
    clocks: list[dict[int, int]] = []
    push = simulation._push

    def watched(rank: int, total: int) -> None:
        push(rank, total)
        clocks.append(copy.copy(simulation.shard.clocks.of))

    simulation._push = watched  # type: ignore[method-assign]
    outcome = simulation.run()
    assert max(max(c.values()) - min(c.values()) for c in clocks) == 3  # two ahead, and the push that waits
    assert outcome.time > 3 * 64 / 2.35  # near the pace of the slowest


def test_a_diverging_run_is_kept_and_says_so() -> None:
    outcome = Simulation(Plan(workers=4, gate="async", delays="varied", lr=1e4, batch=16, epochs=2.0)).run()
    assert "not finite" in outcome.failed
    assert outcome.accuracy == Outcome().accuracy == 0.1


def test_what_waiting_costs_is_bounded_by_theory() -> None:
    """A tenth of the time leaves at most 0.92 / (0.9^4 + 0.2 (1 - 0.9^4)); a tenth of the steps more."""
    by_time = _delays.free_rate("by_time", math.inf) / _delays.free_rate("by_time", 0)
    by_step = _delays.free_rate("by_step", math.inf) / _delays.free_rate("by_step", 0)
    assert 1.2 < by_time < 0.92 / (0.9**4 + 0.2 * (1 - 0.9**4)) + 0.03
    assert by_step == pytest.approx((0.9**4 + 5 * (1 - 0.9**4)) / 1.4, abs=0.05)
    assert _delays.free_rate("by_step", 8) < _delays.free_rate("by_step", math.inf)


def test_a_step_is_slow_for_the_part_of_it_that_is_in_a_slow_window() -> None:
    step = _delays.by_time(3)
    slow = next(w for w in range(1, 1000) if step(0, w * _delays.WINDOW) > 4.9 and step(0, (w - 1) * 5.0) < 1.1)
    begin = slow * _delays.WINDOW - 0.5
    assert step(0, begin) == pytest.approx(0.5 + 0.5 * _delays.SLOW)
