"""Runs in a Slurm of this machine's own, for the tests."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.core.errors import PacelineError
from paceline.launch import record
from paceline.testing.slurm import Slurm

ROOT = Path(__file__).parents[2]
DIGITS = str(ROOT / "examples" / "digits.py")
LIMIT_S = 400.0  # a busy machine is no failure
LONG = """
import time

import torch
from torch.utils.data import TensorDataset

import paceline

run = paceline.join()
model = torch.nn.Linear(4, 1)
optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
loader = run.loader(TensorDataset(torch.randn(8000, 4)), batch_size=4)
for _ in run.epochs(1):
    for n, (x,) in enumerate(loader):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        time.sleep(0.05)
        if n == 3:
            print("trains", flush=True)
"""


def started(directory: Path, *more: str) -> Slurm:
    """A Slurm that runs; where there can be none, the test is skipped and says why."""
    if reason := Slurm.missing():
        pytest.skip(reason)
    slurm = Slurm(directory, more=more)
    try:
        return slurm.__enter__()
    except PacelineError as error:
        pytest.skip(f"Slurm does not start here: {str(error)[:300]}")


class Site:
    """A working directory from which runs are submitted."""

    def __init__(self, directory: Path, slurm: Slurm) -> None:
        self.dir, self.slurm = directory, slurm
        directory.mkdir(exist_ok=True)
        (directory / "long.py").write_text(LONG)
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
        self.env = inherited | slurm.env | {"OMP_NUM_THREADS": "1", "XDG_CONFIG_HOME": str(directory / "config")}

    def paceline(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.call(sys.executable, "-m", "paceline", *words)

    def call(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(words, cwd=self.dir, env=self.env, capture_output=True, text=True, timeout=LIMIT_S)

    def submit(self, *words: str) -> str:
        """The number of the job."""
        done = self.paceline("run", "--on", "slurm", "--name", "it", *words)
        assert done.returncode == 0, done.stderr
        return (done.stdout + done.stderr).partition("Slurm job ")[2].split()[0]

    @property
    def run(self) -> Path:
        return self.dir / "runs" / "it"

    @property
    def record(self) -> record.Run | None:
        return record.read(self.run)

    def log(self, name: str = "it") -> str:
        """What member 0 has printed."""
        path = self.dir / "runs" / name / "logs" / "rank-0.log"
        return path.read_text() if path.exists() else ""

    def said(self) -> str:
        return "".join(path.read_text() for path in sorted((self.run / "logs").glob("slurm-*.out")))

    def state(self, job: str) -> str:
        return self.slurm.run("scontrol", "--oneliner", "show", "job", job).partition("JobState=")[2].split()[0]

    def until(self, ready: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not ready():
            assert time.monotonic() < deadline, f"{what} is waited for: {self.said()}"
            time.sleep(0.1)
