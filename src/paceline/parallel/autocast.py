"""Forward passes of a model in another precision, without a wrapper around it.

The model's class becomes a subclass of its own, as `run.optimizer` does with optimizers: `forward` runs under
torch.autocast, and what it returns in a half precision comes out as float32, in which losses are made. Keys of
state_dict, hooks, isinstance and copies of the model (averages of weights) stay as they were; torch.compile sees a
forward like any other. With fp16 the gradients within are scaled: see `scaling`; with parameters in bf16 its state_dict
has their masters: see `masters`.
"""

from __future__ import annotations

import copy
import copyreg
from typing import Any

import torch

from paceline.core.errors import ConfigError
from paceline.parallel.masters import Masters
from paceline.parallel.nested import each
from paceline.parallel.scaling import Scaling, full, under_way

_CLASSES: dict[type, type] = {}


class Cast:
    """What the forward passes of a model run under."""

    def __init__(
        self,
        device_type: str,
        dtype: torch.dtype,
        scaling: Scaling | None = None,
        masters: Masters | None = None,
    ) -> None:
        self.device_type = device_type
        self.dtype = dtype
        self.scaling = scaling
        self.masters = masters

    def __deepcopy__(self, memo: dict[int, Any]) -> Cast:
        return self  # a copy of the model computes alike

    def context(self) -> torch.autocast:
        return torch.autocast(self.device_type, dtype=self.dtype)

    def forward(self, model: torch.nn.Module, kind: type, args: Any, kwargs: Any) -> Any:
        scaling = self.scaling if torch.is_grad_enabled() else None
        outer = under_way() if scaling else None
        if scaling and outer is not scaling:
            scaling.outer = outer
        if scaling is None or outer:
            with self.context():
                out = kind.forward(model, *args, **kwargs)  # type: ignore[attr-defined]
            return each(out, full)
        return self._scaled(scaling, model, kind, args, kwargs)

    # The swapped parameters are for the model's own frames: those are compiled, this one is not.
    @torch.compiler.disable(recursive=False)  # type: ignore[no-untyped-call, untyped-decorator]
    def _scaled(self, scaling: Scaling, model: torch.nn.Module, kind: type, args: Any, kwargs: Any) -> Any:
        with scaling.within(model, args, kwargs) as within:
            with self.context():
                out = kind.forward(model, *within.args, **within.kwargs)  # type: ignore[attr-defined]
            return within.leave(out)


def cast(model: torch.nn.Module, how: Cast) -> None:
    """Let the model's forward passes run as `how` says; again with another one: as that says."""
    kind = type(model)
    if isinstance(model, torch.jit.ScriptModule) or "forward" in vars(model):
        what = "a scripted module" if isinstance(model, torch.jit.ScriptModule) else "one whose forward was replaced"
        raise ConfigError(
            f"precision: the model is {what}, which cannot be made to run under autocast. Give run.optimizer the plain "
            "module, or leave precision out and use torch.autocast in the script"
        )
    if "_paceline_cast" not in vars(model):
        model.__class__ = _CLASSES.setdefault(kind, _subclass(kind))
    vars(model)["_paceline_cast"] = how


def _subclass(kind: Any) -> type:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._paceline_cast.forward(self, kind, args, kwargs)

    def state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = kind.state_dict(self, *args, **kwargs)
        if masters := self._paceline_cast.masters:
            masters.fill(self, state, kwargs.get("prefix", args[1] if len(args) > 1 else ""))
        return state

    def _load_from_state_dict(self: Any, state: dict[str, Any], prefix: str, *args: Any) -> None:
        if masters := self._paceline_cast.masters:
            masters.take(self, state, prefix)
        kind._load_from_state_dict(self, state, prefix, *args)

    def reduce(self: Any, protocol: Any) -> Any:
        """Pickled, it is an object of its own class."""
        state = kind.__reduce_ex__(self, protocol)[2]
        plain = {key: value for key, value in state.items() if key != "_paceline_cast"}
        return copyreg._reconstructor, (kind, object, None), plain  # type: ignore[attr-defined]

    def deepcopy(self: Any, memo: dict[int, Any]) -> Any:
        """A copy computes alike."""
        make, given, state, *_ = kind.__reduce_ex__(self, 4)
        memo[id(self)] = twin = make(*given)
        state = copy.deepcopy(state, memo)
        if hasattr(twin, "__setstate__"):
            twin.__setstate__(state)
        else:
            twin.__dict__.update(state)
        return twin

    members = {
        "forward": forward,
        "state_dict": state_dict,
        "_load_from_state_dict": _load_from_state_dict,
        "__reduce_ex__": reduce,
        "__deepcopy__": kind.__deepcopy__ if hasattr(kind, "__deepcopy__") else deepcopy,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    return type(kind.__name__, (kind,), members)
