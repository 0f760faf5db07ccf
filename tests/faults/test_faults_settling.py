"""A worker is killed right between its push and its next word to the dealer: its batch counts once all the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from _served import run_with

# Member 1 kills itself when its fifth push is taken, and has told nobody that it is done.
SCRIPT = """
import argparse, contextlib, os, signal, time
from pathlib import Path

import torch
from torch.nn import functional as F

import paceline
from paceline.testing.counted import Book, Counted, Numbered

parser = argparse.ArgumentParser()
parser.add_argument("--ledger", type=Path)
parser.add_argument("--window", type=int, default=1)
parser.add_argument("--within", action="store_true")
parser.add_argument("--threads", type=int, default=0)
options = parser.parse_args()
run = paceline.join()
torch.manual_seed(run.seed)
model = Counted(torch.nn.Linear(8, 2), 200)
optimizer = run.optimizer(torch.optim.SGD(model.groups(), lr=0.05), model)
loader = run.loader(Numbered(200), batch_size=4)
book = Book(run, model, loader, 2, options.ledger)
taken = 0


def step(numbers):
    global taken
    book.step(optimizer, numbers)
    taken += 1
    if run.rank == 1 and taken == 5:
        os.kill(os.getpid(), signal.SIGKILL)


def loss_of(model, batch):
    x, y, numbers = batch
    time.sleep(0.005)
    return F.cross_entropy(model(x), y) + model.count(numbers)


for epoch in run.epochs(2):
    if options.threads:
        run.in_threads(options.threads, loss_of, model, optimizer, loader, lambda: step(torch.tensor([])))
        continue
    for i, batch in enumerate(loader, 1):
        if options.within and run.rank == 1 and i == 8:  # of a window of three, the first's gradients are kept
            os.kill(os.getpid(), signal.SIGKILL)
        with run.accumulate() if i % options.window else contextlib.nullcontext():
            loss_of(model, batch).backward()
        if i % options.window == 0:
            step(batch[2])
            optimizer.zero_grad()
    if i % options.window:
        step(batch[2])
        optimizer.zero_grad()
book.end()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "servers", "args"),
    [
        ("async", 1, []),
        ("async", 2, []),
        ("bounded(staleness=2)", 2, []),
        ("async(correct='drop(1)')", 1, []),
        ("async", 2, ["--threads", "3"]),
        ("async", 1, ["--window", "3"]),
        ("async", 1, ["--window", "3", "--within"]),
        ("async_local(every=3, lr=3.0, momentum=0.0)", 1, []),  # of three workers: differences as they are
    ],
)
def test_a_batch_whose_push_was_taken_is_not_dealt_again(
    strategy: str, servers: int, args: list[str], tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    result = run_with(tmp_path, strategy, servers=servers, script=str(script), args=args)
    assert [e.code for e in result.outcome.ended] == [0, -9, 0] + [0] * servers, result.output
    found = result.found
    assert found.doubled_samples == 0, f"{found}\n{result.output}"
    if "drop" in strategy:
        assert found.lost_samples % 4 == 0  # those that were dropped for their age
    else:
        assert found.clean, f"{found}\n{result.output}"
