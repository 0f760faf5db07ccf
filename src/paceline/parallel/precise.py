"""A run's precision at work: what it makes of models and optimizers, and which steps are skipped.

Between the words (`precision`) and the training loop, which asks before each step. Which members must agree on a
skipped step is for the strategy to know, and given as `agree`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from paceline.core.errors import ConfigError
from paceline.parallel import fp8
from paceline.parallel.autocast import Cast, cast
from paceline.parallel.masters import Masters
from paceline.parallel.nested import each
from paceline.parallel.precision import Precision
from paceline.parallel.scaling import Scaling, finite, full

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
_SCALER = "torch.amp.grad_scaler"


class Precise:
    """The precision of one member's models."""

    def __init__(self, precision: Precision, device: torch.device) -> None:
        self.precision = precision
        self._device = device
        self._masters = Masters() if precision.weights else None
        self._scalings: dict[int, tuple[torch.nn.Module, Scaling]] = {}  # by id of the model
        self._models: dict[int, torch.nn.Module] = {}  # by id of the optimizer
        self._spoilt: dict[int, bool] = {}  # by id of the optimizer, in its step
        if precision.kind == "fp8":
            fp8.check_device(device)

    def check(self, model: torch.nn.Module) -> None:
        """Refuse a model before the run takes it."""
        if self.precision.scales and any(p.dtype == torch.float16 for p in model.parameters()):
            raise ConfigError(
                "precision fp16: the model has parameters in float16, whose small updates would be lost. Leave them in "
                "float32 (no .half()): forward passes cast them"
            )

    def adopt(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Make the model compute in this precision. All members have the same weights by now."""
        if self.precision.kind == "fp32":
            return
        model = getattr(model, "_orig_mod", model)  # of torch.compile's, the module inside
        scaling = None
        if self.precision.scales:
            fresh = (model, Scaling(self.precision.scale, self.precision.every))
            scaling = self._scalings.setdefault(id(model), fresh)[1]
        if self.precision.kind == "fp8" and not fp8.convert(model):
            raise ConfigError(
                f"precision fp8: the model has no nn.Linear whose dimensions are multiples of {fp8.MULTIPLE}, so "
                "nothing of it would be in fp8. Use bf16"
            )
        self._models[id(optimizer)] = model
        if self._masters:
            self._masters.adopt(model, optimizer)
        cast(model, Cast(self._device.type, _DTYPES[self.precision.kind], scaling, self._masters))

    def extend(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer has more parameters."""
        if self._masters and (model := self._models.get(id(optimizer))):
            self._masters.adopt(model, optimizer)

    def autocast(self) -> AbstractContextManager[Any]:
        """For computing outside of the models' forward passes."""
        if self.precision.kind == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, dtype=_DTYPES[self.precision.kind])

    def in_full(self, loss: Callable[[Any, Any], torch.Tensor]) -> Callable[[Any, Any], torch.Tensor]:
        """A loss that gets what a model returns in float32, as from a call of the model."""
        if self.precision.kind == "fp32":
            return loss
        return lambda out, target: loss(each(out, full), target)

    def full(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        """For the optimizer's own step: parameters as the optimizer is to see them."""
        return self._masters.full(optimizer) if self._masters else contextlib.nullcontext()

    # ---- steps that are skipped

    def scaling(self, optimizer: torch.optim.Optimizer) -> Scaling | None:
        model = self._models.get(id(optimizer))
        return self._scalings[id(model)][1] if model is not None and id(model) in self._scalings else None

    def spoilt(self, optimizer: torch.optim.Optimizer, agree: Callable[[bool], bool], *, clear: bool) -> bool:
        """Whether this step is to be skipped: some gradient is not finite.

        `agree` makes one answer of the members' own; `clear`: gradients are about to be pushed, and none shall be.
        """
        if self.scaling(optimizer) is None:
            return False
        _refuse_scaler()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        spoilt = agree(not finite(p.grad for p in parameters))
        for p in parameters if spoilt and clear else ():
            p.grad = None
        self._spoilt[id(optimizer)] = spoilt
        return spoilt

    def stepped(self, optimizer: torch.optim.Optimizer) -> Scaling | None:
        """The step counts; its scaling, where it was skipped."""
        scaling, spoilt = self.scaling(optimizer), self._spoilt.pop(id(optimizer), None)
        if scaling is None or spoilt is None:
            return None
        scaling.judge(not spoilt)
        return scaling if spoilt else None

    def readings(self) -> dict[str, Any]:
        """For the summary."""
        if self.precision.kind == "fp32":
            return {}
        scalings = [scaling for _, scaling in self._scalings.values()]
        told: dict[str, Any] = {"precision": self.precision.words}
        if scalings:
            told |= {"loss_scale": min(s.scale for s in scalings), "skipped_steps": sum(s.skipped for s in scalings)}
        return told


def _refuse_scaler() -> None:
    """Two scales are one too many."""
    for frame in _callers(12):
        if frame.f_globals.get("__name__") == _SCALER:
            scaler = frame.f_locals.get("self")
            if scaler is not None and scaler.is_enabled():
                raise ConfigError(
                    "precision fp16 scales losses itself, and the script's torch.amp.GradScaler would scale them once "
                    "more. Take the scaler out (loss.backward(); optimizer.step()), or leave precision at fp32"
                )
            return


def _callers(most: int) -> Iterator[Any]:
    frame: Any = sys._getframe(1)
    while frame is not None and most:
        yield frame
        frame, most = frame.f_back, most - 1
