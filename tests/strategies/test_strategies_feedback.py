"""What a codec leaves unsaid: nothing is lost and nothing counts twice, whatever becomes of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from paceline.strategies import AllReduce, World
from paceline.strategies.reducers import Coder
from paceline.testing.together import together
from paceline.transport.group import Group

N = 4096


class Heads(nn.Module):
    """Two matrices whose gradients are whatever a test wants, and a parameter that is too small to be encoded."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.zeros(64, N // 64)) for _ in range(2))
        self.few = nn.Parameter(torch.zeros(50))

    def backward(self, **gradients: torch.Tensor) -> None:
        terms = [(getattr(self, name) * g.view_as(getattr(self, name))).sum() for name, g in gradients.items()]
        torch.stack(terms).sum().backward()


class Rates(torch.optim.Optimizer):
    """Somebody's own: its groups have no "lr"."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"rate": lr})

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        pass


class Layered(torch.optim.SGD):
    """Made of SGD, and who knows what it does with a gradient."""


def coder_of(strategy: AllReduce) -> Coder:
    (engine,) = strategy._engines.values()
    assert engine.coder is not None
    return engine.coder


def noise(group: Group, step: int, name: str = "a") -> torch.Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(100 * step + 10 * group.rank + ord(name)))


# ---- learning rates


@pytest.mark.parametrize(
    ("make", "most"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 10.0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1.0),
        (lambda p: Layered(p, lr=0.1), 1.0),
        (lambda p: Rates(p, 0.1), 1.0),
        *((lambda p, k=kind: k(p, lr=0.1), 1.0) for kind in (torch.optim.Adam, torch.optim.RMSprop)),
        *((lambda p, k=kind: k(p, lr=0.1), 1.0) for kind in (torch.optim.Adagrad, torch.optim.Adadelta)),
        (lambda p: torch.optim.Adafactor(p, lr=0.1), 1.0),
    ],
    ids=["SGD", "momentum", "of SGD", "no lr", "Adam", "RMSprop", "Adagrad", "Adadelta", "Adafactor"],
)
def test_residuals_follow_the_rate_of_plain_sgd_only(make: Callable[..., torch.optim.Optimizer], most: float) -> None:
    """The rate falls to a hundredth: what is unsaid becomes ten times as much at most, and only where that is right."""

    def body(group: Group) -> float:
        model = Heads()
        optimizer, strategy = make(model.parameters()), AllReduce(codec="topk(0.01)")
        strategy.attach(model, optimizer, World(group))
        model.backward(a=noise(group, 0))
        before = coder_of(strategy).residuals["a"].clone()
        for rate in 0.05, 0.001, 0.0, 0.002:
            for g in optimizer.param_groups:
                g["lr" if "lr" in g else "rate"] = rate
            model.zero_grad()
            model.backward(a=torch.zeros(N))
        after = coder_of(strategy).residuals["a"]
        kept = after != 0
        assert float(kept.float().mean()) > 0.9
        factors = after[kept] / before[kept]
        assert torch.allclose(factors, factors[0].expand_as(factors))
        return float(factors[0])

    assert together(2, body, hosts=["a", "b"]) == pytest.approx([most, most])


def test_a_rate_that_rises_again_does_not_blow_up_momentum() -> None:
    def body(group: Group) -> list[float]:
        model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 32))
        fixed = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape, generator=fixed) / 5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 30)
        AllReduce(codec="topk(0.01)").attach(model, optimizer, World(group))
        target = torch.randn(32, 32, generator=fixed) / 6
        own, losses = torch.Generator().manual_seed(group.rank), []
        for _ in range(60):
            model.zero_grad()
            x = torch.randn(16, 32, generator=own)
            loss = (model(x) - x @ target).square().mean()
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(float(loss.detach()))
        return losses

    losses, _ = together(2, body, hosts=["a", "b"])
    assert max(losses[30:]) < losses[0]
