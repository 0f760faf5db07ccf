"""Decay: weights shrink with the versions of the shard, not with what a worker read (time-based weight decay).

    w ← (1 − η · rate) · w        once for each version that has a gradient of the piece

A decay that travels in a gradient is a multiple of old weights: a late worker would pull the present ones back to where
those were. A piece without a gradient does not decay, as a parameter whose `grad` is None does not in torch. Weights in
bf16 have too few bits for a small η · rate: below 2⁻⁹ they stay as they are.

Reference: Loshchilov and Hutter, Decoupled weight decay regularization, 2019, with the shard's versions for steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from paceline.core.errors import ConfigError
from paceline.core.words import finite
from paceline.staleness.correction import Push, Stage, check_state


class Decay:
    """(1 − lr · rate) · w before the gradient is applied, with the learning rate of the piece's parameter group.

    With one worker and plain SGD it is the `weight_decay` of torch's SGD.

    Args:
        rate: the weight decay, above 0.
    """

    stage = Stage.BESIDE
    reads = False

    def __init__(self, rate: float) -> None:
        if not finite(rate) or rate <= 0:
            raise ConfigError(f"decay(rate={rate!r}): a number above 0 is needed, such as 1e-4")
        self.rate = rate

    @property
    def words(self) -> str:
        return f"decay(rate={self.rate})"

    def check_optimizer(self, options: Mapping[str, Any]) -> None:
        if decay := options.get("weight_decay"):
            raise ConfigError(
                f"{self.words}: the optimizer decays weights itself (weight_decay={decay}), and both would. Set its "
                "weight_decay to 0, or leave decay out"
            )

    def accepts(self, push: Push) -> bool:
        self._factor(push.lr)
        return True

    def on_pull(self, key: str, weights: torch.Tensor, worker: int, lr: float) -> torch.Tensor:
        return weights

    def on_push(self, key: str, grad: torch.Tensor, weights: torch.Tensor, push: Push) -> torch.Tensor:
        weights.mul_(self._factor(push.lr))
        return grad

    def forget(self, worker: int) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {"correction": "decay"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_state(state, "decay")

    def _factor(self, lr: float) -> float:
        factor = 1 - lr * self.rate
        if factor <= 0:
            raise ConfigError(
                f"{self.words}: at a learning rate of {lr} each version would multiply the weights by {factor}. "
                f"Choose a rate below {1 / lr}"
            )
        return factor
