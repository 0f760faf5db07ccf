"""What a command names as FILE:FUNCTION or package.module:FUNCTION: what makes a model, and what its batches are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn

from paceline.core import loading
from paceline.core.errors import ConfigError, nearest
from paceline.parallel.footprint import arguments, said

_USUAL = ("make_model", "build_model", "create_model", "get_model", "model")
_INPUTS = "example_inputs"
_TYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "complex64")


@dataclass(frozen=True)
class Target:
    """What makes a model."""

    name: str
    script: str  # as `paceline run` takes it
    module: ModuleType
    make: Callable[[], nn.Module]

    def inputs(self, shapes: Sequence[tuple[list[int], str]] | None) -> tuple[Callable[[], Any], str]:
        """What makes a batch, and how it is told."""
        if shapes:
            given = [(sizes, _dtype(kind)) for sizes, kind in shapes]
            words = ", ".join("x".join(map(str, s)) + f":{str(d)[6:]}" * (d != torch.float32) for s, d in given)
            return lambda: tuple(torch.zeros(sizes, dtype=dtype) for sizes, dtype in given), words
        found = getattr(self.module, _INPUTS, None)
        if not callable(found):
            raise ConfigError(
                f"what does a batch look like? Say it once for each argument of the model, as in --batch 8x1024:int64, "
                f"or write a function {_INPUTS}() into {self.script} that returns the arguments"
            )
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode():
            words = said(arguments(found()))
        return found, words


def find(text: str) -> Target:
    """The function that is named; a file with one that makes models need not name it."""
    module, where, name = loading.named(text)
    make: Callable[[], nn.Module] = loading.function(module, name, where) if name else _only(module, where)
    script = where if where.endswith(".py") else f"-m {where}"
    return Target(f"{where}:{make.__name__}", script, module, make)


def _only(module: ModuleType, where: str) -> Callable[[], nn.Module]:
    for name in _USUAL:
        if callable(getattr(module, name, None)) and not loading.needed(getattr(module, name)):
            return loading.function(module, name, where)
    own = {n: v for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__}
    kinds = [n for n, v in own.items() if isinstance(v, type) and issubclass(v, nn.Module) and not loading.needed(v)]
    if len(kinds) == 1:
        return loading.function(module, kinds[0], where)
    which = f"one of {', '.join(kinds)}" if kinds else "a function that makes it"
    raise ConfigError(f"{where}: which model? Name {which}, as in {where}:{kinds[0] if kinds else 'make_model'}")


def _dtype(name: str) -> torch.dtype:
    if name not in _TYPES:
        raise ConfigError(f"--batch: {name!r} is not a type of elements: {nearest(name, _TYPES)}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype
