"""On a quadratic, with gradients as old as there are workers: corrections hold where plain asynchrony does not."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import torch

from paceline.staleness import Push, make_corrections

EVEN = [1 + j * 1e-3 for j in range(8)]  # eight workers in turn: every push is of age 7
UNEVEN = [1.0, 1.001, *(6 + j * 1e-2 for j in range(12))]  # two fast ones among twelve slow ones
CURVATURE = torch.logspace(-2, 0, 50)
START = torch.ones(50)

Gradient = Callable[[torch.Tensor], torch.Tensor]


def exact(weights: torch.Tensor) -> torch.Tensor:
    return CURVATURE * weights


def distance(
    words: str, lr: float, *, seconds: Sequence[float] = EVEN, momentum: float = 0.0, gradient: Gradient = exact
) -> float:
    """How far from the optimum 400 versions lead; `momentum` is the optimizer's own."""
    correction, version = make_corrections(words), 0
    weights = START.clone()
    optimizer = torch.optim.SGD([weights], lr=lr, momentum=momentum)
    read: dict[int, tuple[int, torch.Tensor]] = {}
    due: list[tuple[float, int]] = []

    def pull(worker: int, now: float) -> None:
        sent = correction.on_pull("w", weights, worker, lr) if correction else weights
        read[worker] = version, sent.clone()
        heapq.heappush(due, (now + seconds[worker], worker))

    for worker in range(len(seconds)):
        pull(worker, 0.0)
    while version < 400:
        now, worker = heapq.heappop(due)
        push = Push(worker=worker, age=version - read[worker][0], lr=lr)
        if correction is None or correction.accepts(push):
            grad = gradient(read[worker][1])
            weights.grad = correction.on_push("w", grad, weights, push) if correction else grad
            optimizer.step()
            version += 1
        pull(worker, now)
    return float(weights.norm())


def test_dividing_by_age_or_gap_holds_where_plain_asynchrony_diverges() -> None:
    """Age 7 is stable up to lr · curvature = 2 · sin(π / 30) = 0.21."""
    assert distance("none", 0.5) > 1e6
    assert distance("by_age", 0.5) < 0.5 * float(START.norm())
    assert distance("gap", 0.5) < 0.5 * float(START.norm())
    assert distance("none", 0.15) < 0.5 * float(START.norm())  # it is the age that does it


def test_dropping_holds_where_slow_workers_lead_astray() -> None:
    assert distance("none", 0.6, seconds=UNEVEN) > 1e3
    assert distance("drop(4)", 0.6, seconds=UNEVEN) < 0.1 * float(START.norm())


def test_dana_holds_where_one_momentum_for_all_diverges() -> None:
    assert distance("none", 0.05, momentum=0.9) > 1e6
    assert distance("dana", 0.05) < 0.1 * float(START.norm())
    assert distance("dana", 0.05) < 0.2 * distance("none", 0.05)  # the momentum is of use


def test_compensation_holds_where_plain_asynchrony_diverges() -> None:
    """Gradients of single samples, of unit variance and curvature: g² is the curvature on the mean."""
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)

        def sampled(weights: torch.Tensor, generator: torch.Generator = generator) -> torch.Tensor:
            return weights - torch.randn(len(weights), generator=generator)

        plain = distance("none", 0.25, gradient=sampled)
        assert plain > 1e2
        assert distance("compensate(0.5)", 0.25, gradient=sampled) < 1e-1 * plain
        assert distance("compensate(0.5, adaptive=True)", 0.25, gradient=sampled) < 1e-1 * plain
