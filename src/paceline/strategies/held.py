"""A table of the servers, and the user's objects that it stands for: what a strategy with servers pushes and pulls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from paceline.data.leases import Counted
from paceline.server.client import Table
from paceline.server.counting import Batch
from paceline.server.messages import Options
from paceline.strategies.front import Front
from paceline.strategies.redone import Redone, Span, gradients
from paceline.strategies.strategy import Pass


class Held:
    """A table, and the user's objects that it stands for. `learnt`: what pushes are made of, if not of gradients."""

    def __init__(
        self,
        table: Table | None,
        optimizer: torch.optim.Optimizer,
        parameters: list[torch.Tensor],
        groups: int,
        front: Front | None,
        learnt: list[torch.Tensor] | None = None,
    ) -> None:
        self.table = table  # None where another worker of this host pushes
        self.optimizer = optimizer
        self.parameters = parameters
        self.groups = groups  # of the optimizer, when the table was opened
        self.wishes = 0
        self.redone = Redone(lambda: learnt or gradients(parameters), anew=not learnt)
        self._front = front

    def push(
        self,
        options: list[Options],
        weight: float,
        wish: bool,
        passing: Pass | None,
        leases: Mapping[str, Sequence[int]],
        counted: Mapping[Batch, Counted],
        samples: float,
    ) -> None:
        grads: list[torch.Tensor | None] = [p.grad for p in self.parameters]
        if self._front:
            grads, weight, wish = self._front.sum(self.parameters, grads, weight, wish)
        if self.table:
            read, thread = (passing.read[self.table.number], passing.thread) if passing else (None, 0)
            self.table.push(
                grads,
                options,
                weight=weight,
                wish=wish,
                read=read,
                thread=thread,
                leases=leases,
                counted=counted,
                samples=samples,
            )
            self.wishes = self.table.wishes
        if self._front:
            self._front.share(self.parameters)
            self.wishes = self._front.tell(self.wishes)

    def draws(self, batches: Sequence[Batch], counted: Mapping[Batch, Counted], *, kept: bool) -> bool:
        """The turn of these batches begins; `kept`: what is pushed next is made of others too.

        Whether they are in one turn with a batch that some servers have already, and left out there with it.
        """
        spans = [span for batch in batches if batch in counted for span in self._spans(batch, counted[batch])]
        if kept and self.redone.idle:
            self.redone.join(spans)
            return True
        if kept:
            self.redone.end()
        self.redone.begin(spans, kept=kept)
        return False

    def _spans(self, batch: Batch, counted: Counted) -> Sequence[Span]:
        return self.table.spans(batch, counted) if self.table else ()

    def pull(self) -> None:
        if self.table:
            self.table.pull()
        if self._front:
            self._front.share(self.parameters)
