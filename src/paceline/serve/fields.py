"""What a model takes and gives, item by item: name, shape and type of each argument and of each output.

Known before the first request: from `--input`, or from `example_inputs()` beside the function that makes the model (the
same that `paceline plan` asks), and for the outputs from what the model makes of it. Requests are held against it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.core import loading
from paceline.core.errors import ConfigError, nearest

EXAMPLE = "example_inputs"
TYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")


@dataclass(frozen=True)
class Field:
    """One argument or output: of one item."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def kind(self) -> type:
        """What its elements are in JSON."""
        if self.dtype == torch.bool:
            return bool
        return float if self.dtype.is_floating_point else int

    @property
    def numpy(self) -> np.dtype[Any]:
        """Of the arrays that come in and go out; what numpy does not know travels as float32."""
        return np.dtype(np.float32) if self.dtype == torch.bfloat16 else torch.empty(0, dtype=self.dtype).numpy().dtype

    def __str__(self) -> str:
        return f"{self.name}: {'x'.join(map(str, self.shape)) or 'one'} of {str(self.dtype).removeprefix('torch.')}"


def inputs_of(
    model: nn.Module, module: ModuleType, given: Sequence[tuple[tuple[int, ...], str]], where: str
) -> list[Field]:
    """What the model's forward takes; ConfigError where neither `--input` nor example_inputs() says it."""
    if given:
        shapes = [(shape, dtype_of("--input", kind)) for shape, kind in given]
        return [Field(name, shape, dtype) for name, (shape, dtype) in zip(_names(model, len(shapes)), shapes)]
    found = getattr(module, EXAMPLE, None)
    if not callable(found):
        raise ConfigError(
            f"what does one item look like? Say it once for each argument of the model, as in --input 3x224x224, or "
            f"write a function {EXAMPLE}() into {where} that returns the arguments for a batch"
        )
    example = loading.result(module, EXAMPLE, where)
    tensors = example if isinstance(example, (tuple, list)) else (example,)
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor) or not tensor.dim():
            raise ConfigError(
                f"{where}: {EXAMPLE}() must return the model's arguments for a batch, tensors whose first dimension "
                f"counts items; it returned a {type(tensor).__name__}"
            )
        _refuse_unknown(f"{where}: {EXAMPLE}() returned", tensor.dtype)
    return [Field(n, tuple(t.shape[1:]), t.dtype) for n, t in zip(_names(model, len(tensors)), tensors)]


def outputs_of(result: Any, items: int) -> list[Field]:
    """What the model has made of a batch of so many items."""
    named = flat(result)
    for name, value in named.items():
        if not isinstance(value, torch.Tensor) or not value.dim() or value.shape[0] != items:
            what = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
            raise ConfigError(
                f"of {items} items the model makes {name!r} with {what}: it must return tensors, or a tuple or dict of "
                "them, whose first dimension counts items. Let the function that makes the model switch other outputs "
                "off (a cache of transformers: model.config.use_cache = False), or return a module around it whose "
                "forward gives the tensors that are wanted"
            )
        _refuse_unknown(f"the model makes {name!r}", value.dtype)
    return [Field(name, tuple(value.shape[1:]), value.dtype) for name, value in named.items()]


def _refuse_unknown(what: str, dtype: torch.dtype) -> None:
    """Here already: an answer that cannot be written would never be sent."""
    if (name := str(dtype).removeprefix("torch.")) not in TYPES:
        raise ConfigError(f"{what} with elements of {name}, which bodies do not hold: they hold {', '.join(TYPES)}")


def zeros(fields: Sequence[Field], items: int, device: torch.device) -> list[torch.Tensor]:
    """A batch of so many items to try a model with."""
    return [torch.zeros((items, *field.shape), dtype=field.dtype, device=device) for field in fields]


def flat(result: Any) -> dict[str, Any]:
    """Outputs by name: what has none is called outputs, or output_0, output_1, ..."""
    if isinstance(result, Mapping):
        return {str(name): value for name, value in result.items() if value is not None}
    if isinstance(result, (tuple, list)):
        return {f"output_{i}": value for i, value in enumerate(result)}
    return {"outputs": result}


def _names(model: nn.Module, count: int) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(model.forward).parameters.values()
    names = [p.name for p in parameters if p.kind in kinds]
    if any(p.kind == inspect.Parameter.VAR_POSITIONAL for p in parameters):
        names += [f"input_{i}" for i in range(len(names), count)]
    if count > len(names):
        raise ConfigError(f"{count} inputs are given, the model's forward takes {len(names)}: {', '.join(names)}")
    return names[:count]


def dtype_of(option: str, name: str) -> torch.dtype:
    """What is called so in an option."""
    if name not in TYPES:
        raise ConfigError(f"{option}: {name!r} is not a type of elements: {nearest(name, TYPES)}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype
