"""`paceline run` with servers, as a user meets it: real processes, a killed worker, a resumed run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.core import status

SCRIPT = """
import glob, hashlib, os, signal, sys, time, torch, paceline
from torch.nn import functional as F
run = paceline.join(progress="off", checkpoint_keep=2)
torch.manual_seed(run.seed)
model = torch.nn.Sequential(torch.nn.Linear(10, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
momentum = 0.0 if "plain" in sys.argv else 0.5
optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum), model)
generator = torch.Generator().manual_seed(3)
x = torch.randn(160, 10, generator=generator)
y = (x @ torch.randn(10, 4, generator=generator)).argmax(1)
loader = run.loader(torch.utils.data.TensorDataset(x, y), batch_size=8)
die, step = int(sys.argv[1]), 0
slow = 0.1 if "slow" in sys.argv and run.rank or "last" in sys.argv and run.rank == run.size - 1 else 0.0
for epoch in run.epochs(int(sys.argv[2])):
    seen = 0
    for a, b in loader:
        seen += len(a)
        time.sleep(slow)
        optimizer.zero_grad()
        F.cross_entropy(model(a), b).backward()
        optimizer.step()
        step += 1
        if step == die and run.rank == run.size - 1:
            open(f"died-{os.getpid()}", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        while "twice" in sys.argv and step == 2 and run.rank < run.size - 1 and len(glob.glob("died-*")) < 2:
            time.sleep(0.05)
    print("SEEN", epoch, run.rank, seen)
right = run.evaluate(lambda a, b: {"right": (model(a).argmax(1) == b).float()}, torch.utils.data.TensorDataset(x, y))
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
print("PUSHES", run.rank, *(run._strategy.readings().get(k) for k in ("pushes", "dropped_pushes")))
print("END", run.rank, run.size, digest, f"{right['right']:.3f}")
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def run(*args: str, die: int = 0, epochs: int = 3, more: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline", "run", *args, "train.py", str(die), str(epochs), more]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ)


def seen(done: subprocess.CompletedProcess[str], epoch: int) -> dict[int, int]:
    """Samples by rank."""
    told = [line.split("SEEN ")[1].split() for line in done.stdout.splitlines() if "SEEN " in line]
    return {int(rank): int(count) for number, rank, count in told if int(number) == epoch}


def ends(done: subprocess.CompletedProcess[str]) -> list[list[str]]:
    return [line.split("END ")[1].split() for line in done.stdout.splitlines() if "END " in line]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--strategy", "async"], "1 server for 2 workers"),
        pytest.param(
            ["--strategy", "bounded(staleness=2)", "--servers", "2"], "2 servers, as asked for", marks=pytest.mark.slow
        ),
        pytest.param(["--strategy", "sync"], "a shard with every worker", marks=pytest.mark.slow),
    ],
)
def test_workers_train_and_end_with_the_same_weights(args: list[str], said: str) -> None:
    done = run("-n", "2", *args)
    assert done.returncode == 0, done.stderr
    assert said in done.stderr
    first, second = sorted(ends(done))
    assert first[1:3] == ["2", second[2]]
    assert float(first[3]) > 0.6
    assert "0 B" not in done.stderr.split("all")[-1].split("\n")[0]  # the bytes that were pushed


@pytest.mark.parametrize("strategy", [pytest.param("async", marks=pytest.mark.slow), "bounded(staleness=2)"])
def test_a_killed_worker_stops_nobody(strategy: str) -> None:
    done = run("-n", "3", "--strategy", strategy, die=9)
    assert done.returncode == 0, done.stderr
    assert "rank 2 was lost: exit code -9 (SIGKILL)" in done.stderr
    (record,) = Path("runs").iterdir()
    (lost,) = json.loads((record / "summary.json").read_text())["lost"]
    assert (lost["rank"], lost["how"]) == (2, "killed by signal 9")
    assert lost["at"] > 0
    assert "member 2 was lost (killed by signal 9)" in (record / "report.html").read_text()
    assert "member 2 was lost (killed by signal 9)\n" in done.stdout  # the summary
    told = [json.loads(line) for line in (record / "events" / "rank-0.jsonl").read_text().splitlines()]
    assert [event["member"] for event in told if event["kind"] == "lost"] == [2]
    assert len(ends(done)) == 2
    assert sum(seen(done, 2).values()) == 160  # after it was lost, nothing is missing


