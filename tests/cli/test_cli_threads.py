"""Workers with threads under `paceline run`: real processes, batches that are dealt, a killed worker."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import hashlib, os, signal, sys, threading, time, torch, paceline
from torch.nn import functional as F
run = paceline.join(progress="off", checkpoint_keep=0)
torch.manual_seed(run.seed)
model = torch.nn.Sequential(torch.nn.Linear(10, 32), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 4))
optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
generator = torch.Generator().manual_seed(3)
x = torch.randn(320, 10, generator=generator)
y = (x @ torch.randn(10, 4, generator=generator)).argmax(1)
loader = run.loader(torch.utils.data.TensorDataset(x, y, torch.arange(320)), batch_size=8)
threads, die, pause = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
mine, steps = threading.local(), 0

def loss_of(model, batch):
    mine.samples = batch[2].tolist()
    time.sleep(pause)
    loss = F.cross_entropy(model(batch[0]), batch[1])
    run.log(loss=loss)
    return loss

def step():
    global steps
    optimizer.step()
    steps += 1
    done.write(" ".join(map(str, mine.samples)) + " ")
    done.flush()
    if steps == die and run.rank == run.size - 1: os.kill(os.getpid(), signal.SIGKILL)

for epoch in run.epochs(3):
    with open(f"done-{epoch}-{run.rank}", "w") as done:
        if threads:
            run.in_threads(threads, loss_of, model, optimizer, loader, step)
        else:
            for batch in loader:
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                step()
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
model.eval()
print("END", run.rank, digest, float((model(x).argmax(1) == y).float().mean()))
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def run(*args: str, threads: int, die: int = 0, pause: float = 0.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline", "run", *args, "train.py", str(threads), str(die), str(pause)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ)


def ends(done: subprocess.CompletedProcess[str]) -> list[list[str]]:
    return sorted(line.split("END ")[1].split() for line in done.stdout.splitlines() if "END " in line)


def trained(epoch: int) -> list[int]:
    """The samples whose pushes came back, over all workers."""
    return sorted(int(word) for path in Path().glob(f"done-{epoch}-*") for word in path.read_text().split())


@pytest.mark.parametrize(
    "strategy", ["async", pytest.param("bounded(staleness=2)", marks=pytest.mark.slow)], ids=["async", "bounded"]
)
def test_every_sample_is_trained_once_per_epoch(strategy: str) -> None:
    done = run("-n", "2", "--strategy", strategy, threads=4, pause=0.002)
    assert done.returncode == 0, done.stderr
    for epoch in range(3):
        assert trained(epoch) == list(range(320))
    (_, first, right), (_, second, _) = ends(done)
    assert first == second  # the final parameters are handed to all
    assert float(right) > 0.6
    assert "120 pushes of" in done.stdout
    assert "versions old on average" in done.stdout
    assert "120 pushes of" in next(Path("runs").glob("*/report.html")).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["async", "bounded(staleness=2)"])
def test_others_do_what_a_killed_worker_has_left(strategy: str) -> None:
    done = run("-n", "2", "--strategy", strategy, threads=4, die=7, pause=0.005)
    assert done.returncode == 0, done.stderr
    assert "rank 1 was lost: exit code -9 (SIGKILL)" in done.stderr
    assert len(ends(done)) == 1
    first = trained(0)
    assert set(first) == set(range(320))
    assert len(first) <= 320 + 8  # but for a push whose word about it was still to come
    for epoch in (1, 2):
        assert trained(epoch) == list(range(320))


@pytest.mark.slow
def test_one_thread_equals_the_plain_loop_through_servers() -> None:
    ends_of = {}
    for threads in (0, 1):
        done = run("-n", "1", "--servers", "2", "--strategy", "async", threads=threads)
        assert done.returncode == 0, done.stderr
        ends_of[threads] = ends(done)
    assert ends_of[0] == ends_of[1]
    assert len(ends_of[0]) == 1


@pytest.mark.slow
def test_all_reduce_refuses_threads_by_name() -> None:
    done = run("-n", "2", threads=2)
    assert done.returncode != 0
    assert "use --strategy async or bounded" in done.stderr
