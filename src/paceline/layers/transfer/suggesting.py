"""Where to cut: how well a linear probe behind each layer already tells the classes apart.

One pass over the data in eval mode takes what each layer hands on to the next one, which is what a part that is trained
above it would get: behind an activation, which may lose what the layer's own output still has. Images are averaged over
a grid of 4x4, sequences over their positions. On each, a ridge regression to one-hot labels is solved from two thirds
of the samples and tried on the others, three times, so that each sample is tried once. What is suggested is to freeze
up to the last layer that is not worse than the best by more than one standard error of their difference on the same
samples: what comes after has not helped these classes, and what comes before carries what the probe needs. With few
samples that error is large, and much is frozen.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from paceline.core.errors import ConfigError
from paceline.layers.transfer.cutting import at_rest, handed_on, named, placed
from paceline.layers.transfer.depth import layers

_GRID = 4  # positions of an image each way
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
    """Try a linear probe behind every layer but the last, and say what to freeze; the model is left as it is.

    Args:
        data: samples with labels, of the new task: some hundred are enough.
    """
    all_layers = layers(model)
    row = [
        layer.name for layer in all_layers if not layer.own
    ]  # what a module has beside its children gives nothing on
    if len(row) < 2:
        raise ConfigError("the model has a single layer with parameters: there is nowhere to cut")
    modules = {name: named(model, name) for name in row}
    device = next(model.parameters()).device
    found: dict[str, list[Tensor]] = {name: [] for name in row[:-1]}
    labels = []
    with at_rest(model):
        for batch in DataLoader(data, batch_size=batch_size):
            if not isinstance(batch, tuple | list) or len(batch) != 2:
                raise ConfigError("suggest wants samples of an input and a label")
            x, y = batch
            if not isinstance(y, Tensor):
                raise ConfigError("suggest wants a number as the label of each sample: number the classes")
            for name, out in handed_on(model, modules, placed(x, device)).items():
                found[name].append(_flat(out).cpu().double())
                if not bool(found[name][-1].isfinite().all()):
                    raise ConfigError(
                        f"what {name!r} hands on is not finite for some sample: no probe can be made of it"
                    )
            labels.append(y)
    y = torch.cat(labels) if labels else torch.empty(0)
    if y.dim() != 1 or y.is_floating_point() or len(y) < 6:
        raise ConfigError(
            f"labels of shape {tuple(y.shape)}, {y.dtype}: whole numbers are wanted, of at least 6 samples"
        )
    if int(y.min()) == int(y.max()):
        raise ConfigError(f"all {len(y)} samples have the label {int(y[0])}: a probe needs at least two classes")
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    right = {name: _right(torch.cat(parts), y, order) for name, parts in found.items()}
    probes = tuple(Probe(name, float(each.mean())) for name, each in right.items())
    best = max(right.values(), key=lambda each: float(each.mean()))
    chosen = [name for name, each in right.items() if _no_worse(best - each)][-1]
    frozen = all_layers[: [layer.name for layer in all_layers].index(chosen) + 1]
    return Suggestion(probes, chosen, tuple(pattern for layer in frozen for pattern in layer.patterns))


def _flat(out: Tensor) -> Tensor:
    if out.dim() == 4:
        grid = (min(_GRID, out.shape[2]), min(_GRID, out.shape[3]))
        return nn.functional.adaptive_avg_pool2d(out, grid).flatten(1)
    return out.mean(1) if out.dim() == 3 else out.flatten(1)


def _no_worse(behind: Tensor) -> bool:
    """Whether the mean of what a layer is behind the best, sample by sample, is within its standard error."""
    return float(behind.mean()) <= float(behind.std()) / math.sqrt(len(behind))


def _right(x: Tensor, y: Tensor, order: Tensor) -> Tensor:
    """For each sample, 1 where a probe that has not seen it is right, else 0."""
    found = torch.empty(len(y), dtype=torch.float64)
    for test in order.tensor_split(3):
        train = order[~torch.isin(order, test)]
        found[test] = _probe(x, y, train, test)
    return found


def _probe(x: Tensor, y: Tensor, train: Tensor, test: Tensor) -> Tensor:
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
    right: Tensor = (a[test] @ weight + shift).argmax(1) == target[test]
    return right.double()
