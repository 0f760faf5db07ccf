"""Low-rank adapters: the weight stays, and a product of two thin matrices is added to it.

    W' = W + (alpha / rank) · L R,   L (rows, rank) zero at first, R (rank, columns) random

So a model with new adapters is the model without them, and only L and R are trained, sent and saved.

Reference: Hu et al., LoRA: low-rank adaptation of large language models, 2021.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import safetensors
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.core.errors import ConfigError
from paceline.layers.transfer.files import read, write
from paceline.layers.transfer.freezing import freeze
from paceline.layers.transfer.names import meant, near, owners, replace

_ALPHAS = "paceline.lora"  # in the metadata of a file


class _Adapter(nn.Module):
    """What both kinds share; `weight` is that of the merged layer, computed anew at each access."""

    def __init__(self, base: Any, rank: int, alpha: float) -> None:
        super().__init__()
        rows, columns = base.weight.shape
        if type(rank) is not int or not 1 <= rank <= min(rows, columns):
            raise ConfigError(f"rank={rank}: a weight of {rows}x{columns} takes 1 to {min(rows, columns)}")
        if not (math.isfinite(alpha) and alpha > 0):
            raise ConfigError(f"alpha={alpha}: a number above 0 is wanted")
        self.base: Any = base
        self.rank = rank
        self.alpha = alpha
        self.left = nn.Parameter(base.weight.new_zeros(rows, rank))
        self.right = nn.Parameter(base.weight.new_empty(rank, columns))
        nn.init.kaiming_uniform_(self.right, a=math.sqrt(5))
        self.train(base.training)

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def weight(self) -> Tensor:
        merged: Tensor = self.base.weight + self.scale * (self.left @ self.right)
        return merged

    def extra_repr(self) -> str:
        return f"rank={self.rank}, alpha={self.alpha:g}"


class LoRALinear(_Adapter):
    """A linear layer with an adapter."""

    base: nn.Linear

    @property
    def in_features(self) -> int:
        return self.base.in_features

    @property
    def out_features(self) -> int:
        return self.base.out_features

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x)
        return out + self.scale * F.linear(F.linear(x, self.right), self.left)


class LoRAConv1D(_Adapter):
    """The linear layer of GPT-2 in transformers, whose weight lies the other way round, with an adapter."""

    base: nn.Module

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x)
        return out + self.scale * ((x @ self.left) @ self.right)


class LoRAEmbedding(_Adapter):
    """An embedding with an adapter; the padded row stays as it is."""

    base: nn.Embedding

    def forward(self, index: Tensor) -> Tensor:
        out: Tensor = self.base(index)
        return out + self.scale * (F.embedding(index, self.left, self.base.padding_idx) @ self.right)


def lora(model: nn.Module, patterns: str | Sequence[str], *, rank: int = 8, alpha: float = 16) -> list[str]:
    """Put adapters on the linear layers and embeddings that the patterns match, and freeze all else.

    Make the optimizer afterwards. A new head is thawed after this call: `unfreeze(model, "head")`.

    Returns:
        the names of these layers.

    >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    >>> lora(model, "0", rank=4), sum(p.numel() for p in model.parameters() if p.requires_grad)
    (['0'], 512)
    """
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    found = meant(model, patterns)
    plain = _plain(model)
    chosen = [name for name in found.modules if name in plain]
    for pattern in patterns:
        if not any(name in plain for name in meant(model, [pattern]).modules):
            raise ConfigError(f"{pattern!r} matches no linear layer and no embedding: {near(pattern, plain)}")
    _put(model, {name: _adapted(model, name, plain[name], rank, alpha) for name in chosen})
    return chosen


def _put(model: nn.Module, made: Mapping[str, _Adapter]) -> None:
    """All at once, when each is known to fit; what is no adapter is frozen."""
    for name, adapter in made.items():
        replace(model, name, adapter)
    trained = {id(p) for adapter in adapters(model).values() for p in (adapter.left, adapter.right) if p.requires_grad}
    freeze(model, "*")
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in trained)


def adapters(model: nn.Module) -> dict[str, _Adapter]:
    """The layers of the model that have one, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, _Adapter)}


