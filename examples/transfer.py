"""A model that knows five kinds of clothes learns the other five from 100 images each; the frozen part runs once.

apt-get install dataset-fashion-mnist
paceline run -n 2 examples/transfer.py [--epochs 10] [--data DIR]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from fashion_mnist import DEBIAN, idx
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline
from paceline import transfer

LABELS = 100  # a kind


def images(folder: Path, part: str, kinds: range, most: int) -> TensorDataset:
    """The first so many of each kind."""
    x, y = idx(folder, f"{part}-images-idx3-ubyte"), idx(folder, f"{part}-labels-idx1-ubyte").long()
    at = torch.cat([(y == kind).nonzero().flatten()[:most] for kind in kinds])
    return TensorDataset((x[at].unsqueeze(1).float() - 73.0) / 90.0, y[at] - kinds.start)


def make() -> nn.Sequential:
    low = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
    high = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(low, high, nn.Sequential(nn.Flatten(), nn.Linear(32 * 49, 64), nn.ReLU()), nn.Linear(64, 5))


def accuracy(model: nn.Module, data: TensorDataset) -> float:
    x, y = data.tensors
    model.eval()
    with torch.no_grad():
        found: Tensor = model(x).argmax(1) == y
    return 100 * float(found.double().mean())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=DEBIAN)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--before", type=int, default=1, help="epochs on the first five kinds")
    options = parser.parse_args()
    torch.manual_seed(0)

    with paceline.join() as run:
        # Somebody else's work, here in its place: on all members alike, so that no file has to travel.
        model = make()
        old = images(options.data, "train", range(5), 600)
        adam = torch.optim.Adam(model.parameters(), lr=3e-3)
        for _ in range(options.before):
            for at in torch.randperm(len(old)).split(64):
                adam.zero_grad()
                F.cross_entropy(model(old.tensors[0][at]), old.tensors[1][at]).backward()
                adam.step()

        new = images(options.data, "train", range(5, 10), LABELS)
        found = transfer.suggest(model, new)
        if run.is_first:
            print(found)
        transfer.head(model, classes=5)
        transfer.freeze(model, "0", "1")
        kept = transfer.features(model, "1", new, run.dir / "features", run=run)
        _, top = transfer.cut(model, "1")

        optimizer = run.optimizer(torch.optim.Adam(transfer.groups(top, lr=3e-3)), top)
        loader = run.loader(kept, batch_size=16)
        for _ in run.epochs(options.epochs):
            top.train()
            for x, y in loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(top(x), y)
                loss.backward()
                optimizer.step()
                run.log(loss=loss)
        test = images(options.data, "t10k", range(5, 10), 1000)
        if run.is_first:
            print(f"test accuracy: {accuracy(model, test):.2f}%")


if __name__ == "__main__":
    main()