def test_rounds_with_backups_are_closed_alike_by_two_servers() -> None:
    done = run("-n", "2", "--servers", "2", "--strategy", "sync(backups=1)", more="last")
    assert done.returncode == 0, done.stderr
    assert len(ends(done)) == 2
    assert len({end[2] for end in ends(done)}) == 1
    assert float(ends(done)[0][3]) > 0.6
    told = sorted(line.split("PUSHES ")[1].split() for line in done.stdout.splitlines() if "PUSHES" in line)
    fast, slow = (int(pushes) for _, pushes, *_ in told)
    assert fast + slow == 3 * 160 / 8
    assert fast > slow  # it was not waited for


@pytest.mark.slow
def test_rounds_with_backups_go_on_without_a_killed_worker() -> None:
    done = run("-n", "3", "--servers", "2", "--strategy", "sync(backups=1)", die=9)
    assert done.returncode == 0, done.stderr
    assert "rank 2 was lost: exit code -9 (SIGKILL)" in done.stderr
    assert len(ends(done)) == 2
    assert len({end[2] for end in ends(done)}) == 1


@pytest.mark.slow
def test_rounds_with_backups_and_a_shard_with_every_worker() -> None:
    args = ["-n", "3", "--servers", "colocated", "--strategy", "sync(backups=1)"]
    done = run(*args, more="last")
    assert done.returncode == 0, done.stderr
    assert len(ends(done)) == 3
    assert len({end[2] for end in ends(done)}) == 1
    lost = run(*args, die=5)
    assert lost.returncode == 137
    assert "rank 2 failed first" in lost.stderr


@pytest.mark.slow
def test_a_slow_worker_gets_fewer_batches() -> None:
    done = run("-n", "2", "--strategy", "async", more="slow")
    assert done.returncode == 0, done.stderr
    for epoch in range(3):
        counts = seen(done, epoch)
        assert sum(counts.values()) == 160
        assert counts[0] > 2 * counts[1]


@pytest.mark.parametrize(
    "args",
    [
        ["--strategy", "sync"],
        pytest.param(["--strategy", "async", "--servers", "colocated"], marks=pytest.mark.slow),
    ],
)
def test_a_killed_worker_that_the_others_need_ends_the_run_by_name(args: list[str]) -> None:
    done = run("-n", "2", *args, die=5)
    assert done.returncode == 137
    assert "rank 1 failed first" in done.stderr


@pytest.mark.slow
def test_a_killed_server_without_a_checkpoint_ends_the_run_by_name() -> None:
    command = [sys.executable, "-m", "paceline", "run", "-n", "2", "--strategy", "async", "--name", "x"]
    command += ["--checkpoint-keep", "0", "train.py"]
    with subprocess.Popen([*command, "0", "1000", "slow"], stderr=subprocess.PIPE, text=True) as launcher:
        record = Path("runs/x/run.json")
        deadline = time.monotonic() + 60
        while "serving" not in _doing(2) and time.monotonic() < deadline:
            time.sleep(0.1)
        os.kill(json.loads(record.read_text())["members"][2], signal.SIGKILL)
        _, told = launcher.communicate(timeout=60)
    assert launcher.returncode == 137
    assert "server 0 (rank 2) was killed by signal 9" in told
    assert "it held a part of the parameters" in told
    assert "to go on from the last checkpoint, where there is one: paceline run" in told
    assert "smaller batch" not in told
    assert "was lost" not in told


def _doing(rank: int) -> str:
    doing = status.read(Path(f"runs/x/status/rank-{rank}"), rank)
    return doing.what if doing else ""


