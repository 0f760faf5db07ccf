"""A run in processes of its own, that trains until it is told to stop."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

SCRIPT = """
import sys, time, torch, paceline
from pathlib import Path
run = paceline.join(progress="off", wait_limit_s=60.0)
torch.manual_seed(run.seed)
sys.path.insert(0, str(Path(__file__).parent))
from net import make_model
model = make_model()
optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randint(3, (64,)))
loader = run.loader(data, batch_size=8)
for epoch in run.epochs(100_000):
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        time.sleep(0.02)
    if Path("stop").exists():
        break
"""

NET = """
import torch
def make_model():
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    model[0].weight.requires_grad_(False)
    return model
"""


def make_model() -> nn.Module:
    made: dict[str, object] = {}
    exec(NET, made)
    model = made["make_model"]()  # type: ignore[operator]
    assert isinstance(model, nn.Module)
    return model


def until(ready: Callable[[], object], run: subprocess.Popen[str] | None = None, limit_s: float = 120.0) -> None:
    deadline = time.monotonic() + limit_s
    while not ready():
        assert run is None or run.poll() is None, run.communicate() if run else ""
        assert time.monotonic() < deadline
        time.sleep(0.05)


@contextlib.contextmanager
def training(*args: str) -> Iterator[subprocess.Popen[str]]:
    """`paceline run ARGS --name x train.py`, here; killed at the end if it still runs."""
    Path("train.py").write_text(SCRIPT)
    Path("net.py").write_text(NET)
    command = [sys.executable, "-m", "paceline", "run", "--name", "x", *args, "train.py"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, start_new_session=True
    ) as run:
        try:
            yield run
        finally:
            if run.poll() is None:
                run.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    run.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
            run.communicate()


def pids_of(run: subprocess.Popen[str]) -> list[int]:
    """The launcher and all that it started, and those started."""
    found, new = [run.pid], [run.pid]
    while new:
        pid = new.pop()
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{pid}/task").glob("*/children"):
                children = [int(word) for word in task.read_text().split()]
                found += children
                new += children
    return found


def kill_all(run: subprocess.Popen[str]) -> None:
    """As a machine that loses its power: nobody says goodbye."""
    pids = pids_of(run)
    for pid in pids:  # all stand still first, so that none sees another die
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    for pid in {*pids, *pids_of(run)}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    run.wait(20)


def learns(before: dict[str, torch.Tensor], now: dict[str, torch.Tensor]) -> list[str]:
    """The names that changed."""
    return [name for name in now if not torch.equal(before[name], now[name])]
