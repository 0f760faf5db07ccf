"""A run of members that train apart and its guests, as processes of `paceline run`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.core import status

PACELINE = [sys.executable, "-m", "paceline", "run", "--progress", "plain"]

# Trains until there is a file, which all look for between two epochs; the rest of the epochs are empty then.
SCRIPT = """
import hashlib, pathlib, sys, time
import paceline, torch

stop, step_s, width, epochs = pathlib.Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
torch.manual_seed(0)
run = paceline.join()
model = torch.nn.Sequential(torch.nn.Linear(16, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))
optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.3 / width), model)
x = torch.randn(80 * run.size, 16)
loader = run.loader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).tanh()), batch_size=8)
for epoch in run.epochs(epochs):
    over = torch.tensor([float(stop.exists())])
    run.broadcast(over)
    if over:
        continue
    for a, b in loader:
        optimizer.zero_grad()
        loss = (model(a) - b).square().mean()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
        time.sleep(step_s)
flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
print("weights", hashlib.sha256(flat.numpy().tobytes()).hexdigest(), bool(torch.isfinite(flat).all()), flush=True)
"""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Party:
    """What runs, and where it lies."""

    def __init__(self, scratch: Path, *, step_s: float = 0.01, width: int = 32) -> None:
        self.scratch, self.step_s, self.width = scratch, step_s, width
        (scratch / "train.py").write_text(SCRIPT)
        self.programs: list[subprocess.Popen[Any]] = []
        self.start: Callable[..., subprocess.Popen[Any]] = subprocess.Popen  # another one starts it on another host

    def run(
        self,
        name: str,
        words: str,
        *,
        n: int,
        epochs: int,
        more: Sequence[str] = (),
        **env: str,
    ) -> subprocess.Popen[Any]:
        """Start one; what it prints goes to a file."""
        script = ["train.py", f"stop-{name}", str(self.step_s), str(self.width), str(epochs)]
        options = ["-n", str(n), "--name", name, "--threads", "1", "--strategy", words, *more]
        with (self.scratch / f"{name}.txt").open("a") as out:
            program = self.start(
                [*PACELINE, *options, *script],
                cwd=self.scratch,
                env={**os.environ, **env},
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        self.programs.append(program)
        return program

    def said(self, name: str) -> str:
        path = self.scratch / f"{name}.txt"
        return path.read_text() if path.exists() else ""

    def stop(self, name: str) -> None:
        (self.scratch / f"stop-{name}").touch()

    def status(self, name: str) -> status.Doing | None:
        return status.read(self.scratch / "runs" / name / "status" / "rank-0", 0)

    def steps(self, name: str) -> int:
        found = self.status(name)
        return found.step if found else 0

    def summary(self, name: str) -> dict[str, Any]:
        return json.loads((self.scratch / "runs" / name / "summary.json").read_text())  # type: ignore[no-any-return]

    def until(self, done: Callable[[], bool], what: str, limit_s: float = 120.0) -> None:
        deadline = time.monotonic() + limit_s
        while not done():
            told = "\n".join(f"[{p.stem}] {p.read_text()[-3000:]}" for p in self.scratch.glob("*.txt"))
            assert time.monotonic() < deadline, f"not within {limit_s} s: {what}\n{told}"
            time.sleep(0.02)

    def ended(self, program: subprocess.Popen[Any], limit_s: float = 120.0) -> int:
        self.until(lambda: program.poll() is not None, f"the end of {program.args!r}", limit_s)
        return program.wait()


@contextlib.contextmanager
def party(scratch: Path, **options: Any) -> Iterator[Party]:
    made = Party(scratch, **options)
    try:
        yield made
    finally:
        for program in made.programs:
            if program.poll() is None:
                program.send_signal(signal.SIGTERM)
        for program in made.programs:
            try:
                program.wait(20)
            except subprocess.TimeoutExpired:
                program.kill()
                program.wait()
