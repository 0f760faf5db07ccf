"""The layers of a model: what is put together, or computed again, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline.core.errors import ConfigError

SMALL = 10_000  # parameters: what has fewer goes with what is around it


def layers(model: nn.Module) -> Iterator[nn.Module]:
    """What is put together one at a time: the outermost lists of layers, element by element.

    >>> [type(m).__name__ for m in layers(nn.Sequential(nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 100)))]
    ['Linear', 'Linear']
    """
    for module in [model] if isinstance(model, nn.Sequential) else model.children():
        if isinstance(module, nn.Sequential | nn.ModuleList) and len(module) > 1:
            yield from (m for m in module if sum(p.numel() for p in m.parameters()) >= SMALL)
        else:
            yield from layers(module)


def recompute_layers(model: nn.Module) -> None:
    """Forget what layers compute on the way forward, and compute it again on the way back."""
    found = list(layers(model))
    if not found:
        raise ConfigError(
            "run.model(recompute=True): no layers were found: put them into an nn.Sequential or nn.ModuleList, or use "
            "torch.utils.checkpoint within the model"
        )
    for layer in found:
        forward = layer.forward

        def again(*args: Any, _forward: Callable[..., Any] = forward, **named: Any) -> Any:
            if not torch.is_grad_enabled():
                return _forward(*args, **named)
            return checkpoint(_forward, *args, use_reentrant=False, **named)

        layer.forward = again
