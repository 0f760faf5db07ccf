"""What a member of bench.memory does: train a GPT by one of the sides, stage by stage.

The bench, in its own process, marks the peak of each stage (`_memory_marks.py`). Whatever is imported, compiled or
connected on the way is there before: two steps of a tiny model by the same side come first.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bench.models import GPT, Batch, _text
from bench.workers import RANK, gloo

Loss = Callable[[nn.Module, Batch], Tensor]
Step = Callable[[Batch], Tensor]
Side = Callable[[nn.Module], Step]  # takes a model over; returns one step of training
SIZES = {  # vocabulary, context, width, heads, layers; batch
    "tiny": ((64, 16, 32, 2, 2), 2),
    "gpt30m": ((8192, 128, 512, 8, 8), 4),
}


def make(size: str) -> nn.Module:
    vocabulary, context, width, heads, layers = SIZES[size][0]
    torch.manual_seed(1)
    return GPT(vocabulary=vocabulary, context=context, width=width, heads=heads, layers=layers)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten())


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


# ---- the sides


def _loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(batch: Batch) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


_runs: list[Any] = []


def ours(strategy: str = "allreduce", mesh: str = "") -> Side:
    def side(model: nn.Module) -> Step:
        import paceline

        if not _runs:
            _runs.append(paceline.join(strategy=strategy, mesh=mesh))
        run = _runs[0]
        model = run.model(model)
        return _loop(model, run.optimizer(adamw(model), model))

    return side


def ddp(model: nn.Module) -> Step:
    gloo()
    return _loop(nn.parallel.DistributedDataParallel(model), adamw(model))


def ddp_views(model: nn.Module) -> Step:
    gloo()
    return _loop(nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True), adamw(model))


def ddp_zero(model: nn.Module) -> Step:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    gloo()
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return _loop(wrapped, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3))


def fsdp2(keep: bool = False) -> Side:
    """`keep`: parameters stay whole between the passes, which is nearer to ZeRO-2."""

    def side(model: nn.Module) -> Step:
        from torch.distributed.fsdp import fully_shard

        gloo()
        for layer in model.layers:  # type: ignore[union-attr]
            fully_shard(layer, reshard_after_forward=not keep)
        fully_shard(model, reshard_after_forward=not keep)
        return _loop(model, adamw(model))

    return side


SIDES: dict[str, Side] = {
    "ours allreduce": ours(),
    "ours zero(stage=1)": ours("zero(stage=1)"),
    "ours zero(stage=2)": ours("zero(stage=2)"),
    "ours shard=2": ours(mesh="shard=2"),
    "DDP": ddp,
    "DDP views": ddp_views,
    "DDP ZeroRedundancyOptimizer": ddp_zero,
    "FSDP2 kept whole": fsdp2(keep=True),
    "FSDP2": fsdp2(),
}


# ---- stages


class Stages:
    """Each begins and ends with nothing kept that is not needed."""

    def __init__(self, sides: dict[str, Side]) -> None:
        self.sides = sides
        self.step: Step

    def before(self, side: str) -> None:
        self.side = self.sides[side]
        step = self.side(make("tiny"))
        for number in range(2):
            step(batch("tiny", number))
        del step
        settle()

    def making(self, size: str) -> None:
        self.size = size
        self.step = self.side(make(size))
        settle()

    def train(self, first: int, last: int) -> float:
        """The last loss."""
        losses = [float(self.step(batch(self.size, number))) for number in range(first, last)]
        settle()
        return losses[-1]


def batch(size: str, number: int) -> Batch:
    (vocabulary, context, *_), rows = SIZES[size]
    return _text(vocabulary, context)(rows, 2 * number + RANK)


def settle() -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def finish() -> None:
    import torch.distributed as dist

    while _runs:
        _runs.pop().close()
    if dist.is_initialized():
        dist.destroy_process_group()


def functions(sides: dict[str, Side]) -> dict[str, Callable[..., Any]]:
    """What the benchmark may call."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    stages = Stages(sides)
    return {"before": stages.before, "making": stages.making, "train": stages.train, "finish": finish}
