"""The zoo: small models and loops that people write, each independent of the system that trains it.

A case is a function of a side (plain PyTorch, Paceline or DDP; see sides.py) that trains something for a few
steps and returns the tensors to compare. What differs between systems goes through the side and nothing else,
so that a case reads like a script. Batches depend on (step, member), so that all sides see the same data.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

Result = dict[str, Tensor]
STEPS = 5


class Side(Protocol):
    """One system as a case sees it."""

    rank: int
    size: int

    def wrap(self, model: nn.Module, **ddp: Any) -> Any:
        """What to call forward on; `ddp` are the flags that DDP needs for this case and the others do not."""

    def optimizer(self, optimizer: Optimizer, model: nn.Module) -> Any:
        """The optimizer that the loop uses."""

    def accumulate(self, wrapped: nn.Module) -> AbstractContextManager[None]:
        """Backward passes inside only add up; nothing is reduced."""

    def recover(self) -> None:
        """A case has failed: do not let it fail the ones that follow."""


@dataclass(frozen=True)
class Case:
    """`tolerance` is against DDP: the largest difference between two weights."""

    run: Callable[[Side], Result]
    tolerance: float = 1e-6
    ddp: bool = True  # whether DDP can do it at all

    @property
    def name(self) -> str:
        return self.run.__name__


CASES: dict[str, Case] = {}


def case(tolerance: float = 1e-6, ddp: bool = True) -> Callable[[Callable[[Side], Result]], Callable[[Side], Result]]:
    """Add a function to the zoo."""

    def add(function: Callable[[Side], Result]) -> Callable[[Side], Result]:
        CASES[function.__name__] = Case(function, tolerance, ddp)
        return function

    return add


def features(side: Side, step: int, size: int = 6, width: int = 8, classes: int = 4) -> tuple[Tensor, Tensor]:
    """This member's batch."""
    g = torch.Generator().manual_seed(1000 * step + side.rank)
    return torch.randn(size, width, generator=g), torch.randint(classes, (size,), generator=g)


def images(side: Side, step: int, size: int = 4) -> tuple[Tensor, Tensor]:
    x, y = features(side, step, size, 3 * 8 * 8)
    return x.view(size, 3, 8, 8), y


def words(side: Side, step: int, size: int = 3, length: int = 7, vocabulary: int = 13) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1000 * step + side.rank)
    text = torch.randint(vocabulary, (size, length + 1), generator=g)
    return text[:, :-1], text[:, 1:]


def mlp(width: int = 8, hidden: int = 16, classes: int = 4) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, classes)
    )


def weights(*models: nn.Module) -> Result:
    return {f"{i}.{k}": v.detach().clone() for i, m in enumerate(models) for k, v in m.state_dict().items()}


def train(
    side: Side,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    batch: Callable[[Side, int], tuple[Tensor, Tensor]] = features,
    schedule: Callable[[Optimizer], Any] | None = None,
    steps: int = STEPS,
    **ddp: Any,
) -> Result:
    """The ordinary loop."""
    forward = side.wrap(model, **ddp)
    optimizer = side.optimizer(optimizer, model)
    scheduler = schedule(optimizer) if schedule else None
    for step in range(steps):
        x, y = batch(side, step)
        optimizer.zero_grad()
        loss = F.cross_entropy(forward(x).flatten(0, -2), y.flatten())
        loss.backward()
        optimizer.step()
        if scheduler:
            scheduler.step()
    return weights(model)


class Branches(nn.Module):
    """A trunk and two branches; the caller says which ones are used. One layer never is."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 16)
        self.left, self.right, self.never = nn.Linear(16, 4), nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x: Tensor, left: bool, right: bool) -> Tensor:
        h = self.trunk(x).tanh()
        out = h.mean(1, keepdim=True).expand(-1, 4)
        out = out + self.left(h) if left else out
        return out + self.right(h) if right else out