def merge(model: nn.Module) -> list[str]:
    """Add every adapter to its weight and put the plain layer back, still frozen; returns their names."""
    found = _some(model)
    for name, adapter in found.items():
        with torch.no_grad():
            adapter.base.weight.copy_(adapter.weight)
        replace(model, name, adapter.base.train(adapter.training))
    return list(found)


def save_lora(model: nn.Module, path: str | os.PathLike[str]) -> list[str]:
    """Write the adapters alone, as safetensors; returns the names of their layers."""
    found = _some(model)
    tensors = {f"{n}.{side}": getattr(adapter, side) for n, adapter in found.items() for side in ("left", "right")}
    write(tensors, path, {_ALPHAS: json.dumps({name: adapter.alpha for name, adapter in found.items()})})
    return list(found)


def load_lora(model: nn.Module, path: str | os.PathLike[str]) -> list[str]:
    """Put the adapters of a file on a model, which may have them already; returns the names of their layers.

    Raises:
        ConfigError: the file is none of `save_lora`, or does not fit; the model is as it was.
    """
    tensors = read(path)
    try:
        with safetensors.safe_open(path, "pt") as file:
            alphas = msgspec.json.decode((file.metadata() or {})[_ALPHAS], type=dict[str, float])
    except (safetensors.SafetensorError, KeyError, msgspec.DecodeError):
        raise ConfigError(f"{path} has no adapters of save_lora; transfer.load reads weights") from None
    known = adapters(model)
    plain = _plain(model)
    for name in alphas:
        base = known[name].base if name in known else plain.get(name)
        if base is None:
            raise ConfigError(
                f"{path} has an adapter for {name!r}, no layer of the model: {near(name, [*plain, *known])}"
            )
        left, right = (tensors.get(f"{name}.{side}", torch.empty(0)) for side in ("left", "right"))
        if left.dim() != 2 or right.dim() != 2 or left.shape[1] != right.shape[0]:
            raise ConfigError(f"{path} has no two matrices {name}.left and {name}.right that fit: it is not whole")
        if (left.shape[0], right.shape[1]) != tuple(base.weight.shape):
            told = f"{left.shape[0]}x{right.shape[1]}"
            raise ConfigError(f"{path}: {name!r} is for a weight of {told}, the model's is {tuple(base.weight.shape)}")
        if name in known and known[name].rank != left.shape[1]:
            raise ConfigError(f"{path}: {name!r} has rank {left.shape[1]}, the model's has {known[name].rank}")
    ranks = {name: tensors[f"{name}.left"].shape[1] for name in alphas}
    made = {n: _adapted(model, n, plain[n], ranks[n], alpha) for n, alpha in alphas.items() if n not in known}
    if made:
        _put(model, made)
    with torch.no_grad():
        for name, adapter in {**known, **made}.items():
            if name in alphas:
                adapter.alpha = alphas[name]
                adapter.left.copy_(tensors[f"{name}.left"])
                adapter.right.copy_(tensors[f"{name}.right"])
    return list(alphas)


def _some(model: nn.Module) -> dict[str, _Adapter]:
    if not (found := adapters(model)):
        raise ConfigError("the model has no adapters: transfer.lora(model, patterns) puts some on it")
    return found


def _plain(model: nn.Module) -> dict[str, Any]:
    inner = {id(adapter.base) for adapter in adapters(model).values()}
    return {n: m for n, m in model.named_modules() if n and _takes_one(m) and id(m) not in inner}


def _takes_one(module: nn.Module) -> bool:
    return type(module) in (nn.Linear, nn.Embedding) or _is_conv1d(module)


def _is_conv1d(module: nn.Module) -> bool:
    """By its name: nothing of transformers is imported."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")


def _adapted(
    model: nn.Module, name: str, base: Any, rank: int, alpha: float
) -> LoRALinear | LoRAConv1D | LoRAEmbedding:
    if others := [n for n in owners(model, base.weight) if n != name]:
        raise ConfigError(f"{name!r} shares its weight with {others[0]!r}, which an adapter would not change")
    if isinstance(base, nn.Linear):
        return LoRALinear(base, rank, alpha)
    if _is_conv1d(base):
        return LoRAConv1D(base, rank, alpha)
    if base.max_norm is not None or base.scale_grad_by_freq or base.sparse:
        raise ConfigError(f"{name!r}: an embedding with max_norm, scale_grad_by_freq or sparse takes no adapter")
    return LoRAEmbedding(base, rank, alpha)
