"""Metrics over all members: every sample counts once, whoever holds it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from paceline.core.errors import ConfigError
from paceline.transport.group import Group

Measure = Callable[..., Mapping[str, Any]]


def weighted_means(group: Group, sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Means over the members from each one's (sum, weight) by name; a name may be unknown to some."""
    names: list[str] = []
    for told in group.exchange("\n".join(sums).encode()):
        names += [n for n in told.decode().split("\n") if n and n not in names]
    names.sort()
    table = torch.tensor([sums.get(name, (0.0, 0.0)) for name in names], dtype=torch.float64).view(-1, 2)
    group.all_reduce(table)
    return {name: (total / weight if weight else float("nan")) for name, (total, weight) in zip(names, table.tolist())}


def evaluate(
    group: Group, measure: Measure, batches: Iterable[tuple[Any, int]], models: Iterable[torch.nn.Module]
) -> dict[str, float]:
    """Means of what `measure` says of each batch; `batches` gives this member's share with the samples in each."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    sums: dict[str, tuple[float, float]] = {}
    try:
        for module, _ in modes:
            module.training = False
        with torch.no_grad():
            for batch, count in batches:
                parts = batch if isinstance(batch, tuple | list) else (batch,)
                measured = measure(*parts)
                for name, value in measured.items() if count else ():
                    total, weight = _sum(name, value, count)
                    old = sums.get(name, (0.0, 0.0))
                    sums[name] = (old[0] + total, old[1] + weight)
    finally:
        for module, training in modes:
            module.training = training
    return weighted_means(group, sums)


def evenly(group: Group, batches: Iterable[tuple[Any, int]]) -> Iterator[tuple[Any, int]]:
    """As many batches on all members, which hold one model together: whose own are over has its last one again, of no
    samples."""
    left, last = iter(batches), None
    while True:
        found = next(left, None)
        if not any(map(int, group.all_gather(torch.tensor([found is not None])))):
            return
        last = found or last
        if last is None:
            raise ConfigError("run.evaluate: this member has no sample, and all are needed to call the model")
        yield last[0], found[1] if found else 0


def _sum(name: str, value: Any, count: int) -> tuple[float, float]:
    """A value per sample is summed; a single number is taken as the batch's mean."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return float(value) * count, float(count)
    if value.shape[0] != count:
        raise ConfigError(
            f"metric {name!r} has {value.shape[0]} values for a batch of {count} samples: "
            "return one value per sample, or their mean"
        )
    rows = value.double().reshape(count, -1).mean(1)
    return float(rows.sum()), float(count)
