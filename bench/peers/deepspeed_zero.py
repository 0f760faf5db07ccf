"""DeepSpeed's ZeRO stages on the CPU, steered by bench.memory. It runs in an environment of its own: deepspeed.txt."""

from __future__ import annotations

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
from torch import Tensor, nn

from bench import _memory_sides as sides
from bench.models import Batch
from bench.team import serve
from bench.workers import RANK, SIZE, gloo


def stage(number: int) -> sides.Side:
    def side(model: nn.Module) -> sides.Step:
        gloo()
        os.environ |= {"RANK": str(RANK), "LOCAL_RANK": str(RANK), "WORLD_SIZE": str(SIZE)}
        settings = {
            "train_micro_batch_size_per_gpu": 1,  # only counted with
            "zero_optimization": {"stage": number},
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
        }
        deepspeed.init_distributed(dist_backend="gloo", dist_init_required=False)
        engine, *_ = deepspeed.initialize(model=model, optimizer=sides.adamw(model), config=settings)

        def step(batch: Batch) -> Tensor:
            loss = sides.loss_of(engine, batch)
            engine.backward(loss)
            engine.step()
            return loss.detach()

        return step

    return side


SIDES = {f"DeepSpeed {number}": stage(number) for number in (1, 2, 3)}

if __name__ == "__main__":
    serve(sides.functions(SIDES))
