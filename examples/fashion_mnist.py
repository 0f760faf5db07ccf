"""Fashion-MNIST with a CNN, from a directory of idx files (packed or not).

apt-get install dataset-fashion-mnist
paceline run -n 2 examples/fashion_mnist.py --epochs 5 [--data DIR]
"""

from __future__ import annotations

import argparse
import gzip
import struct
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline

DEBIAN = Path("/usr/share/datasets/fashion-mnist")


def idx(folder: Path, name: str) -> Tensor:
    """The content of an idx file: two zeros, the type (8: bytes), how many dimensions, their sizes, data."""
    for path, opener in (folder / name, open), (folder / f"{name}.gz", gzip.open):
        if path.exists():
            with opener(path, "rb") as file:
                content = file.read()
            break
    else:
        sys.exit(
            f"{folder} has neither {name} nor {name}.gz. Pass --data DIR with the four idx files of\n"
            "Fashion-MNIST; on Debian and Ubuntu: apt-get install dataset-fashion-mnist"
        )
    zeros, kind, dimensions = struct.unpack_from(">HBB", content)
    if (zeros, kind) != (0, 8):
        sys.exit(f"{path} is not an idx file of bytes")
    shape = struct.unpack_from(f">{dimensions}I", content, 4)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=4 + 4 * dimensions).view(shape)


def dataset(folder: Path, part: str) -> TensorDataset:
    images = idx(folder, f"{part}-images-idx3-ubyte").unsqueeze(1).float()
    return TensorDataset((images - 73.0) / 90.0, idx(folder, f"{part}-labels-idx1-ubyte").long())


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(64 * 7 * 7, 128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, 10),
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=DEBIAN, help=f"directory of idx files (default {DEBIAN})")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64, help="per member")
    parser.add_argument("--limit", type=int, help="use only so many training images")
    options = parser.parse_args()
    train, test = dataset(options.data, "train"), dataset(options.data, "t10k")
    if options.limit:
        train = TensorDataset(*train[: options.limit])

    run = paceline.join()
    torch.manual_seed(run.seed + run.rank)  # dropout differs; weights start as the first member's
    model = Net().to(run.device)
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4), model)
    loader = run.loader(train, batch_size=options.batch_size)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
    run.track(scheduler=scheduler)  # so that a resumed run goes on with the right learning rate

    for epoch in run.epochs(options.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
        scheduler.step()
        result = run.evaluate(lambda x, y: {"accuracy": (model(x).argmax(1) == y).float()}, test)
        if run.is_first:
            print(f"epoch {epoch + 1}: test accuracy: {100 * result['accuracy']:.2f}%")


if __name__ == "__main__":
    main()
