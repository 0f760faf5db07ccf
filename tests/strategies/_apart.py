"""Members that train apart, as threads, with the loop that a run has around a strategy."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from paceline.checkpoint import pack, unpack
from paceline.strategies import Strategy, World
from paceline.strategies.strategy import Commits
from paceline.train.optimizer import adopt
from paceline.transport.group import Group


class Observer:
    """What of `train.loop` a strategy needs."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self.before: Callable[[], object] = lambda: None  # a step is done here, and the strategy does not know yet

    def own_step(self, optimizer: torch.optim.Optimizer) -> bool:
        return self._strategy.finish(optimizer)

    def full(self, optimizer: torch.optim.Optimizer) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def rate(self) -> float:
        return 1.0

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.before()
        self._strategy.stepped(optimizer)

    def cleared(self, optimizer: torch.optim.Optimizer) -> None:
        self._strategy.cleared(optimizer)

    def group_added(self, optimizer: torch.optim.Optimizer) -> None:
        self._strategy.extend(optimizer)


_SEEDED = threading.Lock()  # members are threads, and share torch's generator


def net(seed: int = 0) -> nn.Sequential:
    with _SEEDED:
        torch.random.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))


class Normed(nn.Module):
    """Statistics that are learnt, a counter, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("table", torch.arange(5000.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.cat([self.inner(x), self.inner(x + 1)]))  # type: ignore[no-any-return]


class Member:
    """A model, its optimizer and a strategy; `data(step)` is this member's batch."""

    def __init__(
        self,
        group: Group,
        strategy: Strategy,
        model: nn.Module,
        optimizer: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.SGD(p, lr=0.1),
        commits: Commits | None = None,
        **options: Any,
    ) -> None:
        self.world = World(group, **options)
        self.world.elastic, self.world.commits = commits is not None, commits
        self.group, self.strategy, self.model = group, strategy, model
        observer = Observer(strategy)
        observer.before = lambda: self.own.append(self.weights)
        self.optimizer = adopt(optimizer(model.parameters()), observer)
        self.own: list[torch.Tensor] = []  # weights after each step, before members agree
        self.step = 0
        strategy.attach(model, self.optimizer, self.world)

    def batch(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * self.step + self.group.rank)
        return torch.randn(8, 6, generator=generator)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = self.model(self.batch()).square().mean() + self.model(torch.ones(1, 6)).sum() * 0.1
            loss.backward()
            if self.world.listen:
                self.world.listen({"loss": loss, "tokens": 8})
            self.step += 1
            self.optimizer.step()

    @property
    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1).clone() for p in self.model.parameters()])

    def save(self) -> tuple[bytes, bytes]:
        """What all have alike, from the first member, and this member's own."""
        self.strategy.together(keep=True)
        with self.strategy.showing():
            shared = {
                "strategy": self.strategy.state_dict(),
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
            }
            own = pack(self.strategy.own_state())
            return self.group.exchange(pack(shared))[0], own

    def load(self, shared: bytes, own: list[bytes], step: int) -> None:
        state = unpack(shared)
        self.strategy.load_state_dict(state["strategy"])
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.strategy.load_own_state([unpack(each) for each in own])
        self.step = step


@contextlib.contextmanager
def closing(member: Member) -> Iterator[Member]:
    yield member
    member.strategy.close()
