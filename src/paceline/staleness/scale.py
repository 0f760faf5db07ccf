"""By age: an old gradient counts less (staleness-aware learning rate).

    g ← g / max(1, τ)^a        τ: the age of the push

Reference: Zhang et al., Staleness-aware async-SGD for distributed deep learning, 2016 (a = 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from paceline.core.errors import ConfigError
from paceline.core.words import finite
from paceline.staleness.correction import Push, Stage, check_state


class ByAge:
    """g / max(1, age)^power: ages 0 and 1 change nothing.

    Args:
        power: a; below 1 old gradients count for more, at 1 the learning rate is divided by the age.

    >>> push = Push(worker=0, age=4, lr=0.1)
    >>> ByAge(0.5).on_push("w", torch.tensor([3.0]), torch.zeros(1), push)
    tensor([1.5000])
    """

    stage = Stage.SCALE
    reads = False

    def __init__(self, power: float = 1.0) -> None:
        if not finite(power) or power <= 0:
            raise ConfigError(f"by_age(power={power!r}): a number above 0 is needed, such as 1 or 0.5")
        self.power = power

    @property
    def words(self) -> str:
        return f"by_age(power={self.power})"

    def check_optimizer(self, options: Mapping[str, Any]) -> None:
        pass

    def accepts(self, push: Push) -> bool:
        return True

    def on_pull(self, key: str, weights: torch.Tensor, worker: int, lr: float) -> torch.Tensor:
        return weights

    def on_push(self, key: str, grad: torch.Tensor, weights: torch.Tensor, push: Push) -> torch.Tensor:
        return grad.mul_(push.age**-self.power) if push.age > 1 else grad

    def forget(self, worker: int) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {"correction": "by_age"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_state(state, "by_age")
