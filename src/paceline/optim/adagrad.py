"""AdaGrad whose sum of squares decays, so that its steps need not end.

    G ← ρ · G + g ⊙ g;   w ← w − η / (1 + (t − 1) · lr_decay) · g / (√G + ε)

With ρ = 1 it is torch's Adagrad, bit for bit. Below 1 the sum forgets: for steady gradients it tends to g² / (1 − ρ)
instead of growing for ever. RMSprop is the same but for a factor, its mean being (1 − ρ) times this sum.

Reference: Duchi, Hazan and Singer, Adaptive subgradient methods, 2011.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch.optim.adagrad import adagrad

from paceline.core.errors import ConfigError


class Adagrad(torch.optim.Optimizer):
    """w − lr · g / (√G + eps), with G = decay · G + g². Options and state are named as in torch's Adagrad.

    Args:
        params: parameters, or groups of them.
        lr: η.
        decay: ρ, above 0 and at most 1; what of the sum is kept from one step to the next.
        lr_decay: how the rate falls with the steps.
        weight_decay: of the L2 kind, added to the gradient.
        initial_accumulator_value: of G.
        eps: ε.
        foreach: work on all tensors at once; None: where torch thinks that it is faster.
        maximize: go uphill.

    >>> w = torch.nn.Parameter(torch.tensor([1.0]))
    >>> optimizer = Adagrad([w], lr=0.5, decay=0.75)
    >>> for _ in range(2):
    ...     w.grad = torch.tensor([2.0])
    ...     optimizer.step()
    >>> optimizer.state[w]["sum"]
    tensor([7.])
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        decay: float = 1.0,
        *,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        maximize: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "decay": decay,
            "lr_decay": lr_decay,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "eps": eps,
            "foreach": foreach,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        options = self.defaults | param_group
        if not 0 < options["decay"] <= 1:
            raise ConfigError(f"Adagrad(decay={options['decay']!r}): a number above 0 and at most 1 is needed")
        for name in ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps"):
            if not options[name] >= 0:
                raise ConfigError(f"Adagrad({name}={options[name]!r}): must not be negative")
        super().add_param_group(param_group)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step; `closure` computes the loss and the gradients anew."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            states = [self._state(p, group["initial_accumulator_value"]) for p in params]
            sums = [state["sum"] for state in states]
            if group["decay"] != 1:
                torch._foreach_mul_(sums, group["decay"])
            adagrad(
                params,
                [p.grad for p in params],
                sums,
                [state["step"] for state in states],
                has_sparse_grad=any(p.grad.is_sparse for p in params),
                has_complex=any(p.is_complex() for p in params),
                foreach=group["foreach"],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                lr_decay=group["lr_decay"],
                eps=group["eps"],
                maximize=group["maximize"],
            )
        return loss

    def _state(self, p: torch.Tensor, start: float) -> dict[str, Any]:
        state: dict[str, Any] = self.state[p]
        if not state:
            state["step"] = torch.tensor(0.0)
            value = complex(start, start) if p.is_complex() else start
            state["sum"] = torch.full_like(p, value, memory_format=torch.preserve_format)
        return state
