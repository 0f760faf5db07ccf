"""A run and an outsider in processes of their own; a worker that is killed gives back what it had not trained."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import paceline
from paceline.core.errors import ConfigError, PacelineError
from paceline.server.outside.outsider import Outsider

SCRIPT = """
import os, signal, sys, time, torch, paceline
from torch.nn import functional as F
run = paceline.join(progress="off", checkpoint_keep=0, wait_limit_s=60.0)
torch.manual_seed(run.seed)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
loader = run.loader(run.uploads(limit=60, like=(torch.zeros(4), 0)), batch_size=4)
step = 0
for epoch in run.epochs(3):
    for x, number in loader:
        if step == 2 and run.rank == 1 and "die" in sys.argv:
            os.kill(os.getpid(), signal.SIGKILL)  # this batch was lent, and is never trained
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), number % 3)
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
        print("TRAINED", *number[: loader.last_real].tolist(), flush=True)
        if step == 2 and run.rank == 1 and "late" in sys.argv:
            os.kill(os.getpid(), signal.SIGKILL)  # this batch was trained, and no word was said about it but the push
        step += 1
names = dict(model.named_parameters())
print("END", run.rank, float(sum(p.double().sum() for p in names.values())), flush=True)
"""


@contextlib.contextmanager
def started(*args: str, more: str = "") -> Iterator[tuple[subprocess.Popen[str], Outsider]]:
    Path("train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "paceline", "run", *args, "--name", "x", "train.py", more]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ) as run:
        try:
            yield run, came_in(run)
        finally:
            if run.poll() is None:
                run.terminate()


def came_in(run: subprocess.Popen[str]) -> Outsider:
    deadline = time.monotonic() + 60
    while True:
        try:
            return paceline.connect("x", limit_s=60.0)
        except PacelineError:
            assert run.poll() is None, run.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.1)


@pytest.mark.parametrize(
    ("args", "more"),
    [
        pytest.param(["-n", "3", "--strategy", "async"], "die", id="async", marks=pytest.mark.slow),
        pytest.param(["-n", "3", "--strategy", "async"], "late", id="async-late", marks=pytest.mark.slow),
        pytest.param(["-n", "3", "--strategy", "bounded(staleness=1)"], "die", id="bounded", marks=pytest.mark.slow),
        pytest.param(["-n", "2", "--strategy", "sync", "--servers", "2"], "", id="sync", marks=pytest.mark.slow),
        pytest.param(["-n", "2", "--strategy", "sync"], "", id="colocated", marks=pytest.mark.slow),
        pytest.param(["-n", "2", "--strategy", "allreduce"], "", id="allreduce", marks=pytest.mark.slow),
    ],
)
def test_an_outsider_uploads_reads_and_watches_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], more: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with started(*args, more=more) as (run, outsider):
        assert outsider.upload((torch.randn(4), i) for i in range(150)) == 150
        with pytest.raises(ConfigError, match="takes samples like"):
            outsider.upload([torch.randn(4)])
        served = "allreduce" not in args
        if served:
            weights = outsider.weights()
            assert weights is not None
            assert {name: tuple(w.shape) for name, w in weights.items()} == {
                "0.weight": (8, 4), "0.bias": (8,), "2.weight": (3, 8), "2.bias": (3,),
            }  # fmt: skip
            assert "sync" not in args or not weights.mixed
        else:
            with pytest.raises(ConfigError, match="no server holds the weights"):
                outsider.weights()
        outsider.finish_uploads()
        told = list(outsider.watch(every_s=0.2))
        out, err = run.communicate(timeout=60)
    assert run.returncode == 0, err
    assert told[-1].state == "finished"
    assert told[-1].epochs == 3
    assert told[-1].loss is not None
    trained = [int(word) for line in out.splitlines() if "TRAINED" in line for word in line.split("TRAINED")[1].split()]
    assert sorted(trained) == list(range(150))
    with pytest.raises(ConfigError, match="run 'x' is over"):
        paceline.connect("x")
    outsider.close()


def test_a_run_of_one_says_that_it_has_no_desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with paceline.join(name="alone", progress="off", checkpoint_keep=0) as run:
        with pytest.raises(ConfigError, match="a run of one process has no desk"):
            run.uploads()
        with pytest.raises(ConfigError, match="it is a run of one process, which has none"):
            paceline.connect("alone")
