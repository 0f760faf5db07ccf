"""Drop: pushes that are too old are not applied, all others as they are (Ringmaster ASGD).

Reference: Maranjyan, Tyurin and Richtárik, Ringmaster ASGD: the first asynchronous SGD with optimal time complexity,
2025.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from paceline.core.errors import ConfigError
from paceline.core.words import whole
from paceline.staleness.correction import Push, Stage, check_state


class Drop:
    """Pushes whose age is `age` or more are dropped.

    The first pushes of workers that begin together have ages up to one less than the number of workers: at an `age`
    below that number some of them work in vain from the beginning. That is meant, where their gradients vary little.

    Args:
        age: R in the paper, 1 or more. With 1 only gradients of the present weights count.

    >>> [Drop(2).accepts(Push(worker=0, age=age, lr=0.1)) for age in range(4)]
    [True, True, False, False]
    """

    stage = Stage.BESIDE
    reads = False

    def __init__(self, age: int) -> None:
        if not whole(age) or age < 1:
            raise ConfigError(f"drop(age={age!r}): a whole number of versions is needed, 1 or more, such as 8")
        self.age = age

    @property
    def words(self) -> str:
        return f"drop(age={self.age})"

    def check_optimizer(self, options: Mapping[str, Any]) -> None:
        pass

    def accepts(self, push: Push) -> bool:
        return push.age < self.age

    def on_pull(self, key: str, weights: torch.Tensor, worker: int, lr: float) -> torch.Tensor:
        return weights

    def on_push(self, key: str, grad: torch.Tensor, weights: torch.Tensor, push: Push) -> torch.Tensor:
        return grad

    def forget(self, worker: int) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {"correction": "drop"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_state(state, "drop")
