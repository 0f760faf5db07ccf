"""How much an optimizer keeps of a parameter, found by one step of it on a small parameter of as many dimensions."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

from paceline import optim
from paceline.core.errors import ConfigError
from paceline.core.words import build

Optimizer = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]

_SIDES = (5, 7, 11, 13, 17)  # by which a dimension is known again


def make_optimizer(words: str) -> Optimizer:
    """What makes the optimizer that these words name.

    >>> bytes_of(make_optimizer("adamw"), (100,)), bytes_of(make_optimizer("sgd(momentum=0.9)"), (100, 2))
    (804, 800)
    """

    def called(kind: type[torch.optim.Optimizer]) -> Callable[..., Optimizer]:
        def bind(*given: Any, **named: Any) -> Optimizer:
            def make(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
                return kind(parameters, *given, **named)

            return make

        signature = inspect.signature(kind)
        options = list(signature.parameters.values())[1:]  # without the parameters
        bind.__signature__ = signature.replace(parameters=options)  # type: ignore[attr-defined]
        return bind

    known = {name.lower(): called(kind) for name, kind in vars(torch.optim).items() if _is_kind(kind)}
    known["adagrad"] = called(optim.Adagrad)
    known["momentum"] = functools.partial(known["sgd"], momentum=0.9)
    made = build(words, known, "optimizer")
    try:
        made([torch.zeros(2, 2)])
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer {words!r}: {error}") from None
    return made


def bytes_of(make: Optimizer, shape: tuple[int, ...]) -> int:
    """What it keeps of a parameter of this shape."""
    if len(shape) > len(_SIDES):
        shape = (*shape[: len(_SIDES) - 1], torch.Size(shape[len(_SIDES) - 1 :]).numel())
    lengths = dict(zip(_SIDES, shape))
    total = 0
    for sides, itemsize in _kept(make, len(shape)):
        total += itemsize * torch.Size([lengths.get(side, side) for side in sides]).numel()
    return total


@functools.lru_cache(maxsize=64)
def _kept(make: Optimizer, dimensions: int) -> tuple[tuple[tuple[int, ...], int], ...]:
    """The shapes of the tensors that it keeps, and the sizes of their elements."""
    p = torch.nn.Parameter(torch.zeros(_SIDES[:dimensions]))
    p.grad = torch.ones_like(p)
    optimizer = make([p])
    optimizer.step()
    return tuple((tuple(t.shape), t.element_size()) for t in optimizer.state[p].values() if isinstance(t, torch.Tensor))


def _is_kind(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
