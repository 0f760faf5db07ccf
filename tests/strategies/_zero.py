"""What the tests of zero train: a net, optimizers of several kinds, and batches that depend on step and member."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import torch
from torch import nn

from paceline.strategies import AllReduce, Strategy, World, Zero
from paceline.transport.group import Group, solo

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
}
STEPS = 10
BATCH = 8


class Net(nn.Module):
    """Several blocks at the bucket size that tests use; a number by itself, and a layer that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(20, 64), nn.Linear(64, 300), nn.Linear(300, 3)
        self.scale, self.never = nn.Parameter(torch.tensor(1.0)), nn.Linear(5, 5)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) / 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.first(x).tanh()).tanh()) * self.scale


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(BATCH, 20, generator=torch.Generator().manual_seed(1000 * step + rank))


class Trainer:
    """One member, by a strategy; a run would call it the same way."""

    def __init__(self, group: Group, strategy: Strategy, make: Make, model: nn.Module | None = None) -> None:
        self.group, self.strategy, self.world = group, strategy, World(group)
        self.model = model or Net()
        self.optimizer = make(self.model.parameters())
        strategy.attach(self.model, self.optimizer, self.world)
        self.at = 0

    def loss(self) -> torch.Tensor:
        return self.model(batch(self.at, self.group.rank)).square().mean()  # type: ignore[no-any-return]

    def step(self) -> None:
        if self.strategy.finish(self.optimizer):
            self.optimizer.step()
        self.at += 1

    def train(self, steps: int = STEPS) -> Trainer:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.loss().backward()
            self.step()
        return self

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: t.detach().clone() for name, t in self.model.state_dict().items()}

    def saved(self) -> dict[str, object]:
        """What a checkpoint would hold, on the first member."""
        self.strategy.together(keep=True)
        with self.strategy.showing():
            return copy.deepcopy({"model": self.weights(), "optimizer": self.optimizer.state_dict()})

    def load(self, saved: dict[str, object]) -> Trainer:
        saved = copy.deepcopy(saved)
        self.model.load_state_dict(saved["model"])  # type: ignore[arg-type]
        self.optimizer.load_state_dict(saved["optimizer"])  # type: ignore[arg-type]
        self.strategy.load_own_state([])
        return self


def alone(make: Make, size: int, steps: int = STEPS) -> dict[str, torch.Tensor]:
    """Plain PyTorch, on the batches of all members."""
    model = Net()
    optimizer = make(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.cat([batch(step, rank) for rank in range(size)])).square().mean().backward()
        optimizer.step()
    return {name: t.detach().clone() for name, t in model.state_dict().items()}


def whole(make: Make) -> Trainer:
    """In a run of one, where zero does nothing."""
    return Trainer(solo(), AllReduce(), make)


def zero(stage: int, **options: object) -> Zero:
    return Zero(stage=stage, bucket_mb=0.02, **options)  # type: ignore[arg-type]


def differ(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in a.keys() | b.keys() if name not in a or name not in b or not torch.equal(a[name], b[name])]


def close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], atol: float = 1e-5) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
