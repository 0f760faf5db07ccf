"""Handwritten digits from scikit-learn with a small CNN: the demo.

    paceline run -n 2 examples/digits.py          python examples/digits.py

The three lines that are not ordinary PyTorch are marked.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline


def data() -> tuple[TensorDataset, TensorDataset]:
    """1,797 images of 8 x 8 pixels; a fifth of them is kept for the test."""
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    test, train = order[: len(x) // 5], order[len(x) // 5 :]
    return TensorDataset(x[train], y[train]), TensorDataset(x[test], y[test])


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Dropout(0.3), nn.Linear(64 * 4 * 4, 10),
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=32, help="per member")
    options = parser.parse_args()

    run = paceline.join()  # (1)
    torch.manual_seed(run.seed + run.rank)  # dropout differs; weights start as the first member's
    train, test = data()
    model = Net().to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    optimizer = run.optimizer(optimizer, model)  # (2)
    loader = run.loader(train, batch_size=options.batch_size)  # (3)

    for _ in run.epochs(options.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            run.log(loss=loss)

    result = run.evaluate(lambda x, y: {"accuracy": (model(x).argmax(1) == y).float()}, test)
    if run.is_first:
        print(f"test accuracy: {100 * result['accuracy']:.2f}%")


if __name__ == "__main__":
    main()
