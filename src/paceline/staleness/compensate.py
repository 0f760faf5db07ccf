"""Delay compensation: an estimate of what the gradient would be at the present weights (DC-ASGD).

    g ← g + λ · g ⊙ g ⊙ (w − w_read)

The gradient is continued from w_read, the weights that this worker was sent, to w by the first term of its Taylor
series, with λ · g ⊙ g for the diagonal of the Hessian. For losses that are negative log-likelihoods the mean of g ⊙ g
is that diagonal, near the optimum; large batches make it too small, and λ should grow with them.

Reference: Zheng et al., Asynchronous stochastic gradient descent with delay compensation, 2017.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from paceline.core.errors import ConfigError
from paceline.core.words import finite
from paceline.staleness.correction import Push, Stage, check_state
from paceline.staleness.sent import Sent

_MEMORY = 0.95
_TINY = 1e-7


class DelayCompensation:
    """g + λ · g ⊙ g ⊙ (w − w_read). A worker that has read nothing yet gets no compensation.

    Args:
        strength: λ; by default 0.04, with `adaptive` 2.
        adaptive: λ / √(MS + 1e-7) takes the place of λ, where MS ← 0.95 · MS + 0.05 · g ⊙ g, over all workers.
    """

    stage = Stage.ESTIMATE
    reads = True

    def __init__(self, strength: float | None = None, adaptive: bool = False) -> None:
        if not isinstance(adaptive, bool):
            raise ConfigError(f"compensate(adaptive={adaptive!r}): True or False is needed")
        if strength is None:
            strength = 2.0 if adaptive else 0.04
        if not finite(strength) or strength <= 0:
            raise ConfigError(f"compensate(strength={strength!r}): a number above 0 is needed, such as 0.04")
        self.strength, self.adaptive = strength, adaptive
        self._sent = Sent()
        self._squares: dict[str, torch.Tensor] = {}  # MS, in float32: a moving mean in bf16 would stand still

    @property
    def words(self) -> str:
        return f"compensate(strength={self.strength}, adaptive={self.adaptive})"

    def check_optimizer(self, options: Mapping[str, Any]) -> None:
        pass

    def accepts(self, push: Push) -> bool:
        return True

    def on_pull(self, key: str, weights: torch.Tensor, worker: int, lr: float) -> torch.Tensor:
        self._sent.keep(key, weights, worker)
        return weights

    def on_push(self, key: str, grad: torch.Tensor, weights: torch.Tensor, push: Push) -> torch.Tensor:
        mean_square = self._mean_square(key, grad) if self.adaptive else None
        read = self._sent.get(key, push.worker)
        if read is None:
            return grad
        change = torch.sub(weights, read, out=torch.empty_like(grad)).mul_(grad)
        if mean_square is None:
            return grad.addcmul_(grad, change, value=self.strength)
        change.mul_(grad).mul_(mean_square.add(_TINY).rsqrt_())
        return grad.add_(change, alpha=self.strength)

    def forget(self, worker: int) -> None:
        self._sent.forget(worker)

    def state_dict(self) -> dict[str, Any]:
        return {"correction": "compensate", "sent": self._sent.state_dict(), "squares": dict(self._squares)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_state(state, "compensate")
        self._sent.load_state_dict(state["sent"])
        self._squares = {key: squares.clone() for key, squares in state["squares"].items()}

    def _mean_square(self, key: str, grad: torch.Tensor) -> torch.Tensor:
        mean_square = self._squares.get(key)
        if mean_square is None:
            kind = torch.promote_types(grad.dtype, torch.float32)
            mean_square = self._squares[key] = torch.zeros_like(grad, dtype=kind)
        return mean_square.mul_(_MEMORY).addcmul_(grad, grad, value=1 - _MEMORY)
