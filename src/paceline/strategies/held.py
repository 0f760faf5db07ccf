"""A table of the servers, and the user's objects that it stands for: what a strategy with servers pushes and pulls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from paceline.server.client import Table
from paceline.server.messages import Options
from paceline.strategies.front import Front
from paceline.strategies.strategy import Pass


class Held:
    """A table, and the user's objects that it stands for."""

    def __init__(
        self,
        table: Table | None,
        optimizer: torch.optim.Optimizer,
        parameters: list[torch.Tensor],
        groups: int,
        front: Front | None,
    ) -> None:
        self.table = table  # None where another worker of this host pushes
        self.optimizer = optimizer
        self.parameters = parameters
        self.groups = groups  # of the optimizer, when the table was opened
        self.wishes = 0
        self._front = front

    def push(
        self,
        options: list[Options],
        weight: float,
        wish: bool,
        passing: Pass | None,
        leases: Mapping[str, Sequence[int]],
    ) -> None:
        gradients: list[torch.Tensor | None] = [p.grad for p in self.parameters]
        if self._front:
            gradients, weight, wish = self._front.sum(self.parameters, gradients, weight, wish)
        if self.table:
            read, thread = (passing.read[self.table.number], passing.thread) if passing else (None, 0)
            self.table.push(gradients, options, weight=weight, wish=wish, read=read, thread=thread, leases=leases)
            self.wishes = self.table.wishes
        if self._front:
            self._front.share(self.parameters)
            self.wishes = self._front.tell(self.wishes)

    def pull(self) -> None:
        if self.table:
            self.table.pull()
        if self._front:
            self._front.share(self.parameters)
