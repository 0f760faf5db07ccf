"""What the all-reduce strategy asks of whatever exchanges the gradients of one model.

It is `engine.Engine` where every member gets the mean of all (all-reduce, ZeRO-1), and `scattered.Scattered` where each
gets its part of it (ZeRO-2).
"""

from __future__ import annotations

from typing import Protocol

import torch

from paceline.core.errors import Interrupted
from paceline.strategies.reducers import Coder


class Passes(Protocol):
    """One model's."""

    order: list[str]  # of arrival, on the first member
    busy: bool  # a backward pass is under way and some gradient has arrived
    broken: Interrupted | None  # the group broke in this pass
    coder: Coder | None

    @property
    def complete(self) -> bool:
        """Whether every gradient of this pass has arrived."""

    def adopt(self, optimizer: torch.optim.Optimizer) -> None: ...
    def cleared(self, optimizer: torch.optim.Optimizer) -> None: ...
    def stepped(self, optimizer: torch.optim.Optimizer) -> None: ...
    def launch_rest(self) -> None: ...
    def collect(self) -> None: ...
    def regroup(self) -> None: ...
    def release(self) -> None: ...
    def close(self) -> None: ...
