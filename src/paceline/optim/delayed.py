"""Nesterov's momentum for gradients that come one by one from N workers: the delayed one.

    each arrival     Δ ← Δ + g;          w ← w − η · g / N
    each N-th        m ← β · m + Δ / N;  w ← w − η · β · m;  Δ ← 0

Applied at each arrival, the momentum would be taken N times as often as with gradients that come together, and point
where old gradients did. N arrivals at the same weights are one step of Nesterov's SGD with their mean.

Reference: Liu and others, Asynchronous local-SGD training for language modeling, 2024 (with c = 0).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, overload

import torch

from paceline.core.errors import ConfigError


class DelayedNesterov(torch.optim.Optimizer):
    """SGD at each gradient, divided by the number of workers; momentum at each N-th.

    Args:
        params: parameters, or groups of them.
        lr: η.
        momentum: β.
        workers: N.

    >>> w = torch.nn.Parameter(torch.tensor([1.0]))
    >>> optimizer = DelayedNesterov([w], lr=0.5, momentum=0.5, workers=2)
    >>> for _ in range(2):
    ...     w.grad = torch.tensor([1.0])
    ...     optimizer.step()
    >>> w.data
    tensor([0.2500])
    """

    def __init__(self, params: Iterable[Any], lr: float = 0.7, momentum: float = 0.9, workers: int = 1) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "workers": workers})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        options = self.defaults | param_group
        if not options["lr"] >= 0 or not 0 <= options["momentum"] < 1:
            raise ConfigError(
                f"DelayedNesterov(lr={options['lr']!r}, momentum={options['momentum']!r}): a rate that is not negative "
                "and a momentum from 0 to below 1 are needed"
            )
        if not options["workers"] >= 1:
            raise ConfigError(f"DelayedNesterov(workers={options['workers']!r}): at least 1 is needed")
        super().add_param_group(param_group)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One arrival; `closure` computes the loss and the gradients anew."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lr, momentum, workers = group["lr"], group["momentum"], group["workers"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self._state(p)
                state["gathered"].add_(p.grad)
                state["step"] += 1
                p.add_(p.grad, alpha=-lr / workers)
                if state["step"] >= workers:
                    state["momentum_buffer"].mul_(momentum).add_(state["gathered"], alpha=1 / workers)
                    p.add_(state["momentum_buffer"], alpha=-lr * momentum)
                    state["gathered"].zero_()
                    state["step"].zero_()
        return loss

    def _state(self, p: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[p]
        if not state:
            state["step"] = torch.tensor(0.0)  # arrivals since the last momentum
            state["gathered"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            state["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        return state
