"""The members of one split (or shard), and what autograd knows of the exchanges between them.

Two kinds of tensors pass through a model that is split. A whole one is the same on all members, and so is its gradient.
Of one in parts each member has its part, and the gradient of that. Each function below turns one into the other, or one
that is to be summed into either, and its way back is the other way around:

    forward                        backward
    enter    whole -> used in parts    sum of everyone's gradients
    total    to be summed -> whole     nothing
    gather   parts -> whole            my part
    part     whole -> parts            gather
    spread   to be summed -> parts     gather
    collect  parts -> used in parts    sum of everyone's gradients, my part of it
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist

from paceline.parallel.lay import Lay

# PyTorch 2.13 has other names for them.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Fellows:
    """Members that compute together, in a group of torch.distributed."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)
        self.sequence = False  # what is summed goes on in parts of the sequence
        self.along = 1  # the dimension that is the sequence

    def __deepcopy__(self, memo: dict[int, Any]) -> Fellows:
        return self

    @torch.no_grad()
    def sum(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        """Everyone's, reduced: another tensor."""
        out = tensor.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(out, op, group=self.group)
        return out

    @torch.no_grad()
    def gather(self, part: torch.Tensor, lay: Lay) -> torch.Tensor:
        sizes = [lay.own(rank) for rank in range(self.size)]
        most = max(sizes)
        mine = part.detach().movedim(lay.dim, 0).contiguous()
        if sizes[self.rank] < most:
            mine = torch.cat([mine, mine.new_zeros(most - sizes[self.rank], *mine.shape[1:])])
        out = mine.new_empty(self.size, *mine.shape)
        _all_gather(out.view(-1), mine.view(-1), group=self.group)
        parts = [row[:size] for row, size in zip(out, sizes)]
        return lay.at(0).join(parts).movedim(0, lay.dim).contiguous()

    @torch.no_grad()
    def scatter(self, tensor: torch.Tensor, lay: Lay) -> torch.Tensor:
        """My part of the sum of everyone's."""
        rows = [lay.part(tensor.detach(), rank).movedim(lay.dim, 0) for rank in range(self.size)]
        most = max(map(len, rows))
        given = rows[0].new_zeros(self.size, most, *rows[0].shape[1:])
        for place, row in zip(given, rows):
            place[: len(row)] = row
        out = torch.empty_like(given[0])
        _reduce_scatter(out.view(-1), given.view(-1), group=self.group)
        return out[: len(rows[self.rank])].movedim(0, lay.dim).contiguous()

    @torch.no_grad()
    def part(self, whole: torch.Tensor, lay: Lay) -> torch.Tensor:
        return lay.part(whole.detach(), self.rank).contiguous()

    def agree(self, number: int) -> bool:
        """Whether all have the same."""
        device = "cuda" if dist.get_backend(self.group) == "nccl" else "cpu"
        most = self.sum(torch.tensor([number, -number], device=device), dist.ReduceOp.MAX).tolist()
        return bool(most[0] == -most[1])

    def same(self, tensor: torch.Tensor, root: int = 0) -> None:
        """Everyone's becomes one member's, in place."""
        dist.broadcast(tensor, group=self.group, group_src=root)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, fellows: Fellows) -> torch.Tensor:
        ctx.fellows = fellows
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.fellows.sum(gradient), None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, fellows: Fellows) -> torch.Tensor:
        return fellows.sum(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


_TURNS = {  # forward, backward
    "gather": ("gather", "part"),
    "part": ("part", "gather"),
    "spread": ("scatter", "gather"),
    "collect": ("gather", "scatter"),
}


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, fellows: Fellows, lay: Lay, kind: str) -> torch.Tensor:
        there, ctx.back = _TURNS[kind]
        ctx.fellows, ctx.lay = fellows, lay
        return cast(torch.Tensor, getattr(fellows, there)(tensor, lay))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return getattr(ctx.fellows, ctx.back)(gradient, ctx.lay), None, None, None


def enter(tensor: torch.Tensor, fellows: Fellows) -> torch.Tensor:
    wanted = tensor.requires_grad and torch.is_grad_enabled()
    return _Enter.apply(tensor, fellows) if wanted else tensor  # type: ignore[no-untyped-call]


def total(tensor: torch.Tensor, fellows: Fellows) -> torch.Tensor:
    return _Total.apply(tensor, fellows)  # type: ignore[no-any-return, no-untyped-call]


def gather(tensor: torch.Tensor, fellows: Fellows, lay: Lay) -> torch.Tensor:
    return _turn(tensor, fellows, lay, "gather")


def part(tensor: torch.Tensor, fellows: Fellows, lay: Lay) -> torch.Tensor:
    return _turn(tensor, fellows, lay, "part")


def spread(tensor: torch.Tensor, fellows: Fellows, lay: Lay) -> torch.Tensor:
    return _turn(tensor, fellows, lay, "spread")


def collect(tensor: torch.Tensor, fellows: Fellows, lay: Lay) -> torch.Tensor:
    return _turn(tensor, fellows, lay, "collect")


def _turn(tensor: torch.Tensor, fellows: Fellows, lay: Lay, kind: str) -> torch.Tensor:
    return _Turn.apply(tensor, fellows, lay, kind)  # type: ignore[no-any-return, no-untyped-call]
