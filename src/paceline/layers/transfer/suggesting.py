"""Where to cut: how well a linear probe on each layer's output already tells the classes apart.

One pass over the data in eval mode takes the outputs of all layers; images are averaged over their positions. On each,
a ridge regression to one-hot labels is solved from two thirds of the samples and tried on the others. What is suggested
is to freeze up to the last layer that is within one standard error of the best: what comes after has not helped these
classes, and what comes before carries what the probe needs.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from paceline.core.errors import ConfigError
from paceline.layers.transfer.cutting import at_rest, named, outputs
from paceline.layers.transfer.depth import layers

_RIDGE = 1e-2  # of the mean square of the features


class Probe(NamedTuple):
    cut: str
    accuracy: float  # on the samples that were held out


class Suggestion(NamedTuple):
    probes: tuple[Probe, ...]
    cut: str  # the last layer to freeze
    freeze: tuple[str, ...]  # patterns for `freeze`

    def __str__(self) -> str:
        width = max(len(probe.cut) for probe in self.probes)
        lines = [f"{probe.cut:<{width}}  {probe.accuracy:6.1%}" for probe in self.probes]
        return "\n".join([*lines, f"freeze up to {self.cut}: {', '.join(self.freeze)}"])


def suggest(model: nn.Module, data: Dataset[Any], *, batch_size: int = 256, seed: int = 0) -> Suggestion:
    """Try a linear probe on every layer but the last, and say what to freeze; the model is left as it is.

    Args:
        data: samples with labels, of the new task: some hundred are enough.
    """
    row = [layer.name for layer in layers(model) if layer.name]
    cuts = {name: named(model, name) for name in row[:-1]}
    if not cuts:
        raise ConfigError("the model has a single layer with parameters: there is nowhere to cut")
    device = next(model.parameters()).device
    found: dict[str, list[Tensor]] = {name: [] for name in cuts}
    labels = []
    with at_rest(model):
        for batch in DataLoader(data, batch_size=batch_size):
            if isinstance(batch, Tensor) or len(batch) != 2:
                raise ConfigError("suggest wants samples of an input and a label")
            x, y = batch
            for name, out in outputs(model, cuts, x.to(device)).items():
                found[name].append(_flat(out).cpu().double())
            labels.append(y)
    y = torch.cat(labels) if labels else torch.empty(0)
    if y.dim() != 1 or y.is_floating_point() or len(y) < 6:
        raise ConfigError(
            f"labels of shape {tuple(y.shape)}, {y.dtype}: whole numbers are wanted, of at least 6 samples"
        )
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    probes = tuple(Probe(name, _probe(torch.cat(parts), y, order)) for name, parts in found.items())
    best = max(probe.accuracy for probe in probes)
    error = math.sqrt(max(best * (1 - best), 1e-12) / (len(y) // 3))
    chosen = [probe.cut for probe in probes if probe.accuracy >= best - error][-1]
    return Suggestion(probes, chosen, tuple(row[: row.index(chosen) + 1]))


def _flat(out: Tensor) -> Tensor:
    return out.flatten(2).mean(2) if out.dim() == 4 else out.flatten(1)


def _probe(x: Tensor, y: Tensor, order: Tensor) -> float:
    held = len(y) // 3
    test, train = order[:held], order[held:]
    mean = x[train].mean(0)
    a = x - mean
    classes, target = torch.unique(y, return_inverse=True)
    wanted = nn.functional.one_hot(target, len(classes)).double()
    shift = wanted[train].mean(0)
    ridge = _RIDGE * float(a[train].square().mean()) * len(train) + 1e-12
    # In the smaller of both forms: by features, or by samples.
    if a.shape[1] <= len(train):
        gram = a[train].T @ a[train] + ridge * torch.eye(a.shape[1], dtype=a.dtype)
        weight = torch.linalg.solve(gram, a[train].T @ (wanted[train] - shift))
    else:
        gram = a[train] @ a[train].T + ridge * torch.eye(len(train), dtype=a.dtype)
        weight = a[train].T @ torch.linalg.solve(gram, wanted[train] - shift)
    right = (a[test] @ weight + shift).argmax(1) == target[test]
    return float(right.double().mean())
