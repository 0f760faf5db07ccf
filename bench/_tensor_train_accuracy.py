"""A trained MLP, compressed and fine-tuned, for `bench.tensor_train`.

Fashion-MNIST where Debian's package (or BENCH_DATA) has it, else scikit-learn's digits. Adam, the rate falls to zero by
a cosine. The dense model goes on for as many epochs as the compressed one is fine-tuned. Both are given the same
trials: one at each rate of `LEARNING_RATES` with the first seed, then the other seeds at the best.
"""

from __future__ import annotations

import copy
import itertools
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench import _network_accuracy as fashion
from paceline.layers import to_tensor_train

BATCH = 100
HIDDEN = 512
RANK = 24
LEARNING_RATES = (1e-3, 3e-3)


class Data(NamedTuple):
    name: str
    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


class Outcome(NamedTuple):
    """Points of test accuracy."""

    dense: float
    converted: float  # before fine-tuning
    tuned: float
    smaller: float


def data() -> Data:
    if not fashion.missing():
        parts = [fashion._batch(part, torch.arange(num)) for part, num in (("train", 60_000), ("t10k", 10_000))]
        (x, y), (test_x, test_y) = ((x.flatten(1), y) for x, y in parts)
        return Data("Fashion-MNIST", x, y, test_x, test_y)
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 8 - 1, dtype=torch.float32), torch.tensor(labels)
    at = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    return Data("digits", x[at[360:]], y[at[360:]], x[at[:360]], y[at[:360]])


def outcomes(found: Data, num_seeds: int, *, epochs: int) -> list[Outcome]:
    """By seed."""
    first = _Seed(found, 0, epochs)
    dense_lr, dense = max((_tuned(first.model, found, epochs, lr), lr) for lr in LEARNING_RATES)[::-1]
    small_lr, tuned = max((_tuned(first.small, found, epochs, lr), lr) for lr in LEARNING_RATES)[::-1]
    done = [Outcome(dense, first.converted, tuned, first.smaller)]
    for number in range(1, num_seeds):
        seed = _Seed(found, number, epochs)
        dense, tuned = _tuned(seed.model, found, epochs, dense_lr), _tuned(seed.small, found, epochs, small_lr)
        done.append(Outcome(dense, seed.converted, tuned, seed.smaller))
    for number, one in enumerate(done):
        print(f"seed {number}, rates {dense_lr} and {small_lr}: {one}", flush=True)
    return done


class _Seed:
    """A trained model and the compressed one made of it."""

    def __init__(self, found: Data, number: int, epochs: int) -> None:
        torch.manual_seed(number)
        sizes = [found.x.shape[1], HIDDEN, HIDDEN, 10]
        linear = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
        self.model = nn.Sequential(linear[0], nn.ReLU(), linear[1], nn.ReLU(), linear[2])
        _train(self.model, found, epochs, LEARNING_RATES[0])
        self.small = copy.deepcopy(self.model)
        self.smaller = to_tensor_train(self.small, rank=RANK, gain="size", only=["0", "2"]).smaller
        self.converted = accuracy(self.small, found)


def _tuned(model: nn.Module, found: Data, epochs: int, lr: float) -> float:
    """Accuracy of a copy that was trained further."""
    model = copy.deepcopy(model)
    _train(model, found, epochs, lr)
    return accuracy(model, found)


def _train(model: nn.Module, found: Data, epochs: int, lr: float) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    steps = epochs * (len(found.y) // BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(epochs):
        order = torch.randperm(len(found.y))
        for at in order[: len(order) // BATCH * BATCH].view(-1, BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(found.x[at]), found.y[at]).backward()
            optimizer.step()
            schedule.step()


@torch.no_grad()
def accuracy(model: nn.Module, found: Data) -> float:
    return 100 * float((model(found.test_x).argmax(1) == found.test_y).double().mean())
