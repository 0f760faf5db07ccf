"""Asynchronous local steps: each worker trains by itself, and every H steps brings to the servers what it has learnt.

    step        the optimizer's own, on this worker's gradients: nothing travels
    every H     difference = weights that came last − weights now, pushed as a gradient; the servers apply it by delayed
                Nesterov (`paceline.optim.delayed`) when it comes, and send their weights, with which the worker goes on
    together    what workers have learnt since their last push is pushed, so that nothing stays with one alone

Nobody waits for anybody, batches are dealt to whoever asks, and with server processes a lost worker costs what it has
learnt since its last push, whose batches are dealt again. H is `every` for the fastest worker and less for the others,
in proportion to their speed as of the last epoch, so that pushes of all are about equally old. Where an epoch has no
more batches, a worker's last ones count as done before their push: if it is lost just then, they are not dealt again.

Reference: Liu and others, Asynchronous local-SGD training for language modeling, 2024.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from paceline.core.errors import ConfigError
from paceline.core.words import whole
from paceline.optim import DelayedNesterov
from paceline.server.gates import Apart, Gate
from paceline.server.packing import servable
from paceline.strategies.anchors import begun_at, wide
from paceline.strategies.replicas import has_thawed, is_trained, names_of
from paceline.strategies.server import Served
from paceline.strategies.strategy import World


class AsyncLocal(Served):
    """Workers bring what they have learnt to servers every so many steps, when they are ready.

    Args:
        every: H, of the fastest worker.
        lr: of the servers, for differences.
        momentum: of the servers; 0: each difference is added as it is, times lr over the number of workers.
    """

    def __init__(self, every: int = 50, lr: float = 0.7, momentum: float = 0.9) -> None:
        if not whole(every) or every < 1:
            raise ConfigError(f"async_local(every={every!r}): a whole number of steps is needed, such as 50")
        DelayedNesterov([torch.nn.Parameter(torch.zeros(1))], lr, momentum)  # which checks the other two
        super().__init__(Apart(), None)
        self.every = every
        self.options = {"every": every, "lr": lr, "momentum": momentum}
        self._outer = {"lr": lr, "momentum": momentum}
        self._steps_a_push = every  # of this worker
        self._apart: list[_Apart] = []
        self._speed = _Speed()

    def take(self, codec: str) -> None:
        super().take(codec)
        momentum: float = getattr(servable(codec).push, "momentum", 0.0) if self.codec else 0.0
        if momentum:
            raise ConfigError(f"codec {codec} is for gradients, whose momentum it keeps: use topk for differences")

    def attach(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, world: World) -> None:
        self._attached = True
        if world.group.size == 1 and not world.servers:
            return
        apart = _Apart(model, optimizer, workers=world.group.size, **self._outer)
        self._apart.append(apart)
        super().attach(apart.shadow, apart.outer, world)
        apart.install()

    def extend(self, optimizer: torch.optim.Optimizer) -> None:
        if any(apart.optimizer is optimizer for apart in self._apart):
            raise ConfigError(
                "parameters cannot be added while workers train apart: give them to run.optimizer at once"
            )

    def finish(self, optimizer: torch.optim.Optimizer) -> bool:
        known = {id(p) for apart in self._apart for p in apart.parameters}
        if self._world is not None and has_thawed(optimizer, known):
            raise ConfigError(
                "a parameter was frozen when run.optimizer was called, and is trained now: workers that train apart "
                "cannot take it over. Thaw it before run.optimizer, or use another strategy, such as diloco"
            )
        return self._world is None or self._world.tally.weight > 0  # a batch of fillers teaches nothing

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        for apart in self._apart:
            if apart.optimizer is optimizer:
                apart.steps += 1
                if apart is self._apart[0]:
                    self._speed.stepped(self._world)
                if apart.steps >= self._steps_a_push:
                    self._bring(apart)

    @property
    def owes(self) -> bool:
        return any(apart.steps for apart in self._apart)

    def _catch_up(self) -> None:
        behind = self._behind
        super()._catch_up()
        if behind and not self._behind:
            for apart in self._apart:
                apart.install()

    def reading(self) -> dict[int, Sequence[int]]:
        if self._world is not None:
            raise ConfigError(
                "workers that train apart change all weights at each push, under the feet of threads: use --strategy "
                "async or bounded, or several workers in place of threads"
            )
        return {}

    def together(self, *, keep: bool = False, end: bool = False) -> None:
        if self._world is None:
            return
        for apart in self._apart:
            if apart.steps:
                self._bring(apart)
        super().together(keep=keep, end=end)
        for apart in self._apart:
            apart.install()
        speeds = [float(speed) for speed in self._world.group.all_gather(torch.tensor([self._speed.now]))]
        self._steps_a_push = share(self.every, self._speed.now, speeds)
        self._speed = _Speed()

    def turn(self, gate: str | Gate) -> None:
        raise ConfigError("workers that train apart wait for nobody: there is no gate to turn")

    def state_dict(self) -> dict[str, Any]:
        """After `together(keep=True)` the first member has the servers' state."""
        return {**super().state_dict(), "outer": [apart.outer.state_dict() for apart in self._apart]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        for apart, outer in zip(self._apart, state.get("outer", [])):
            apart.load(outer)

    def own_state(self) -> dict[str, Any]:
        """The first member's optimizers are the run's, and saved as such."""
        own = self._apart if self._world and self._world.group.rank else []
        return {**super().own_state(), "optimizers": [apart.optimizer.state_dict()["state"] for apart in own]}

    def load_own_state(self, states: Sequence[dict[str, Any]]) -> None:
        for apart in self._apart:
            apart.begin()
        super().load_own_state(states)
        for apart, state in zip(self._apart, states[0].get("optimizers", ()) if states else ()):
            apart.optimizer.load_state_dict({**apart.optimizer.state_dict(), "state": state})
        for apart in self._apart:
            apart.install()

    def _learnt(self, parameters: list[torch.Tensor]) -> list[torch.Tensor] | None:
        own = {id(anchor): p for apart in self._apart for p, anchor in zip(apart.parameters, apart.anchors)}
        return [own[id(anchor)] for anchor in parameters]

    def _bring(self, apart: _Apart) -> None:
        """Push what was learnt, and go on from what the servers have."""
        world = self._world
        assert world is not None
        if not self._is_alone(world.leases()):
            self._end_turn(apart.outer)
        if not apart.differ():
            told = f"weights of member {world.group.rank} have become infinite or nan since its last push"
            if world.check_finite:
                raise ConfigError(f"{told}: lower the learning rate, clip, or look at its data")
            world.tell_own(f"{told}: they are left out, and it goes on with those of the servers")
            apart.optimizer.state.clear()
        self._push(apart.outer, 1.0)
        apart.install()


class _Apart:
    """One optimizer's parameters, and the weights that came last from the servers: their anchors."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> None:
        self.optimizer = optimizer
        self.parameters = [p for group in optimizer.param_groups for p in group["params"] if is_trained(p)]
        if not self.parameters:
            raise ConfigError("async_local: all parameters of the optimizer are frozen, so there is nothing to learn")
        self.anchors = [torch.nn.Parameter(wide(p)) for p in self.parameters]
        names, known = names_of(model), {id(p): a for p, a in zip(self.parameters, self.anchors)}
        named = {names.get(id(p), f"optimizer.{i}"): known.get(id(p), p) for i, p in enumerate(self.parameters)}
        self.shadow = _Shadow(model, {name: known.get(id(p), p) for p, name in _pairs(model, names)} | named)
        self.outer = DelayedNesterov(self.anchors, **options)
        self.steps = 0  # since the last push

    @torch.no_grad()
    def differ(self) -> bool:
        """Note how far the weights have gone; False, and nothing, where that is no number."""
        for p, anchor in zip(self.parameters, self.anchors):
            anchor.grad = begun_at(anchor, p) - p
        sound = all(math.isfinite(float(a.grad.norm())) for a in self.anchors if a.grad is not None)
        for anchor in self.anchors if not sound else ():
            anchor.grad = torch.zeros_like(anchor)
        return sound

    @torch.no_grad()
    def install(self) -> None:
        """Go on from the anchors."""
        for p, anchor in zip(self.parameters, self.anchors):
            p.copy_(anchor)
            anchor.grad = None
        self.steps = 0

    @torch.no_grad()
    def begin(self) -> None:
        """The weights that were loaded are the anchors."""
        for p, anchor in zip(self.parameters, self.anchors):
            anchor.copy_(p)
        self.steps = 0

    def load(self, state: dict[str, Any]) -> None:
        workers = [group["workers"] for group in self.outer.param_groups]
        self.outer.load_state_dict(state)
        for group, count in zip(self.outer.param_groups, workers):  # those of now
            group["workers"] = count


class _Shadow(torch.nn.Module):
    """A model's names and buffers, with anchors in the place of its parameters: what servers are told of."""

    def __init__(self, model: torch.nn.Module, named: dict[str, torch.nn.Parameter]) -> None:
        super().__init__()
        self._named: Callable[[], Iterator[tuple[str, torch.nn.Parameter]]] = lambda: iter(named.items())
        self._with: Callable[[], Iterator[tuple[str, torch.Tensor]]] = model.named_buffers

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        yield from self._named()

    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        for _, p in self._named():
            yield p

    def named_buffers(self, *_: Any, **__: Any) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._with()


class _Speed:
    """Steps a second of this worker's own time, since the epoch began."""

    def __init__(self) -> None:
        self._began, self._waited, self._steps = time.monotonic(), -1.0, -1
        self.now = 0.0  # 0: not known

    def stepped(self, world: World | None) -> None:
        waited = world.waited if world else 0.0
        self._steps += 1
        if self._steps == 0:  # what came before the first step is no measure
            self._began, self._waited = time.monotonic(), waited
            return
        own_s = time.monotonic() - self._began - (waited - self._waited)
        self.now = self._steps / max(own_s, 1e-9)


def share(every: int, mine: float, speeds: Sequence[float]) -> int:
    """The steps between two pushes of a worker this fast.

    >>> share(50, 2.0, [4.0, 2.0]), share(50, 4.0, [4.0, 2.0]), share(50, 0.0, [4.0, 0.0])
    (25, 50, 50)
    """
    fastest = max(speeds, default=0.0)
    return max(1, round(every * mine / fastest)) if mine > 0 and fastest > 0 else every


def _pairs(model: torch.nn.Module, names: dict[int, str]) -> Iterator[tuple[torch.nn.Parameter, str]]:
    for p in model.parameters():
        yield p, names[id(p)]
