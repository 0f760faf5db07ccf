"""What a worker of a benchmark does: join ours, join gloo, run blocks of training steps on either side."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.models import TASKS, Batch, Task

RANK = int(os.environ.get("BENCH_RANK", "0"))
SIZE = int(os.environ.get("BENCH_SIZE", "1"))


@cache
def run() -> Any:
    """This worker's Paceline run: a member of the team, or a run of one where there is no rendezvous."""
    import paceline

    if "PACELINE_RENDEZVOUS" in os.environ:
        return paceline.join()  # the rendezvous brings the settings
    root = os.environ.get("BENCH_FOLDER", ".bench") + "/runs"
    return paceline.join(name="bench", root=root, progress="off", checkpoint_keep=0)


@cache
def wires() -> Any:
    """This worker's wires to the others of the team, for what stands below a run."""
    from paceline.core.status import Status
    from paceline.environment import detect
    from paceline.membership import meet
    from paceline.transport.wires import Wires

    place = detect()
    made: list[Wires] = []

    def describe(token: str) -> Any:
        made.append(Wires(token))
        return made[0].describe(place.rank, place.host)

    view = meet(place, describe).view
    made[0].join(view, place.rank, limit_s=60.0, status=Status(None))
    return made[0]


@cache
def gloo() -> None:
    """Start torch.distributed with gloo, through a file, so that no port is needed."""
    store = f"file://{os.environ['BENCH_FOLDER']}/gloo"
    dist.init_process_group("gloo", init_method=store, rank=RANK, world_size=SIZE)


class Loop:
    """One model being trained. `block(k)` runs k steps and returns the seconds."""

    def __init__(
        self,
        task: Task,
        side: str,
        *,
        device: str = "cpu",
        batch_size: int | None = None,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
        autocast: bool = False,
        ddp: dict[str, Any] | None = None,
    ) -> None:
        torch.manual_seed(1)
        self.task, self.side, self.device, self.autocast = task, side, device, autocast
        self.model = task.make().to(device)
        own = (optimizer or (lambda m: torch.optim.SGD(m.parameters(), lr=0.01)))(self.model)
        self.optimizer: Any = run().optimizer(own, self.model) if side == "ours" else own
        self.forward: nn.Module = self.model
        if side == "ddp":
            gloo()
            self.forward = nn.parallel.DistributedDataParallel(self.model, **(ddp or {}))
        x, y = task.batch(batch_size or task.batch_size, RANK)
        self.batch: Batch = x.to(device), y.to(device)

    def step(self) -> Tensor:
        self.optimizer.zero_grad()
        with torch.autocast(self.device.split(":")[0], torch.bfloat16, enabled=self.autocast):
            loss = self.task.loss(self.forward, self.batch)
        loss.backward()
        self.optimizer.step()
        if self.side == "ours":
            run().log(loss=loss)  # what a user's loop would do, so it counts
        return loss

    def block(self, steps: int) -> float:
        cuda = self.device.startswith("cuda")
        if cuda:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(steps):
            self.step()
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - begin


_loops: dict[str, Loop] = {}


def make(name: str, task: str, side: str, **options: Any) -> None:
    """Build a loop and remember it by name."""
    _loops[name] = Loop(TASKS[task], side, **options)


def block(name: str, steps: int) -> float:
    """Run steps of a loop, beginning together with the other workers."""
    if SIZE > 1 and dist.is_initialized():
        dist.barrier()
    return _loops[name].block(steps)


def finish() -> None:
    """Leave both systems in good order."""
    _loops.clear()
    if run.cache_info().currsize:
        run().close()
    if dist.is_initialized():
        dist.destroy_process_group()


FUNCTIONS: dict[str, Callable[..., Any]] = {"make": make, "block": block, "finish": finish}
