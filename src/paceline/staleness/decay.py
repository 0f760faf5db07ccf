"""Decay: weights shrink with the versions of the shard, not with what a worker read (time-based weight decay).

    w ← (1 − η · rate)^elapsed · w        elapsed: versions since this piece was decayed last

A decay that travels in a gradient is a multiple of old weights: a late worker would pull the present ones back to where
those were. Weights in bf16 have too few bits for a small η · rate: below 2⁻⁹ they stay as they are.

Reference: Loshchilov and Hutter, Decoupled weight decay regularization, 2019, with the shard's versions for steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from paceline.core.errors import ConfigError
from paceline.staleness.correction import Push, Stage, check_state


class Decay:
    """(1 − lr · rate)^elapsed · w before the gradient is applied; the first push of a piece counts as one version.

    With one worker and plain SGD it is the `weight_decay` of torch's SGD.

    Args:
        rate: the weight decay, above 0.
    """

    stage = Stage.BESIDE
    reads = False

    def __init__(self, rate: float) -> None:
        if not 0 < rate < math.inf:
            raise ConfigError(f"decay(rate={rate!r}): a number above 0 is needed, such as 1e-4")
        self.rate = rate
        self._decayed: dict[str, int] = {}  # at which version

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
        return True

    def on_pull(self, key: str, weights: torch.Tensor, worker: int, lr: float) -> torch.Tensor:
        return weights

    def on_push(self, key: str, grad: torch.Tensor, weights: torch.Tensor, push: Push) -> torch.Tensor:
        factor = 1 - push.lr * self.rate
        if factor <= 0:
            raise ConfigError(
                f"{self.words}: at a learning rate of {push.lr} each version would multiply the weights by {factor}. "
                f"Choose a rate below {1 / push.lr}"
            )
        # A shard whose versions began anew, or that applies twice at one version, has had no time to decay.
        elapsed = max(0, push.version - self._decayed.get(key, push.version - 1))
        self._decayed[key] = push.version
        if elapsed:
            weights.mul_(factor**elapsed)
        return grad

    def forget(self, worker: int) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {"correction": "decay", "decayed": dict(self._decayed)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_state(state, "decay")
        self._decayed = dict(state["decayed"])
