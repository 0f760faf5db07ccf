"""What fills the tensors of a model that a function makes: only `reset_parameters` may, since it alone runs again.

The model is made without memory, so what its constructor does to weights afterwards (`self.apply(init)`) changes
nothing, and would be lost without a word; so would a buffer that `reset_parameters` does not fill. Here writes are
written down while the model is made, and compared with those of each module's `reset_parameters`.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.core.errors import ConfigError

Write = tuple[str, str]  # what was called, with which numbers


class Writes:
    """Of all tensors without memory, while this is entered."""

    def __init__(self) -> None:
        self._of: dict[int, list[Write]] = defaultdict(list)  # by storage
        self._alive: list[Any] = []  # so that no other storage gets the place of one that was written
        self._modes = _Calls(self), _Skipped(self)

    def __enter__(self) -> Writes:
        for mode in self._modes:
            mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *how: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*how)  # type: ignore[no-untyped-call]

    def add(self, tensor: Tensor, name: str, numbers: Any) -> None:
        storage = tensor.untyped_storage()
        self._alive.append(storage)
        self._of[storage._cdata].append((name, repr(numbers)))

    def of(self, tensor: Tensor) -> list[Write]:
        return list(self._of.get(tensor.untyped_storage()._cdata, ()))


class _Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, writes: Writes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._writes = writes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        numbers = [arg for arg in (*args, *given.values()) if isinstance(arg, int | float | bool)]
        for place, told in enumerate(func._schema.arguments):
            if told.alias_info is not None and told.alias_info.is_write:
                tensor = args[place] if place < len(args) else given.get(told.name)
                if isinstance(tensor, Tensor) and tensor.is_meta:
                    self._writes.add(tensor, func._schema.name, numbers)
        return func(*args, **given)


class _Skipped(TorchFunctionMode):
    """trunc_normal_, orthogonal_, dirac_ and sparse_ ask whether a tensor has memory, and write nothing if not."""

    def __init__(self, writes: Writes) -> None:
        super().__init__()
        self._writes = writes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__self__", None) is Tensor.is_meta:
            asks = sys._getframe(1)
            if asks.f_globals.get("__name__") == "torch.nn.init":
                numbers = {k: v for k, v in asks.f_locals.items() if isinstance(v, int | float)}
                self._writes.add(args[0], asks.f_code.co_name, numbers)
        return func(*args, **(kwargs or {}))


def check_filled(model: nn.Module, writes: Writes) -> None:
    """Refuse a model whose tensors are filled by anything else, in the constructor or not at all."""
    last: dict[int, nn.Module] = {}  # the module that fills a tensor in the end: of several with one tensor, the last
    for module in model.modules():
        last |= dict.fromkeys(map(id, _own(module).values()), module)
    for path, module in model.named_modules():
        own = _own(module)
        made = {name: writes.of(tensor) for name, tensor in own.items()}
        filled = _filled(module, own)
        for name, tensor in own.items():
            if last[id(tensor)] is not module or not tensor.numel():
                continue
            full = f"{path}.{name}" if path else name
            which = f"run.model(function): {full!r} of {type(module).__name__}"
            again = filled[name]
            if again is not None and not again:
                raise ConfigError(
                    f"{which} is not filled by its reset_parameters(), which alone makes what a function's model "
                    "holds: fill it there, or give run.model the model itself"
                )
            theirs = type(module).__module__.startswith("torch.")  # which have called reset_parameters
            if again and (made[name] or theirs) and made[name][-len(again) :] != again:
                raise ConfigError(
                    f"{which} is filled by other code than its reset_parameters(), which alone makes what a function's "
                    "model holds: that would be lost. Do it in reset_parameters() of a class of your own, or give "
                    "run.model the model itself"
                )


def _own(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}


def _filled(module: nn.Module, own: dict[str, Tensor]) -> dict[str, list[Write] | None]:
    """What `reset_parameters` writes to each of a module's tensors; None where it puts another one there."""
    if not own:
        return {}
    kept = module._parameters.copy(), module._buffers.copy()
    with torch.device("meta"), Writes() as writes:
        before = {name: tensor.untyped_storage()._cdata for name, tensor in own.items()}
        module.reset_parameters()  # type: ignore[operator]
    now = _own(module)
    module._parameters.update(kept[0])
    module._buffers.update(kept[1])
    return {
        name: writes.of(tensor) if now[name] is tensor and tensor.untyped_storage()._cdata == before[name] else None
        for name, tensor in own.items()
    }
