"""The user's own collectives: `run.all_reduce(tensor)`. Sub-groups are made with `run.group.subgroup(ranks)`.

Where members come and go, a collective that one of them broke is done again by those who are left, with what was there
before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.strategies import World
from paceline.train.team import Team
from paceline.transport.group import Group


class Collectives:
    """Of one member of a run."""

    _world: World
    _team: Team | None

    @property
    def group(self) -> Group:
        """The members that train together; another one where some come or go."""
        return self._world.group

    @property
    def rank(self) -> int:
        return self._team.expected[0] if self._team else self.group.rank

    @property
    def size(self) -> int:
        return self._team.expected[1] if self._team else self.group.size

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        return self._in_place(tensor, lambda group, t: group.all_reduce(t, op))

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return self._world.do(lambda group: group.all_gather(tensor))

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._world.do(lambda group: group.reduce_scatter(tensor))

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
        return self._in_place(tensor, lambda group, t: group.broadcast(t, root))

    def gather(self, tensor: torch.Tensor, root: int = 0) -> list[torch.Tensor] | None:
        return self._world.do(lambda group: group.gather(tensor, root))

    def scatter(self, tensors: Sequence[torch.Tensor] | None, root: int = 0) -> torch.Tensor:
        return self._world.do(lambda group: group.scatter(tensors, root))

    def send(self, tensor: torch.Tensor, to: int) -> None:
        self.group.send(tensor, to)

    def recv(self, source: int) -> torch.Tensor:
        return self.group.recv(source)

    def barrier(self) -> None:
        self._world.do(lambda group: group.barrier())

    def _in_place(self, tensor: torch.Tensor, operation: Callable[[Group, torch.Tensor], Any]) -> torch.Tensor:
        """Where it may be done again, with what was there before."""
        if self._team is None:
            operation(self.group, tensor)
            return tensor

        def on_a_copy(group: Group) -> torch.Tensor:
            copy = tensor.detach().clone()
            operation(group, copy)
            return copy

        with torch.no_grad():
            return tensor.copy_(self._world.do(on_a_copy))
