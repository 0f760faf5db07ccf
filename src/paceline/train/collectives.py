"""Collectives for the user's own needs: `run.all_reduce(...)`. All members call the same ones in the same order."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.transport.group import Group


class Collectives:
    """Those of the whole run; sub-groups are made with `run.group.subgroup(ranks)`."""

    group: Group

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        return self.group.all_reduce(tensor, op)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return self.group.all_gather(tensor)

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.group.reduce_scatter(tensor)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
        return self.group.broadcast(tensor, root)

    def gather(self, tensor: torch.Tensor, root: int = 0) -> list[torch.Tensor] | None:
        return self.group.gather(tensor, root)

    def scatter(self, tensors: Sequence[torch.Tensor] | None, root: int = 0) -> torch.Tensor:
        return self.group.scatter(tensors, root)

    def send(self, tensor: torch.Tensor, to: int) -> None:
        self.group.send(tensor, to)

    def recv(self, source: int) -> torch.Tensor:
        return self.group.recv(source)

    def barrier(self) -> None:
        self.group.barrier()