@pytest.mark.slow
def test_sync_resumes_on_another_number_of_servers_as_if_nothing_had_been() -> None:
    whole = run("-n", "2", "--strategy", "sync", "--name", "whole", epochs=4)
    run("-n", "2", "--strategy", "sync", "--name", "two", "--servers", "1", epochs=2)
    again = run("-n", "2", "--strategy", "sync", "--name", "two", "--servers", "2", epochs=4)
    assert again.returncode == 0, again.stderr
    assert {end[2] for end in ends(again)} == {end[2] for end in ends(whole)}


@pytest.mark.slow
def test_async_resumes_with_what_its_corrections_keep_on_another_number_of_servers() -> None:
    strategy = "async(correct='compensate(adaptive=True) + dana(0.5)')"
    whole = run("-n", "1", "--strategy", strategy, "--servers", "1", "--name", "whole", epochs=4, more="plain")
    run("-n", "1", "--strategy", strategy, "--servers", "1", "--name", "two", epochs=2, more="plain")
    again = run("-n", "1", "--strategy", strategy, "--servers", "2", "--name", "two", epochs=4, more="plain")
    assert again.returncode == 0, again.stderr
    assert [end[2] for end in ends(again)] == [end[2] for end in ends(whole)] != []


def test_servers_without_a_use_for_them() -> None:
    done = run("-n", "2", "--servers", "2")
    assert done.returncode == 2
    assert "allreduce has no servers" in done.stderr


@pytest.mark.slow
def test_a_loss_is_told_while_the_others_go_on() -> None:
    Path("train.py").write_text(
        """
import os, signal, time, torch, paceline
run = paceline.join(progress="off", checkpoint_keep=0)
model = torch.nn.Linear(2, 2)
optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
for epoch in run.epochs(1):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    if run.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    deadline = time.monotonic() + 60
    while not os.path.exists("told") and time.monotonic() < deadline:
        time.sleep(0.05)
    print("told while it went on" if os.path.exists("told") else "never told", flush=True)
"""
    )
    command = [sys.executable, "-m", "paceline", "run", "-n", "2", "--strategy", "async", "train.py"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        assert started.stderr
        assert started.stdout
        for line in started.stderr:
            if "member 1 was lost (killed by signal 9); the others go on, its batches are dealt to them" in line:
                Path("told").touch()
        assert "told while it went on" in started.stdout.read()
    assert started.returncode == 0


@pytest.mark.slow
def test_a_gate_turned_to_sync_needs_every_worker_and_the_ending_says_so() -> None:
    script = SCRIPT.replace("    seen = 0\n", "    seen = 0\n    run.turn('sync')\n")
    Path("train.py").write_text(script)
    done = run("-n", "3", "--strategy", "async", epochs=1)
    assert done.returncode == 0, done.stderr
    assert sorted(seen(done, 0).values()) == [53, 53, 54]  # shared out evenly, so that nobody waits for a push
    done = run("-n", "3", "--strategy", "async", die=3)
    assert done.returncode == 137, done.stderr
    assert "rank 2 failed first: exit code -9 (SIGKILL)" in done.stderr
    assert "went on without it" not in done.stderr
    assert "the others go on" not in done.stderr


@pytest.mark.slow
def test_a_killed_worker_is_started_again() -> None:
    """It is killed at its fifth step each time; the others leave it enough to do until then."""
    done = run("-n", "2:3", "--replacements", "1", "--strategy", "async", die=5, more="twice")
    assert done.returncode == 0, done.stderr
    assert "3 members (at least 2; each started again up to 1 times)" in done.stderr
    assert "member 2 was killed by signal 9; the others go on; it is started again in 0.5 s (1 of 1)" in done.stderr
    assert "on the way, and the run finished: 2: killed by signal 9 (runs/" in done.stderr
    (record,) = Path("runs").iterdir()
    lost = json.loads((record / "summary.json").read_text())["lost"]
    assert (lost[0]["rank"], lost[0]["again"]) == (2, True)
    assert len(ends(done)) == 2


@pytest.mark.slow
def test_a_script_that_fails_at_once_is_not_started_again() -> None:
    Path("train.py").write_text("import paceline\nrun = paceline.join()\nraise ValueError('no')")
    done = run("-n", "2", "--replacements", "2", "--strategy", "async")
    assert done.returncode == 1
    assert "started again in" not in done.stderr
