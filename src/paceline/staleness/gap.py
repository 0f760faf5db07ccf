"""Gap-aware: an element counts less the farther its weight has moved since it was read.

    C = η_max · √(mean of (step / η)²);   g ← g / (1 + |w − w_read| / C)        all elementwise

An age counts versions; the gap |w − w_read| / C counts steps of mean size C, and is small where a weight has gone back
and forth, or η has become small. The steps are measured, as the change of the weights from one push to the next: with
plain SGD step / η is the gradient, as in the paper, with momentum it is the momentum, and any optimizer will do. Their
mean is a moving one, over about 1000 pushes, corrected for its beginning as in Adam. All this takes two copies of the
model, beside one for each worker.

Reference: Barkai, Hakimi and Schuster, Gap-aware mitigation of gradient staleness, 2020.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from paceline.staleness.correction import Push, Stage, check_state
from paceline.staleness.sent import Sent

_MEMORY = 0.999
_TINY = 1e-8


@dataclass(slots=True)
class _Steps:
    """Of one piece."""

    weights: torch.Tensor  # at the last push, before it was applied
    lr: float  # of the last push
    lr_max: float
    squares: torch.Tensor  # in float32: a moving mean in bf16 would stand still
    num: int = 0

    def measure(self, weights: torch.Tensor, lr: float) -> None:
        """Another push arrives: the last one's step is what has changed since."""
        if self.lr > 0:
            step = torch.sub(weights, self.weights, out=self.weights)
            self.squares.mul_(_MEMORY).addcmul_(step, step, value=(1 - _MEMORY) / self.lr**2)
            self.num += 1
        self.weights.copy_(weights)
        self.lr, self.lr_max = lr, max(lr, self.lr_max)

    def mean(self) -> torch.Tensor:
        scale = self.lr_max / (1 - _MEMORY**self.num) ** 0.5
        return self.squares.sqrt().mul_(scale).add_(self.lr_max * _TINY)


class GapAware:
    """g / (1 + |w − w_read| / C). A worker that has read nothing yet is not held back."""

    stage = Stage.SCALE
    reads = True
    words = "gap"

    def __init__(self) -> None:
        self._sent = Sent()
        self._steps: dict[str, _Steps] = {}

    def check_optimizer(self, options: Mapping[str, Any]) -> None:
        pass

    def accepts(self, push: Push) -> bool:
        return True

    def on_pull(self, key: str, weights: torch.Tensor, worker: int, lr: float) -> torch.Tensor:
        self._sent.keep(key, weights, worker)
        return weights

    def on_push(self, key: str, grad: torch.Tensor, weights: torch.Tensor, push: Push) -> torch.Tensor:
        steps = self._steps.get(key)
        if steps is None:
            kind = torch.promote_types(weights.dtype, torch.float32)
            squares = torch.zeros_like(weights, dtype=kind)
            steps = self._steps[key] = _Steps(weights.clone(), push.lr, push.lr, squares)
        else:
            steps.measure(weights, push.lr)
        read = self._sent.get(key, push.worker)
        if read is None or not steps.num:
            return grad
        gap = torch.sub(weights, read, out=torch.empty_like(steps.squares)).abs_().div_(steps.mean())
        return grad.div_(gap.add_(1))

    def forget(self, worker: int) -> None:
        self._sent.forget(worker)

    def state_dict(self) -> dict[str, Any]:
        steps = {
            key: {"weights": s.weights, "lr": s.lr, "lr_max": s.lr_max, "squares": s.squares, "num": s.num}
            for key, s in self._steps.items()
        }
        return {"correction": "gap", "sent": self._sent.state_dict(), "steps": steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_state(state, "gap")
        self._sent.load_state_dict(state["sent"])
        self._steps = {
            key: _Steps(s["weights"].clone(), s["lr"], s["lr_max"], s["squares"].clone(), s["num"])
            for key, s in state["steps"].items()
        }
