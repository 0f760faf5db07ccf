"""The whole state of a model that is cut, as a checkpoint holds it, on the first member, and the way back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from paceline.parallel.pieces import fill, like, whole
from paceline.transport.group import Group


class Wholes(Protocol):
    """Of one model and its optimizers."""

    alike: Group  # the members that have the same buffers

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse an optimizer whose state would not fit other meshes."""

    def keep(self, optimizers: Sequence[torch.optim.Optimizer]) -> dict[int, dict[str, Any]]:
        """Everyone calls this; the first member gets the whole of the model and of each optimizer, by id."""

    def mine(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Of a whole model's tensors, those that this member has parts of."""

    def own_optimizer(
        self, optimizer: torch.optim.Optimizer, state: dict[str, Any], names: Sequence[Sequence[str]]
    ) -> dict[str, Any]:
        """Of an optimizer's state in the checkpoint, that of this member's parameters, with its own numbers."""


class EveryTensor:
    """Each member has a part of every tensor."""

    def __init__(self, model: nn.Module, group: Group) -> None:
        self.alike = group
        self._model = model

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        pass

    def keep(self, optimizers: Sequence[torch.optim.Optimizer]) -> dict[int, dict[str, Any]]:
        tensors = self._model.state_dict(keep_vars=True)
        kept: dict[int, dict[str, Any]] = {}
        kept[id(self._model)] = {name: self._host(t.detach(), t) for name, t in tensors.items()}
        for optimizer in optimizers:
            ps = [p for group in optimizer.param_groups for p in group["params"]]
            kept[id(optimizer)] = {
                "state": {
                    i: {k: self._host(v, ps[i]) if isinstance(v, torch.Tensor) else v for k, v in own.items()}
                    for i, own in optimizer.state_dict()["state"].items()
                }
            }
        return kept

    def _host(self, tensor: torch.Tensor, of: torch.Tensor) -> torch.Tensor | None:
        every = whole(tensor, of)
        return every.detach().to("cpu", copy=True) if self.alike.rank == 0 else None

    def mine(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        return state

    def own_optimizer(
        self, optimizer: torch.optim.Optimizer, state: dict[str, Any], names: Sequence[Sequence[str]]
    ) -> dict[str, Any]:
        return state


def load_model(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Take this member's parts out of whole tensors."""
    own = model.state_dict(keep_vars=True)
    if odd := sorted(own.keys() ^ state.keys()):
        raise RuntimeError(f"{odd[0]!r} is in only one of the model and its checkpoint")
    for name, tensor in own.items():
        if tensor.shape != state[name].shape:
            raise RuntimeError(f"{name!r} has shape {tuple(tensor.shape)}, and {tuple(state[name].shape)} there")
        fill(tensor, state[name])


def parts_of(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """The state of an optimizer with this member's parts in the place of whole tensors."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        **state,
        "state": {
            i: {
                k: like(parameters[i], v) if isinstance(v, torch.Tensor) and v.shape == parameters[i].shape else v
                for k, v in own.items()
            }
            for i, own in state["state"].items()
        },
    }
