"""What this member's batches weigh: 1, but for those that are not full.

Gradients of a batch that is not full are multiplied by its weight before autograd adds them to what is there. Several
passes may be added up before they are exchanged (`run.accumulate()`), and the mean of their weights goes with the sum.
"""

from __future__ import annotations

import functools
import statistics
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from paceline.strategies.strategy import World


class Weighing:
    """The weights of one model's passes.

    `before` is called with a parameter whose gradient is about to be weighed, and with the weight.
    """

    def __init__(
        self,
        world: World,
        parameters: Mapping[int, torch.nn.Parameter],
        before: Callable[[torch.Tensor, float], object] = lambda p, weight: None,
    ) -> None:
        self._world = world
        self._parameters = parameters
        self._before = before
        self._hooks: list[Any] = []  # while this member's batch is not a full one
        self._weights: list[float] = []  # of the passes whose gradients are being added up
        self._pass = -1  # the last of them
        self._kept: Callable[[], torch.Tensor | None] = lambda: None  # the gradient that they added to last
        world.tally.listeners.append(self.weigh)

    def arrived(self, p: torch.Tensor, busy: bool) -> None:
        """A gradient is ready; note the weight where it is the first of its pass. `busy`: another has arrived that is
        to be exchanged."""
        task = torch._C._current_graph_task_id()
        if task == self._pass:
            return
        self._pass = task
        if self._weights and not busy:
            # Autograd adds in place, but for graphs of higher order: another tensor has no earlier gradient in it.
            added = p.grad is self._kept() or torch.is_grad_enabled()
            if not added and all(q is p or q.grad is None for q in self._parameters.values()):
                self._weights.clear()  # the user has dropped those gradients
        weight, doubt = self._world.tally.take()
        self._weights.append(weight)
        if doubt:
            # Six levels up is who called loss.backward().
            warnings.warn(f"paceline: member {self._world.group.rank}: {doubt}", stacklevel=6)

    def keep(self, p: torch.Tensor) -> None:
        """This gradient stays here, and a later pass is added to it."""
        assert p.grad is not None
        self._kept = weakref.ref(p.grad)

    def take(self) -> float:
        """The mean weight of what is exchanged now."""
        weight = statistics.fmean(self._weights) if self._weights else self._world.tally.weight
        self._weights.clear()
        return weight

    def cleared(self, optimizer: torch.optim.Optimizer) -> None:
        """The user drops an optimizer's gradients now: accumulated passes of which nothing is left weigh nothing."""
        if self._weights:
            dropped = {id(p) for group in optimizer.param_groups for p in group["params"]}
            if all(p.grad is None or i in dropped for i, p in self._parameters.items()):
                self._weights.clear()

    def restart(self) -> None:
        """What was noted counts for nothing, and there may be other parameters."""
        self._weights.clear()
        self.weigh(self._world.tally.weight)

    def weigh(self, weight: float) -> None:
        """From the next pass on multiply gradients by `weight`, before autograd adds them to what is there."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if weight != 1.0 and self._world.group.size > 1:
            self._hooks = [
                hook_on(p, p.register_hook, functools.partial(self._weighed, p, weight))
                for p in self._parameters.values()
                if trainable(p)
            ]

    def _weighed(self, p: torch.Tensor, weight: float, grad: torch.Tensor) -> torch.Tensor:
        self._before(p, weight)
        return grad * weight if weight else torch.zeros_like(grad)  # not even nan times zero

    def release(self) -> None:
        self._world.tally.listeners.remove(self.weigh)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def trainable(p: torch.nn.Parameter) -> bool:
    return p.is_floating_point() or p.is_complex()


def hook_on(p: torch.nn.Parameter, register: Callable[[Any], Any], hook: Callable[..., Any]) -> Any:
    """A frozen parameter takes no hook, but keeps one until it is trained."""
    trained = p.requires_grad
    p.requires_grad_(True)
    handle = register(hook)
    p.requires_grad_(trained)
    return handle
