"""Parameters in bf16 with float32 masters: half the memory and traffic in passes, no update too small to count.

    between steps  p is bf16: forward, backward, buckets and what others read
    within a step  p is its master, in float32: the optimizer's own step, with p.grad in float32; then p is rounded

It is the same parameter object all the time, so groups, options, state and schedulers go on as before, and the
optimizer's state is float32. `model.state_dict()` gives the masters, so a checkpoint is that of a float32 run, and
either can be resumed as the other. What a script does to parameters between two steps counts: where p is not what its
master rounds to, the master becomes p.

Parameters of normalisation layers stay float32: they are few, and kernels want them so.

Reference: Micikevicius et al., Mixed precision training, 2018.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

_NORMS = (
    torch.nn.modules.batchnorm._NormBase,
    torch.nn.LayerNorm,
    torch.nn.GroupNorm,
    torch.nn.RMSNorm,
)


class Masters:
    """The masters of a run's parameters."""

    def __init__(self) -> None:
        self._held: dict[int, _Held] = {}  # by id of the parameter

    def adopt(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Round the model's parameters to bf16; those that the optimizer steps have masters from now on."""
        kept = {id(p) for m in model.modules() if isinstance(m, _NORMS) for p in m.parameters(recurse=False)}
        own = {id(p) for p in model.parameters()}
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for p in model.parameters():
            if id(p) in kept or p.dtype not in (torch.float32, torch.bfloat16):
                continue
            if id(p) in stepped and id(p) in own and id(p) not in self._held:
                self._held[id(p)] = _Held(p, p.detach().float())
            if p.dtype == torch.float32:
                grad, p.grad = p.grad, None
                p.data = p.detach().bfloat16()
                p.grad = None if grad is None else grad.bfloat16()

    @contextlib.contextmanager
    def full(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Within it, the optimizer's parameters are their masters."""
        held = [h for group in optimizer.param_groups for p in group["params"] if (h := self.of(p))]
        try:
            for each in held:
                each.show()
            yield
        finally:
            for each in held:
                each.round()

    def of(self, p: torch.Tensor) -> _Held | None:
        held = self._held.get(id(p))
        return held if held is not None and held.p is p else None

    def fill(self, model: torch.nn.Module, state: dict[str, Any], prefix: str) -> None:
        """Put masters into a state_dict of the model."""
        for name, p in model.named_parameters(remove_duplicate=False):
            if (held := self.of(p)) and prefix + name in state:
                held.refresh()
                state[prefix + name] = held.master

    def take(self, model: torch.nn.Module, state: dict[str, Any], prefix: str) -> None:
        """A state_dict is about to be loaded into the model: what it has is exact for masters too."""
        for name, p in model.named_parameters(remove_duplicate=False):
            value = state.get(prefix + name)
            if (held := self.of(p)) and isinstance(value, torch.Tensor) and value.shape == p.shape:
                held.master.copy_(value)


class _Held:
    """A parameter and its master."""

    def __init__(self, p: torch.nn.Parameter, master: torch.Tensor) -> None:
        self.p = p
        self.master = master
        self._low: torch.Tensor | None = None  # where p lies, while p is its master
        self._grad: torch.Tensor | None = None

    def refresh(self) -> None:
        """What p was changed to since the last step counts."""
        if self._low is not None:
            return
        low = self.p.detach()
        rounded = self.master.to(low.dtype)
        if low.device.type == "cpu" and torch.equal(low, rounded):
            return  # a GPU would have to be waited for
        self.master.copy_(torch.where(low == rounded, self.master, low.to(self.master.dtype)))

    def show(self) -> None:
        self.refresh()
        p = self.p
        self._grad, p.grad = p.grad, None
        self._low, p.data = p.detach(), self.master
        p.grad = None if self._grad is None else self._grad.to(self.master.dtype)

    def round(self) -> None:
        if self._low is None:
            return
        p = self.p
        low, self._low = self._low, None
        p.grad = None
        p.data = low
        with torch.no_grad():
            p.copy_(self.master)
        p.grad, self._grad = self._grad, None
