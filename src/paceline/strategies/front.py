"""The workers of one host as one: summed through shared memory, so that a single push leaves the host.

The first worker of a host leads: it pushes what all have summed, and hands the weights that come back to the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.core.view import View
from paceline.transport.group import Group


class Front:
    """One host's workers. All of them call the same methods in the same order."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.leads = group.rank == 0

    def sum(
        self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None], weight: float, wish: bool
    ) -> tuple[list[torch.Tensor | None], float, bool]:
        """The mean over this host's samples, what it weighs, and whether any of them wishes for a pause.

        A parameter without a gradient on some workers counts as zero there; without one on all, it has none.
        """
        notes = torch.tensor([weight, float(wish), *(float(g is not None) for g in gradients)], dtype=torch.float64)
        self._group.all_reduce(notes)
        total, wishes, *marks = notes.tolist()
        means: list[torch.Tensor | None] = []
        for p, gradient, mark in zip(parameters, gradients, marks):
            if not mark:
                means.append(None)
                continue
            own = torch.zeros_like(p.detach()) if gradient is None else gradient.detach().clone()
            own = own.to_dense() if own.is_sparse else own
            own.mul_(weight / total if total else 0.0)
            means.append(self._group.all_reduce(own))
        return means, total, wishes > 0

    def share(self, parameters: Sequence[torch.Tensor]) -> None:
        """Everyone's parameters become the leader's."""
        for p in parameters:
            self._group.broadcast(p.detach())

    def tell(self, number: int) -> int:
        """The leader's number."""
        return int(self._group.broadcast(torch.tensor([number])))


def front_of(group: Group, view: View) -> tuple[Front, list[int]]:
    """That of this host, and who pushes for each of the hosts."""
    hosts = [[r for r in host if r in group.ranks] for host in view.hosts()]
    fronts = [group.subgroup([group.ranks.index(r) for r in host]) for host in hosts if host]
    return next(Front(front) for front in fronts if front), [host[0] for host in hosts if host]
