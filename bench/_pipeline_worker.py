"""A member of `bench.pipeline`: layers whose compute is a sleep, and whose activations are real.

A layer sleeps as long for what goes forward, for what earlier layers need of its backward pass, and for what its own
weights need. What it really slept counts as its compute, so that a clock that wakes late is not taken for a bubble.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import paceline

slept = 0.0


def _sleep(seconds: float) -> None:
    global slept
    began = time.perf_counter()
    time.sleep(seconds)
    slept += time.perf_counter() - began


class _Passing(torch.autograd.Function):
    """Sleeps forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        _sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        _sleep(ctx.seconds)
        return grads[0], None


class _Weighing(torch.autograd.Function):
    """Sleeps backward only."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        _sleep(ctx.seconds)
        return grads[0], None


class Layer(nn.Module):
    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.weight, self.scale, self.seconds = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.ones(1)), seconds

    def forward(self, x: Tensor) -> Tensor:
        return _Passing.apply(x * self.scale, self.seconds) + _Weighing.apply(self.weight, self.seconds)  # type: ignore[no-any-return, no-untyped-call]


def main() -> None:
    wanted = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    run = paceline.join()
    members, micros, width, seconds = run.size, wanted["micros"], wanted["width"], wanted["seconds"]
    x, y = torch.ones(micros, width), torch.zeros(micros, width)

    def layers() -> nn.Sequential:
        return nn.Sequential(*(Layer(width, seconds / 2) for _ in range(2 * members)))

    def mean(out: Tensor, target: Tensor) -> Tensor:
        return (out - target).square().mean()

    def ours(schedule: str) -> Any:
        model = run.model(layers(), schedule=schedule, micro=micros)
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.0), model)
        return lambda: run.backward(model, x, y, loss=mean)

    def theirs() -> Any:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        dist.init_process_group("gloo", init_method=wanted["store"], rank=run.rank, world_size=members)
        mine = nn.Sequential(*list(layers())[2 * run.rank : 2 * run.rank + 2])
        stage = PipelineStage(mine, run.rank, members, torch.device("cpu"))
        schedule = Schedule1F1B(stage, micros, loss_fn=mean)
        given = (x,) if run.rank == 0 else ()
        target = {"target": y} if run.rank == members - 1 else {}
        return lambda: schedule.step(*given, **target)

    sides = {schedule: ours(schedule) for schedule in wanted["schedules"]} | {"torch": theirs()}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for repeat in range(-1, wanted["repeats"]):
        for name in list(sides) if repeat % 2 == 0 else reversed(list(sides)):
            run.barrier()
            before, began = slept, time.perf_counter()
            sides[name]()
            run.barrier()
            took = time.perf_counter() - began
            busy = [float(s) for s in run.all_gather(torch.tensor([slept - before], dtype=torch.float64))]
            if repeat >= 0:
                found[name].append((took, sum(busy) / members))
    if run.is_first:
        print("FOUND " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
