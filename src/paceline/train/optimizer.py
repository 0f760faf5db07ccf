"""The optimizer that `run.optimizer` returns: the user's own object, whose class now has the run in it.

The class is a subclass of the optimizer's own, so learning-rate schedulers, `GradScaler` and `isinstance` go on as
before; the object is the same, so nothing is copied. `step()` first asks the strategy, then does what it always did.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from paceline.core.errors import ConfigError
from paceline.train.rates import scaled


class StepObserver(Protocol):
    """Who wants to know of steps: the run."""

    def own_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer's own step is to run, or has been taken elsewhere."""

    def rate(self) -> float:
        """How many times the learning rate the step is to have."""

    def full(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        """Within it, parameters are as the optimizer's own step and state are to see them."""

    def after_step(self, optimizer: torch.optim.Optimizer) -> None: ...
    def cleared(self, optimizer: torch.optim.Optimizer) -> None: ...
    def group_added(self, optimizer: torch.optim.Optimizer) -> None: ...


_CLASSES: dict[type, type] = {}


def adopt(optimizer: torch.optim.Optimizer, observer: StepObserver) -> torch.optim.Optimizer:
    """Let the run take part in this optimizer's steps; returns the same object."""
    kind = type(optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"run.optimizer wants a torch.optim.Optimizer, got {kind.__name__}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            "LBFGS evaluates the loss several times within one step(closure), each time with its own backward pass, "
            "and decides from local values how often: members would not stay together. Use a first-order optimizer"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ConfigError("SparseAdam wants sparse gradients, but members exchange dense ones. Use torch.optim.Adam")
    if hasattr(optimizer, "_paceline"):
        raise ConfigError("this optimizer belongs to a run already: call run.optimizer once per optimizer")
    patched = vars(optimizer).pop("step", None)
    if patched is not None and not hasattr(patched, "_wrapped_by_lr_sched"):
        raise ConfigError("something else has replaced this optimizer's step(): call run.optimizer before it does")
    optimizer.__class__ = _CLASSES.setdefault(kind, _subclass(kind))
    optimizer._paceline = observer  # type: ignore[attr-defined]
    if patched is not None:
        _wrap_for_scheduler(optimizer)
    return optimizer


def _wrap_for_scheduler(optimizer: torch.optim.Optimizer) -> None:
    """A learning-rate scheduler made earlier wraps the old step and looks for its mark: leave both in place."""
    held = weakref.ref(optimizer)

    def step(*args: Any, **kwargs: Any) -> Any:
        mine = held()
        assert mine is not None
        mine._opt_called = True  # type: ignore[attr-defined]
        return type(mine).step(mine, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step  # type: ignore[method-assign]


def restored(optimizer: torch.optim.Optimizer) -> list[set[int]]:
    """Groups that came from a checkpoint, as ids of their parameters, until the script adds them too."""
    return vars(optimizer).setdefault("_paceline_restored", [])  # type: ignore[no-any-return]


def _listed(parameters: Any) -> list[Any]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def _parameter(given: Any) -> Any:
    return given[1] if isinstance(given, tuple) else given  # with its name


def _subclass(kind: type) -> type:
    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        if closure is not None:
            raise ConfigError(
                "step(closure) is not supported: the closure would run backward inside step. "
                "Call loss.backward() first, then optimizer.step()"
            )
        observer: StepObserver = self._paceline
        if observer.own_step(self):
            with scaled(self, observer.rate()), observer.full(self):
                kind.step(self)  # type: ignore[attr-defined]
        observer.after_step(self)

    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        with self._paceline.full(self):  # state takes the dtype of its parameter
            kind.load_state_dict(self, state_dict)  # type: ignore[attr-defined]

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        self._paceline.cleared(self)
        kind.zero_grad(self, set_to_none)  # type: ignore[attr-defined]

    def add_param_group(self: Any, param_group: dict[str, Any]) -> None:
        if hasattr(self, "_paceline") and restored(self):
            param_group = {**param_group, "params": _listed(param_group["params"])}
            if (group := {id(_parameter(p)) for p in param_group["params"]}) in restored(self):
                restored(self).remove(group)
                return  # the checkpoint brought it already
        kind.add_param_group(self, param_group)  # type: ignore[attr-defined]
        if hasattr(self, "_paceline"):
            self._paceline.group_added(self)

    def reduce(self: Any) -> Any:
        raise TypeError("an optimizer that belongs to a run cannot be pickled; save its state_dict()")

    members = {
        "step": step,
        "zero_grad": zero_grad,
        "load_state_dict": load_state_dict,
        "add_param_group": add_param_group,
        "__reduce_ex__": lambda self, protocol: reduce(self),
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
    }
    return type(kind.__name__, (kind,), members)
