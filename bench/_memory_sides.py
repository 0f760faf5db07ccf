"""What a member of bench.memory does: train a GPT by one of the sides, and tell its peak memory stage by stage.

The peak is the kernel's own high-water mark of resident pages (VmHWM, set back before each stage), so no short peak
is missed. Pages of shared memory are resident in both members and count half in each: what is subtracted is half of the
smallest amount that was shared within the stage, also once gradients are dropped, so ours, which alone shares any, is
never made smaller than it is. Where shared memory comes and goes within a step nothing is subtracted, and it counts
twice.
What was there before is subtracted: the process after two steps of a tiny model by the same side, with all that is
imported, compiled or connected on the way.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable
from pathlib import Path
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
        _shared.append(resident()["RssShmem"])
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


_runs: list[Any] = []
_shared: list[int] = []  # bytes, wherever it may be least


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


# ---- measuring


def resident() -> dict[str, int]:
    """In bytes: the mark, what is resident now, and of that what is shared."""
    found = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(("VmHWM", "VmRSS", "RssShmem")):
            name, number, _ = line.split()
            found[name.removesuffix(":")] = int(number) * 1024
    return found


def measure(side: Side, size: str, steps: int) -> dict[str, float]:
    """The peak of each stage in bytes, above what was there before; and the last loss."""
    step = side(make("tiny"))
    for number in range(2):
        step(batch("tiny", number))
    del step
    settle()
    before = resident()
    base = before["VmRSS"] - before["RssShmem"] // 2
    peaks: dict[str, float] = {}

    def stage(name: str, work: Callable[[], Any]) -> Any:
        settle()
        Path("/proc/self/clear_refs").write_text("5")
        _shared[:] = [resident()["RssShmem"]]
        done = work()
        now = resident()
        peaks[name] = now["VmHWM"] - min(*_shared, now["RssShmem"]) // 2 - base
        return done

    step = stage("making", lambda: side(make(size)))
    batches = [batch(size, number) for number in range(steps)]
    stage("first step", lambda: step(batches[0]))
    losses = stage("later steps", lambda: [float(step(each)) for each in batches[1:]])
    settle()
    now = resident()
    peaks["between steps"] = now["VmRSS"] - now["RssShmem"] // 2 - base
    return peaks | {"loss": losses[-1]}


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
    return {"measure": lambda side, size, steps: measure(sides[side], size, steps), "finish": finish}
