"""Cut a model at a named module: as two modules where it is a chain, or by stopping its forward pass there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paceline.core.errors import ConfigError
from paceline.layers.transfer.names import near


def cut(model: nn.Module, name: str) -> tuple[nn.Sequential, nn.Sequential]:
    """The model up to and with the named module, and the rest; both have the model's own layers.

    >>> inner = nn.Sequential(nn.ReLU(), nn.Linear(3, 3))
    >>> bottom, top = cut(nn.Sequential(nn.Linear(2, 3), inner, nn.Linear(3, 1)), "1.0")
    >>> len(bottom), len(top), top(bottom(torch.ones(1, 2))).shape
    (2, 2, torch.Size([1, 1]))

    Raises:
        ConfigError: there is no such module, or it lies in something other than an nn.Sequential, whose way of calling
            its parts is its own; `features` works there too.
    """
    named(model, name)
    bottom: list[nn.Module] = []
    top: list[nn.Module] = []
    here = model
    for part in name.split("."):
        if type(here) is not nn.Sequential:
            kind = type(here).__name__
            raise ConfigError(
                f"{name!r} lies in a {kind}, whose forward is its own: only nn.Sequential can be cut in two"
            )
        children = list(here.named_children())
        at = [n for n, _ in children].index(part)
        bottom += [child for _, child in children[:at]]
        top[:0] = [child for _, child in children[at + 1 :]]
        here = children[at][1]
    if not top:
        raise ConfigError(f"{name!r} is the end of the model, so nothing would be left above it")
    return nn.Sequential(*bottom, here), nn.Sequential(*top)


def named(model: nn.Module, name: str) -> nn.Module:
    """The module of this name."""
    modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
    if not name or name not in modules:
        raise ConfigError(f"there is no module {name!r} in the model: {near(name, [n for n in modules if n])}")
    return modules[name]


class _Enough(BaseException):
    """The forward pass has come to where it was to end. Not an Exception, which a model might catch."""


def outputs(model: nn.Module, names: Mapping[str, nn.Module], x: Any) -> dict[str, Tensor]:
    """What these modules return for one batch; the pass ends when all have. One that runs more than once counts by its
    first time."""
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            if name not in found:
                value = first_of(out, name)
                # A module behind it may change it in place.
                found[name] = value.clone() if len(found) + 1 < len(names) else value
            if len(found) == len(names):
                raise _Enough

        return hook

    hooks = [module.register_forward_hook(keep(name)) for name, module in names.items()]
    _watched(model, x, hooks)
    if left := [name for name in names if name not in found]:
        raise ConfigError(f"{left[0]!r} took no part in the model's forward pass")
    return found


def _watched(model: nn.Module, x: Any, hooks: Iterable[RemovableHandle]) -> None:
    """Compute until these have seen enough, and take them away."""
    try:
        call(model, x)
    except _Enough:
        pass
    finally:
        for hook in hooks:
            hook.remove()


def handed_on(model: nn.Module, row: Mapping[str, nn.Module], x: Any) -> dict[str, Tensor]:
    """What each module of the row but the last gives the next one, for one batch: behind an activation, not before.

    Where the next one takes no such input (numbers of words, what the model itself was given, other rows), or no part,
    it is what the module returns.
    """
    names = list(row)
    out: dict[str, Tensor] = {}
    given: dict[str, Tensor] = {}
    own = list(x.values()) if isinstance(x, Mapping) else [x]

    def left(name: str, module: nn.Module, args: Any, value: Any) -> None:
        if name not in out:
            out[name] = first_of(value, name).clone()  # a module behind it may change it in place

    def came(name: str, module: nn.Module, args: Any) -> None:
        value = args[0] if args else None
        fresh = name in out and name not in given and not any(value is each for each in own)
        if fresh and isinstance(value, Tensor) and value.is_floating_point() and value.shape[:1] == (rows_of(x),):
            given[name] = value.clone()
        if name == names[-2] and len(out) == len(names) - 1:
            raise _Enough

    hooks = [row[name].register_forward_hook(partial(left, name)) for name in names[:-1]]
    hooks += [row[after].register_forward_pre_hook(partial(came, name)) for name, after in pairwise(names)]
    _watched(model, x, hooks)
    if silent := [name for name in names[:-1] if name not in out]:
        raise ConfigError(f"{silent[0]!r} took no part in the model's forward pass")
    return out | given


def first_of(out: Any, name: str) -> Tensor:
    """The tensor that a module returns, or the first one of several."""
    told = type(out).__name__
    if isinstance(out, Mapping):
        out = next(iter(out.values()), None)
    elif isinstance(out, tuple | list) and out:
        out = out[0]
    if not isinstance(out, Tensor) or out.dim() == 0:
        raise ConfigError(f"{name!r} returns a {told}; a tensor with a row for each sample is wanted")
    return out


def call(model: nn.Module, x: Any) -> Any:
    """The model on a batch of inputs, which may have names: `{"input_ids": ..., "attention_mask": ...}`."""
    return model(**x) if isinstance(x, Mapping) else model(x)


def placed(x: Any, device: torch.device) -> Any:
    """A batch of inputs on a device."""
    if isinstance(x, Mapping):
        return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in x.items()}
    if not isinstance(x, Tensor):
        raise ConfigError(f"the inputs of a batch are a {type(x).__name__}; a tensor is wanted, or a dict of them")
    return x.to(device)


def rows_of(x: Any) -> int:
    return len(next(iter(x.values()))) if isinstance(x, Mapping) else len(x)


@contextmanager
def watching(model: nn.Module) -> Iterator[set[str]]:
    """The names of modules that begin a forward pass within it."""
    seen: set[str] = set()
    hooks = [
        module.register_forward_pre_hook(lambda _, __, name=name: seen.add(name))
        for name, module in model.named_modules()
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def at_rest(model: nn.Module) -> Iterator[None]:
    """Eval mode and no gradients; afterwards every module is in the mode in which it was."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
