"""Samples bound to a label, with server processes: trained there and once, also when one who has it is killed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from _served import run_with

from paceline.testing.cluster import Cluster
from paceline.testing.ledger import Ledger
from paceline.testing.plan import FaultPlan

# Every third sample lies at site A. Slow enough that a fault meets it in the middle.
SCRIPT = """
import argparse, time
from pathlib import Path

import torch
from torch.nn import functional as F

import paceline
from paceline.cli import runs
from paceline.cli.queue import lines as queue_of
from paceline.testing.counted import Book, Counted, Numbered

parser = argparse.ArgumentParser()
parser.add_argument("--ledger", type=Path)
options = parser.parse_args()
run = paceline.join()
print("labels", run.labels)
torch.manual_seed(run.seed)
model = Counted(torch.nn.Linear(8, 2), 120)
optimizer = run.optimizer(torch.optim.SGD(model.groups(), lr=0.05), model)
loader = run.loader(Numbered(120), batch_size=4, bound=lambda i: None if i % 3 else "site-a")
book = Book(run, model, loader, 2, options.ledger)


def show_the_queue():
    deadline = time.monotonic() + 20
    while len(lines := queue_of(runs.look(run.dir))) < 3 and time.monotonic() < deadline:  # steps, until it is written
        time.sleep(0.1)
    print("queue", " | ".join(lines), flush=True)


shown = False
for epoch in run.epochs(2):
    for x, y, numbers in loader:
        time.sleep(0.2)  # an epoch takes longer than it takes the server to write its queue
        if "site-a" not in run.labels:
            assert all(n % 3 for n in numbers.tolist())
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y) + model.count(numbers)).backward()
        book.step(optimizer, numbers)
        if run.rank == 0 and not shown:
            shown = True
            show_the_queue()
book.end()
"""


def script(tmp_path: Path) -> str:
    (tmp_path / "bound.py").write_text(SCRIPT)
    return str(tmp_path / "bound.py")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["async", "bounded(staleness=2)"])
def test_another_one_with_the_label_goes_on(strategy: str, tmp_path: Path) -> None:
    plan = FaultPlan().kill("member 1", step=4)
    result = run_with(
        tmp_path, strategy, plan=plan, script=script(tmp_path), labels=("site-a:1,2", "gpu"), checkpoint_keep=0
    )
    result.must_be_clean()
    assert "[2] labels ('site-a', 'gpu')" in result.output
    assert "[0] labels ('gpu',)" in result.output
    shown = re.search(r"\[0\] queue (.*)", result.output)
    assert shown
    whole, anybody, bound = shown[1].split(" | ")
    assert re.fullmatch(r"loader 0, epoch [12]: \d+ of 30 batches done", whole)
    assert re.match(r" *for anybody: \d+ of 20 batches done, \d+ left", anybody)
    assert re.match(r" *bound to site-a: \d+ of 10 batches done, \d+ left", bound)


@pytest.mark.slow
def test_without_one_the_run_says_which_label_is_missing(tmp_path: Path) -> None:
    plan = FaultPlan().kill("member 1", step=4)
    result = run_with(tmp_path, "async", plan=plan, script=script(tmp_path), labels=("site-a:1",), checkpoint_keep=0)
    assert result.outcome.code == 1
    assert "no worker that is left has the label 'site-a', to which" in result.output
    written = Ledger.read(tmp_path / "ledger").written
    free = [n for w in written for line in w.steps for n in line.samples if n % 3]
    assert sorted(free) == [n for n in range(120) if n % 3]  # all that could be trained was


def test_all_reduce_refuses_in_a_sentence(tmp_path: Path) -> None:
    ended = Cluster(2).run(Path(script(tmp_path)), ["--ledger", str(tmp_path)], env={"PACELINE_LABELS": "site-a"})
    assert [e.code for e in ended] == [1, 1]
    assert "labels ('site-a',)" in ended[1].output
    assert "use --strategy async or bounded" in ended[1].output
