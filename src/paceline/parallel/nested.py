"""What models take and return: tensors within tuples, lists, mappings and dataclasses, changed one by one."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

Change = Callable[[torch.Tensor], torch.Tensor]


def each(value: Any, change: Change) -> Any:
    """`value` with `change` applied to every tensor in it; where nothing changes it is the same object.

    >>> each({"a": (torch.ones(1), 2)}, lambda t: t + 1)
    {'a': (tensor([2.]), 2)}
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        new = [each(part, change) for part in value]
        if all(a is b for a, b in zip(new, value)):
            return value
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*new)
        return type(value)(new)
    if isinstance(value, Mapping):
        changed = {key: each(part, change) for key, part in value.items()}
        if all(changed[key] is part for key, part in value.items()):
            return value
        return type(value)(changed)  # type: ignore[call-arg]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if hasattr(value, f.name)}
        parts = {name: each(part, change) for name, part in fields.items()}
        if all(parts[name] is part for name, part in fields.items()):
            return value
        twin = copy.copy(value)
        for name, part in parts.items():
            object.__setattr__(twin, name, part)  # also where it is frozen
        return twin
    return value
