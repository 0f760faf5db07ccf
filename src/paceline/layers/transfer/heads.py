"""Give a classifier other classes: its last linear layer is made anew, and rows of classes that stay are kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from paceline.core.errors import ConfigError
from paceline.layers.transfer.lora import LoRALinear, adapters
from paceline.layers.transfer.names import near, owners, replace


class Head(NamedTuple):
    name: str
    layer: nn.Linear
    kept: tuple[str, ...]  # classes whose rows came along
    fresh: tuple[str, ...]  # those that begin at random; without names, all do and both are empty


def head(
    model: nn.Module,
    name: str | None = None,
    *,
    classes: int | None = None,
    old: Sequence[str] | None = None,
    new: Sequence[str] | None = None,
) -> Head:
    """Put a linear layer for other classes in place of the one that is there.

    Make the optimizer afterwards: the parameters are other ones. They are trained, frozen before or not.

    Args:
        name: of the layer; None for the last linear one of the model, in the order of its modules.
        classes: how many, where they have no names.
        old, new: names of the rows that are there, and of those that are to be; rows that are in both are kept.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> head(model, old=["cat", "dog", "fox"], new=["dog", "owl"]).kept
    ('dog',)
    >>> model[2]
    Linear(in_features=8, out_features=2, bias=True)
    """
    name, layer = _present(model, name)
    if (classes is None) == (new is None):
        raise ConfigError("say what the classes are: classes=10, or their names as new=[...], not both")
    if old is not None and new is None:
        raise ConfigError("old= names the rows that are there; new= is needed too, to tell which of them stay")
    if classes is not None and classes < 1:
        raise ConfigError(f"classes={classes}: at least one is wanted")
    for field, given in (("old", old), ("new", new)):
        if given is not None and (isinstance(given, str) or not given or len(set(given)) < len(given)):
            raise ConfigError(f"{field}={given!r}: a list of different names of classes is wanted")
    if old is not None and len(old) != layer.out_features:
        raise ConfigError(f"old= has {len(old)} names, but {name} has {layer.out_features} rows")
    weight = layer.weight
    made = nn.Linear(
        layer.in_features, classes or len(new or ()), layer.bias is not None, device=weight.device, dtype=weight.dtype
    ).train(layer.training)
    kept = [one for one in new or () if one in (old or ())]
    if kept and old is not None and new is not None:
        here, there = [old.index(one) for one in kept], [new.index(one) for one in kept]
        with torch.no_grad():
            made.weight[there] = weight[here]
            if layer.bias is not None:
                made.bias[there] = layer.bias[here]
    replace(model, name, made)
    _tell(model, layer.out_features, made.out_features)
    return Head(name, made, tuple(kept), tuple(one for one in new or () if one not in kept))


def _tell(model: nn.Module, before: int, after: int) -> None:
    """Models of timm and transformers know the number of their classes, and some compute their loss by it."""
    for owner in (model, getattr(model, "config", None)):
        for field in ("num_labels", "num_classes"):
            if getattr(owner, field, None) == before:
                setattr(owner, field, after)


def _present(model: nn.Module, name: str | None) -> tuple[str, nn.Linear]:
    known = adapters(model)
    bases = {id(adapter.base) for adapter in known.values()}
    linear = {n: m for n, m in model.named_modules() if n and type(m) is nn.Linear and id(m) not in bases}
    row = [n for n, m in model.named_modules() if n in linear or isinstance(m, LoRALinear)]
    if row and (name or row[-1]) in known:
        raise ConfigError(
            f"{name or row[-1]!r} has an adapter: transfer.merge(model) first, or make the head before transfer.lora"
        )
    if not linear:
        raise ConfigError("the model has no nn.Linear within it whose place another could take")
    if name is None:
        name = list(linear)[-1]
    if name not in linear:
        raise ConfigError(f"{name!r} is not an nn.Linear of the model: {near(name, linear)}")
    others = [n for n in owners(model, linear[name].weight) if n != name]
    if others:
        raise ConfigError(f"{name!r} shares its weight with {others[0]!r}, which would not change with it")
    return name, linear[name]
