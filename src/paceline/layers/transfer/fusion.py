"""Bring the features of several layers or several models together before one head.

Taps           what named modules of a model give, a row of features for each sample
Concat         side by side                                       widths may differ
WeightedSum    one weight for each source, softmax over them      after a projection to one width
Gated          weights from the features, for each sample         the same
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.errors import ConfigError
from paceline.layers.transfer.cutting import at_rest, named, outputs


class Taps(nn.Module):
    """The outputs of some modules of a model, as sources for a fusion; images and sequences are averaged.

    The model's forward pass ends with the last of them. Gradients go through, but for what is frozen.

    >>> model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 3))
    >>> taps = Taps(model, "0", "2")
    >>> taps.widths(torch.ones(1, 2)), [tuple(source.shape) for source in taps(torch.ones(5, 2))]
    ([4, 3], [(5, 4), (5, 3)])
    """

    def __init__(self, model: nn.Module, *names: str) -> None:
        super().__init__()
        if not names:
            raise ConfigError("Taps(model): the names of modules are wanted, such as 'layer1', 'layer3'")
        for name in names:
            named(model, name)
        if len(set(names)) < len(names):
            raise ConfigError(f"Taps: {', '.join(names)} has a name twice")
        self.model = model
        self.names = names

    def forward(self, x: Any) -> tuple[Tensor, ...]:
        found = outputs(self.model, {name: named(self.model, name) for name in self.names}, x)
        return tuple(_row(found[name]) for name in self.names)

    def widths(self, x: Any) -> list[int]:
        """How many features each has, by one batch."""
        with at_rest(self.model):
            return [source.shape[-1] for source in self(x)]


class Concat(nn.Module):
    """Sources side by side, in the last dimension.

    >>> Concat([4, 2])(torch.ones(3, 4), torch.ones(3, 2)).shape
    torch.Size([3, 6])
    """

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.widths = _checked(widths)
        self.width = sum(self.widths)

    def forward(self, *sources: Tensor) -> Tensor:
        return torch.cat(_fitting(sources, self.widths), -1)


class WeightedSum(nn.Module):
    """Sources, projected to one width, in a weighted mean; the weights are trained and begin equal.

    >>> WeightedSum([4, 2], 5)(torch.ones(3, 4), torch.ones(3, 2)).shape
    torch.Size([3, 5])
    """

    def __init__(self, widths: Sequence[int], width: int) -> None:
        super().__init__()
        self.widths = _checked(widths)
        self.width = _checked([width])[0]
        self.project = nn.ModuleList(nn.Linear(w, width) for w in self.widths)
        self.logits = nn.Parameter(torch.zeros(len(self.widths)))

    def forward(self, *sources: Tensor) -> Tensor:
        parts = _projected(self.project, _fitting(sources, self.widths))
        return (parts * self.logits.softmax(0)).sum(-1)


class Gated(nn.Module):
    """Sources, projected to one width, in a mean whose weights each sample's own features decide; they begin equal.

    >>> Gated([4, 2], 5)(torch.ones(3, 4), torch.ones(3, 2)).shape
    torch.Size([3, 5])
    """

    def __init__(self, widths: Sequence[int], width: int) -> None:
        super().__init__()
        self.widths = _checked(widths)
        self.width = _checked([width])[0]
        self.project = nn.ModuleList(nn.Linear(w, width) for w in self.widths)
        self.gate = nn.Linear(sum(self.widths), len(self.widths))
        nn.init.zeros_(self.gate.weight)
        nn.init.zeros_(self.gate.bias)

    def forward(self, *sources: Tensor) -> Tensor:
        given = _fitting(sources, self.widths)
        weights = self.gate(torch.cat(given, -1)).softmax(-1)
        out: Tensor = (_projected(self.project, given) * weights.unsqueeze(-2)).sum(-1)
        return out


def _row(out: Tensor) -> Tensor:
    if out.dim() == 4:
        return out.mean((2, 3))
    return out.mean(1) if out.dim() == 3 else out


def _projected(project: nn.ModuleList, sources: Sequence[Tensor]) -> Tensor:
    """(..., width, source)"""
    return torch.stack([layer(source) for layer, source in zip(project, sources)], -1)


def _checked(widths: Sequence[int]) -> tuple[int, ...]:
    if not widths or any(width < 1 for width in widths):
        raise ConfigError(f"widths={list(widths)}: the number of features of each source is wanted, at least 1")
    return tuple(widths)


def _fitting(sources: Sequence[Tensor], widths: tuple[int, ...]) -> list[Tensor]:
    if tuple(source.shape[-1] for source in sources) != widths:
        told = [tuple(source.shape) for source in sources]
        raise ConfigError(f"sources of {list(widths)} features were said to come, these came: {told}")
    return list(sources)
