"""A small training whose steps and samples are written into a ledger: the script of fault tests.

paceline run -n 3 -m paceline.testing.train_counted --ledger LEDGER
"""

from __future__ import annotations

import argparse
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import paceline
from paceline.testing.counted import Book, Counted, Numbered


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ledger", type=Path, required=True, help="directory, on a disk that outlives the faults")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=480)
    parser.add_argument("--batch-size", type=int, default=8, help="per member")
    parser.add_argument("--step-s", type=float, default=0.0, help="least seconds that a step takes")
    parser.add_argument(
        "--frozen-mb", type=int, default=0, help="of parameters that are not trained, to make heavy states"
    )
    parser.add_argument("--sample-s", type=float, default=0.0, help="and that each sample of it takes")
    parser.add_argument("--slow", type=int, default=-1, help="a member that takes three times as long for a sample")
    parser.add_argument("--width", type=int, default=32, help="of the model")
    parser.add_argument("--processes", type=int, default=0, help="that must have begun before the second epoch ends")
    parser.add_argument("--again-s", type=float, default=0.0, help="that one which was started again takes to begin")
    parser.add_argument("--window", type=int, default=1, help="batches of a step")
    parser.add_argument("--workers", type=int, default=0, help="processes that fetch batches for each member")
    options = parser.parse_args()

    run = paceline.join()
    torch.manual_seed(run.seed)
    net = nn.Sequential(nn.Linear(8, options.width), nn.ReLU(), nn.Linear(options.width, 2))
    net.register_parameter("heavy", nn.Parameter(torch.ones(options.frozen_mb << 18), requires_grad=False))
    model = Counted(net, options.samples).to(run.device)
    optimizer = torch.optim.SGD(model.groups(momentum=0.9), lr=0.05)
    optimizer = run.optimizer(optimizer, model)
    loader = run.loader(Numbered(options.samples), batch_size=options.batch_size, workers=options.workers)
    book = Book(run, model, loader, options.epochs, options.ledger)
    if len(list(options.ledger.glob(f"member-{book.member}-*"))) > 1:
        time.sleep(options.again_s)
    sample_s = options.sample_s * (3 if book.member == options.slow else 1)

    deadline = time.monotonic() + 60.0
    for epoch in run.epochs(options.epochs):
        window: list[torch.Tensor] = []  # numbers of its batches
        for x, y, numbers in loader:
            time.sleep(options.step_s + sample_s * len(x))
            if not window:
                optimizer.zero_grad()
            window.append(numbers)
            loss = F.cross_entropy(model(x), y) + model.count(numbers)
            with run.accumulate() if len(window) < options.window else nullcontext():
                loss.backward()  # type: ignore[no-untyped-call]
            if len(window) == options.window:
                book.step(optimizer, torch.cat(window))
                window = []
            run.log(loss=loss)
            if epoch == 1:
                wait_for(options.processes, options.ledger, deadline)
        if window:
            book.step(optimizer, torch.cat(window))
        book.look()
    book.end()


def wait_for(processes: int, ledger: Path, deadline: float) -> None:
    """Until so many have begun to write: some that were started again take their time."""
    while len(list(ledger.glob("member-*"))) < processes and time.monotonic() < deadline:
        time.sleep(0.05)


if __name__ == "__main__":
    main()
