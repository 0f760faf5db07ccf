"""How good a version is on data that it was not trained on: one number, and whether it may take another's place."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from paceline.core.errors import ConfigError, nearest

Metric = Callable[[nn.Module, list[tuple[Any, Any]]], float]
_BATCH = 256


class Holdout:
    """Data and a metric.

    Args:
        data: what a user's function returned: batches of (inputs, targets), a pair of tensors, or a dataset.
        metric: "accuracy" (of classes), "loss" (cross entropy, or squared error where targets are no classes), or a
            function of the model and the batches, of which more is better.
        tolerance: by how much a version may be worse than the best one that was served.
    """

    def __init__(self, data: Any, metric: str | Metric = "accuracy", tolerance: float = 0.0) -> None:
        if isinstance(metric, str) and metric not in _METRICS:
            raise ConfigError(f"metric={metric!r}: {nearest(metric, _METRICS)}, or module:function")
        if not tolerance >= 0:
            raise ConfigError(f"tolerance={tolerance!r}: by how much a version may be worse, 0 or more")
        self.tolerance = tolerance
        self.name = metric if isinstance(metric, str) else getattr(metric, "__name__", "metric")
        self._metric: Metric = _METRICS[metric] if isinstance(metric, str) else metric
        self._sign = -1.0 if metric == "loss" else 1.0
        self._batches = [(x, y) for x, y in _batches(data) if not (isinstance(y, Tensor) and not y.numel())]
        if not self._batches:
            raise ConfigError("the holdout is empty: a version cannot be measured")

    def measure(self, model: nn.Module) -> float:
        """Of the model as it is; it is in evaluation mode meanwhile."""
        training = model.training
        model.eval()
        try:
            with torch.no_grad():
                return float(self._metric(model, self._batches))
        finally:
            model.train(training)

    def is_good(self, value: float, best: float) -> bool:
        """Whether it is not worse than `best`, but for the tolerance; nan is."""
        return self._sign * value >= self._sign * best - self.tolerance

    def better(self, one: float, other: float) -> float:
        return max(one, other, key=lambda value: self._sign * value)


def _batches(data: Any) -> list[tuple[Any, Any]]:
    if isinstance(data, tuple) and len(data) == 2 and all(isinstance(each, Tensor) for each in data):
        return list(zip(*(each.split(_BATCH) for each in data)))
    if isinstance(data, Dataset):
        data = DataLoader(data, batch_size=_BATCH)
    if not isinstance(data, Iterable):
        raise ConfigError(
            f"the holdout is a {type(data).__name__}: batches of (inputs, targets), or a dataset, is wanted"
        )
    found: list[tuple[Any, Any]] = []
    for batch in data:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise ConfigError(f"a batch of the holdout is a {type(batch).__name__}: (inputs, targets) is wanted")
        found.append((batch[0], batch[1]))
    return found


def _accuracy(model: nn.Module, batches: list[tuple[Any, Any]]) -> float:
    right = count = 0
    for x, y in batches:
        right += int((_computed(model, x).argmax(1) == y).sum())
        count += y.numel()
    return right / count


def _loss(model: nn.Module, batches: list[tuple[Any, Any]]) -> float:
    total, count = 0.0, 0
    for x, y in batches:
        out = _computed(model, x)
        loss = F.mse_loss(out, y) if y.is_floating_point() and out.shape == y.shape else F.cross_entropy(out, y)
        total += float(loss) * len(y)
        count += len(y)
    return total / count


def _computed(model: nn.Module, x: Any) -> Tensor:
    out = model(*x) if isinstance(x, tuple | list) else model(x)
    if not isinstance(out, Tensor):
        raise ConfigError(f"the model returns a {type(out).__name__}: name a metric of your own, module:function")
    return out


_METRICS: dict[str, Metric] = {"accuracy": _accuracy, "loss": _loss}
