"""The parameters of one model and of its optimizers, as an engine has taken them over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline.strategies.replicas import make_equal, names_of
from paceline.strategies.strategy import World
from paceline.strategies.weighing import hook_on, trainable


class Holding:
    """Of one model.

    Args:
        owned: those of all models of the run, by id: a parameter belongs to the first that had it.
        arrived: called when a gradient is ready, within the backward pass.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        world: World,
        owned: dict[int, torch.nn.Parameter],
        arrived: Callable[[torch.Tensor], None],
    ) -> None:
        self.optimizers: list[torch.optim.Optimizer] = []
        self.names: dict[int, str] = {}  # id of the parameter -> name
        self.parameters: dict[int, torch.nn.Parameter] = {}
        self._model = model
        self._world = world
        self._owned = owned
        self._arrived = arrived
        self._hooks: list[Any] = []

    def adopt(self, optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
        """Take over what is new in the model and the optimizer; all start as on the first member."""
        known = dict(self.parameters)
        if not any(optimizer is o for o in self.optimizers):
            self.optimizers.append(optimizer)
        self.names |= names_of(self._model)  # the model may have grown
        found = [(p, "") for p in self._model.parameters()]
        for i, group in enumerate(optimizer.param_groups):
            found += [(p, f"optimizer.{i}.{j}") for j, p in enumerate(group["params"])]
        for p, name in found:
            self.names.setdefault(id(p), name)
            if id(p) not in self._owned:
                self._owned[id(p)] = self.parameters[id(p)] = p
        new = {self.names[i]: p for i, p in self.parameters.items() if i not in known}
        buffers = {} if known else dict(self._model.named_buffers())
        self._world.do(lambda group: make_equal(group, new, buffers))
        for p in new.values():
            if trainable(p):
                self._hooks.append(hook_on(p, p.register_post_accumulate_grad_hook, self._arrived))
        return list(new.values())

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
