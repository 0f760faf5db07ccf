"""The outer optimizer: any of torch.optim, over copies of the weights as of the last round.

Its gradient is the members' average of (last agreed weights − weights now). Plain SGD at rate 1 makes the average of
the members' weights of it; Nesterov's momentum on top is DiLoCo.

>>> make_outer("nesterov").words, make_outer("none").plain
('nesterov(lr=0.7, momentum=0.9)', True)
>>> make_outer("adam(lr=0.1)").make([torch.nn.Parameter(torch.zeros(1))]).defaults["lr"]
0.1
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from paceline.core.errors import ConfigError
from paceline.core.words import build

Make = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Outer:
    """How an outer optimizer is made, and what it is called."""

    words: str
    make: Make
    plain: bool = False  # the average itself


def _nesterov(lr: float = 0.7, momentum: float = 0.9) -> Outer:
    make = functools.partial(torch.optim.SGD, lr=lr, momentum=momentum, nesterov=True)
    return Outer(f"nesterov(lr={lr}, momentum={momentum})", make)


def _none() -> Outer:
    return Outer("none", functools.partial(torch.optim.SGD, lr=1.0), plain=True)


def _by_name(kind: type[torch.optim.Optimizer]) -> Callable[..., Outer]:
    """The same options by the same names, but for the parameters."""
    name, signature = kind.__name__.lower(), inspect.signature(kind)
    options = [p for key, p in signature.parameters.items() if key != "params"]

    def make(*given: Any, **named: Any) -> Outer:
        bound = signature.replace(parameters=options).bind(*given, **named).arguments
        told = ", ".join(f"{key}={value!r}" for key, value in bound.items())
        return Outer(f"{name}({told})" if told else name, functools.partial(kind, **bound))

    make.__signature__ = signature.replace(parameters=options)  # type: ignore[attr-defined]
    return make


_UNFIT = ("Optimizer", "LBFGS", "SparseAdam")  # a closure, or sparse gradients, which differences are not
_KNOWN: dict[str, Callable[..., Outer]] = {
    **{
        kind.__name__.lower(): _by_name(kind)
        for kind in vars(torch.optim).values()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind.__name__ not in _UNFIT
    },
    "nesterov": _nesterov,
    "none": _none,
}


def make_outer(words: Outer | Make | str | None) -> Outer:
    """The outer optimizer that a user wrote: words, or a function of parameters such as
    `lambda anchors: torch.optim.SGD(anchors, lr=0.5)`."""
    if words is None:
        words = "none"
    if isinstance(words, Outer):
        return words
    if isinstance(words, str):
        outer = build(words, _KNOWN, "outer optimizer")
    elif callable(words):
        outer = Outer(getattr(words, "__name__", type(words).__name__), words)
    else:
        raise ConfigError(f'outer={words!r}: give words such as "nesterov(lr=0.7)", or a function of parameters')
    try:
        made = outer.make([torch.nn.Parameter(torch.zeros(1, 1))])  # Muon takes matrices only
    except TypeError:
        raise ConfigError(f"outer={outer.words}: an option of it is not of the kind that torch.optim wants") from None
    except ValueError as error:
        raise ConfigError(f"outer={outer.words}: {error}") from None
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigError(f"outer={outer.words}: it makes a {type(made).__name__}, not a torch.optim.Optimizer")
    return outer
