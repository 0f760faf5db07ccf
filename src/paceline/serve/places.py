"""Where a model keeps its tensors, by name: parameters and the buffers that belong to its state.

What is tied, as one object or as two that share memory, is one place with several names, of which the first counts.
`torch.compile` puts itself into names (`_orig_mod`), which is taken out again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from paceline.core.errors import PacelineError, nearest

_COMPILED = "_orig_mod."


class Unfit(PacelineError):
    """A version cannot be used: it is torn, of another model, or not finite."""


class Place(NamedTuple):
    """One tensor of a model."""

    name: str
    aliases: tuple[str, ...]  # its other names
    holders: tuple[Tensor, ...]  # the parameters or buffers that are it: one, but where two share memory


def places_of(model: nn.Module) -> dict[str, Place]:
    """All places, by their first name.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    >>> model.append(model[0])[2] is model[0]
    True
    >>> list(places_of(model)) == ["0.weight", "0.bias", "1.weight", "1.bias", *(
    ...     f"1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked"))]
    True
    """
    found: dict[object, tuple[list[str], list[Tensor]]] = {}
    for name, tensor in _named(model):
        names, holders = found.setdefault(_where(tensor), ([], []))
        names.append(name)
        if not any(tensor is other for other in holders):
            holders.append(tensor)
    return {names[0]: Place(names[0], tuple(names[1:]), tuple(holders)) for names, holders in found.values()}


def known_names(places: Mapping[str, Place]) -> dict[str, str]:
    """Every name, and the first name of its place."""
    return {name: place.name for place in places.values() for name in (place.name, *place.aliases)}


def misfit(name: str, place: Place, tensor: Tensor, *, cast: bool = False) -> str:
    """Why this tensor cannot stand in this place; "" where it can. With `cast` any floating type may."""
    mine = place.holders[0]
    if tensor.shape != mine.shape:
        return f"{name!r} is {_size(tensor)}, in the model it is {_size(mine)}"
    if tensor.dtype != mine.dtype and not (cast and tensor.is_floating_point() and mine.is_floating_point()):
        return f"{name!r} is {tensor.dtype}, in the model it is {mine.dtype}"
    if (tensor.is_floating_point() or tensor.is_complex()) and not _finite(tensor):
        return f"{name!r} has values that are not finite"
    return ""


def unknown(name: str, places: Mapping[str, Place]) -> str:
    return f"{name!r} is not in the model: {nearest(name, places)}"


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """As state_dict names them."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        own: list[tuple[str, Tensor | None]] = list(module._parameters.items())
        own += [(n, b) for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set]
        for name, tensor in own:
            if tensor is not None:
                yield f"{prefix}.{name}".removeprefix(".").replace(_COMPILED, ""), tensor


def _where(tensor: Tensor) -> object:
    if not tensor.numel() or tensor.is_meta:
        return id(tensor)
    return tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride()


def _finite(tensor: Tensor) -> bool:
    """One pass where all is well; a sum may be infinite although no part is."""
    total = tensor.sum() if tensor.dtype != torch.float16 else tensor.sum(dtype=torch.float32)
    return (not total.is_complex() and math.isfinite(total.item())) or bool(torch.isfinite(tensor).all())


def _size(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "one number"
