"""The three systems under which the cases of the zoo are run."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer


class Plain:
    """PyTorch in one process."""

    rank, size = 0, 1

    def wrap(self, model: nn.Module, **_: Any) -> nn.Module:
        return model

    def optimizer(self, optimizer: Optimizer, _: nn.Module) -> Optimizer:
        return optimizer

    def accumulate(self, _: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()

    def recover(self) -> None:
        pass


class Ddp(Plain):
    """DistributedDataParallel over gloo."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def wrap(self, model: nn.Module, **flags: Any) -> nn.Module:
        return nn.parallel.DistributedDataParallel(model, **flags)

    def accumulate(self, wrapped: nn.Module) -> AbstractContextManager[None]:
        return wrapped.no_sync()  # type: ignore[operator]


class Ours(Plain):
    """Paceline; without a launcher a run of one."""

    def __init__(self, run: Any) -> None:
        self.run, self.rank, self.size = run, run.rank, run.size

    def optimizer(self, optimizer: Optimizer, model: nn.Module) -> Optimizer:
        return self.run.optimizer(optimizer, model)

    def accumulate(self, _: nn.Module) -> AbstractContextManager[None]:
        return self.run.accumulate()

    def recover(self) -> None:
        self.run._strategy.close()  # forgets the models of the cases so far
