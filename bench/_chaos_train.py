"""The training that bench.chaos breaks: digits, with a ledger of steps and samples; run by `paceline run`'s machinery.

python -m bench._chaos_train --ledger LEDGER

A member that comes to the end writes its accuracy beside the ledger. With `--heard`, each view that a member is told of
is noted with the time at which its line has heard of it.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline
from paceline.testing.counted import Book, Counted

SAMPLES = 960  # to train on, of 1,797; the rest is for the test
BATCH_SIZE = 8  # per member


class Digits(torch.utils.data.Dataset[tuple[Tensor, Tensor, int]]):
    """Digits of 8 x 8 pixels, each with its number in the dataset."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor, int]:
        return self.x[number], self.y[number], number


def data() -> tuple[Digits, Digits]:
    """To train and to test."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[:SAMPLES], order[SAMPLES:]
    return Digits(x[train], y[train]), Digits(x[test], y[test])


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ledger", type=Path, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--step-s", type=float, default=0.0, help="least seconds that a step takes")
    parser.add_argument("--heard", action="store_true", help="note when each view is heard of")
    options = parser.parse_args()

    run = paceline.join()
    if options.heard:
        _note_views(run, options.ledger)
    torch.manual_seed(run.seed)
    train, test = data()
    model = Counted(net(), len(train))
    optimizer = torch.optim.SGD(model.groups(momentum=0.9), lr=0.02)
    optimizer = run.optimizer(optimizer, model)
    loader = run.loader(train, batch_size=BATCH_SIZE)
    book = Book(run, model, loader, options.epochs, options.ledger)

    for _ in run.epochs(options.epochs):
        for x, y, numbers in loader:
            time.sleep(options.step_s)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y) + model.count(numbers)
            loss.backward()  # type: ignore[no-untyped-call]
            book.step(optimizer, numbers)
            run.log(loss=loss)
    book.end()
    with torch.no_grad():
        accuracy = float((model(test.x).argmax(1) == test.y).float().mean())
    (options.ledger / f"accuracy-{os.getpid()}.json").write_text(json.dumps(accuracy))


def _note_views(run: Any, ledger: Path) -> None:
    """Write down when this member's line hears of a view, before anything is done about it."""
    line = run._team._line
    told, pid = line.on_view, os.getpid()
    ledger.mkdir(parents=True, exist_ok=True)
    file = (ledger / f"heard-{pid}.jsonl").open("a", buffering=1)

    def heard(new: Any) -> None:
        file.write(json.dumps({"pid": pid, "view": new.view.number, "at": time.monotonic()}) + "\n")
        told(new)

    line.on_view = heard


if __name__ == "__main__":
    main()
