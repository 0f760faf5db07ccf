"""Momentum per worker, and workers that read where the weights are about to be (DANA-Zero).

    push from j:   v_j ← γ · v_j + g;   apply v_j
    pull:          send w − η · γ · Σ_k v_k

One momentum for all workers makes a gradient the older the more of them there are. With one for each, Σ_k v_k tells
where the weights will have gone by the time that every worker has pushed once: the gradients that arrive belong there.
With one worker this is Nesterov's momentum, and what it reads are the parameters of torch's SGD with `nesterov=True`.

The sum is kept: what a push changes is taken out and put in. So that roundings do not gather in it, every 256 pushes of
a piece, and whenever a worker leaves, it is added up anew. Its error is at most that of twice as many roundings of the
largest values in between. The momenta are float32 or wider: γ · v + g in bf16 would lose a g below |v| / 256.

Reference: Hakimi et al., Taming momentum in a distributed asynchronous environment, 2019.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.core.errors import ConfigError
from paceline.core.words import finite
from paceline.staleness.correction import Push, Stage, check_state

_ADD_UP_EVERY = 256


@dataclass(slots=True)
class _Momenta:
    """Of one piece."""

    total: torch.Tensor
    of: dict[int, torch.Tensor] = field(default_factory=dict)  # by worker
    pushes: int = 0  # since the total was added up

    def add_up(self) -> None:
        self.total.zero_()
        for worker in sorted(self.of):  # the order decides how it is rounded, and must be the same after a resume
            self.total.add_(self.of[worker])
        self.pushes = 0


class Dana:
    """v_j = γ · v_j + g is applied; workers read w − lr · γ · Σ_k v_k.

    The optimizer must be plain SGD: what is sent counts on w − lr · v.

    Args:
        momentum: γ, from above 0 to below 1.
    """

    stage = Stage.GATHER
    reads = True

    def __init__(self, momentum: float = 0.9) -> None:
        if not finite(momentum) or not 0 < momentum < 1:
            raise ConfigError(f"dana(momentum={momentum!r}): a number above 0 and below 1 is needed, such as 0.9")
        self.momentum = momentum
        self._momenta: dict[str, _Momenta] = {}

    @property
    def words(self) -> str:
        return f"dana(momentum={self.momentum})"

    def check_optimizer(self, options: Mapping[str, Any]) -> None:
        advice = "Use SGD without momentum, or leave dana out"
        if momentum := options.get("momentum"):
            raise ConfigError(f"{self.words}: the optimizer has momentum={momentum}, which would count twice. {advice}")
        if "betas" in options or "eps" in options:
            raise ConfigError(
                f"{self.words}: the optimizer has a step size for each element, so that where the weights are about to "
                f"be cannot be told from momenta. {advice}"
            )
        if options.get("maximize"):
            raise ConfigError(f"{self.words}: the optimizer has maximize=True; dana looks ahead downwards. {advice}")

    def accepts(self, push: Push) -> bool:
        return True

    def on_pull(self, key: str, weights: torch.Tensor, worker: int, lr: float) -> torch.Tensor:
        momenta = self._momenta.get(key)
        if momenta is None:
            return weights
        return torch.add(weights, momenta.total, alpha=-lr * self.momentum, out=torch.empty_like(weights))

    def on_push(self, key: str, grad: torch.Tensor, weights: torch.Tensor, push: Push) -> torch.Tensor:
        kind = torch.promote_types(grad.dtype, torch.float32)
        momenta = self._momenta.get(key)
        if momenta is None:
            momenta = self._momenta[key] = _Momenta(torch.zeros_like(grad, dtype=kind))
        v = momenta.of.get(push.worker)
        if v is None:
            momenta.of[push.worker] = v = grad.to(kind, copy=True)
        else:
            momenta.total.sub_(v)
            torch.add(grad, v, alpha=self.momentum, out=v)
            grad.copy_(v)
        momenta.pushes += 1
        if momenta.pushes < _ADD_UP_EVERY:
            momenta.total.add_(v)
        else:
            momenta.add_up()
        return grad

    def forget(self, worker: int) -> None:
        for key, momenta in list(self._momenta.items()):
            if momenta.of.pop(worker, None) is None:
                continue
            if momenta.of:
                momenta.add_up()
            else:
                del self._momenta[key]

    def state_dict(self) -> dict[str, Any]:
        return {
            "correction": "dana",
            "momenta": {
                key: {"total": m.total, "of": {str(w): v for w, v in m.of.items()}, "pushes": m.pushes}
                for key, m in self._momenta.items()
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_state(state, "dana")
        self._momenta = {
            key: _Momenta(m["total"].clone(), {int(w): v.clone() for w, v in m["of"].items()}, m["pushes"])
            for key, m in state["momenta"].items()
        }
