"""`paceline run --on torchrun`: what is started, and real runs under torchrun."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from paceline.core.errors import ConfigError
from paceline.environment import detect
from paceline.launch import engines, record
from paceline.launch.engines import starter_job, torchrun
from paceline.launch.spec import Elastic, JobSpec
from paceline.testing.processes import Process

ROOT = Path(__file__).parents[2]
TOKEN = "0123456789abcdef" * 4
ENV = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")} | {"OMP_NUM_THREADS": "1"}


def spec(tmp_path: Path, **more: object) -> JobSpec:
    (tmp_path / "train.py").touch()
    return JobSpec(script="train.py", args=("--lr", "1"), cwd=str(tmp_path), **more)  # type: ignore[arg-type]


def words(*options: str) -> list[str]:
    return [sys.executable, "-m", "paceline", "run", "--on", "torchrun", *options]


def paceline(tmp_path: Path, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words(*options), cwd=tmp_path, env=ENV | env, capture_output=True, text=True, timeout=400)


def two_ports() -> int:
    """The first of two that are free."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first, contextlib.suppress(OSError):
            port: int = first.getsockname()[1]
            socket.create_server(("127.0.0.1", port + 1)).close()
            return port


# ---- what is started


def test_the_command_on_one_host(tmp_path):
    shown = torchrun.Engine().preview(spec(tmp_path, num_members=4)).splitlines()
    first = shlex.split(shown[0])
    at = first.index("torch.distributed.run")
    assert first[at - 2 : at + 6] == [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nnodes",
        "1",
        "--nproc-per-node",
        "4",
    ]
    assert first[-4:] == [sys.executable, "train.py", "--lr", "1"]
    assert "PACELINE_TOKEN=<token>" in first
    assert "PACELINE_RENDEZVOUS=127.0.0.1:<port>" in first
    assert shown[1].startswith("# settings")
    assert len(shown) == 2


def test_a_module(tmp_path):
    shown = torchrun.Engine().preview(JobSpec(script="json.tool", module=True, num_members=1, cwd=str(tmp_path)))
    assert f"{sys.executable} -m json.tool\n" in shown


def test_the_commands_on_several_hosts(tmp_path, monkeypatch):
    """That of this one, and as a comment what to start on the others, where each says its number."""
    monkeypatch.setenv("PACELINE_TOKEN", "of another run")
    shown = torchrun.Engine(nodes=3, interface="lo", master_port=4711).preview(spec(tmp_path, num_members=6))
    own, others, _ = shown.splitlines()
    where = "--nnodes 3 --nproc-per-node 2 --node-rank {} --master-addr 127.0.0.1 --master-port 4711"
    assert where.format(0) in own
    assert where.format("I") in others
    assert others.startswith("# on the other hosts, I being 1 to 2, and PACELINE_TOKEN the same as here: ")
    for line in (own, others):
        assert "PACELINE_RENDEZVOUS=127.0.0.1:4712" in line
        assert line.endswith(f"{sys.executable} train.py --lr 1")
    assert "of another run" not in shown


@pytest.mark.parametrize(
    ("engine", "more", "message"),
    [
        ({}, {"elastic": Elastic(least=1, most=1)}, "torchrun ends all members when one is lost"),
        ({}, {"num_servers": 1}, "give --servers colocated"),
        ({}, {"labels": ("gpu",)}, "leave --label out"),
        ({"nodes": 3}, {"num_members": 4}, "-n 4 with --nodes 3: .* a multiple of 3"),
        ({"nodes": 2}, {"num_members": 4}, r"by which interface do the others reach this host\? --interface: .*lo"),
        ({"interface": "lo"}, {}, "--interface: without --nodes"),
        ({"master_port": 4711}, {}, "--master-port: without --nodes"),
    ],
)
def test_what_torchrun_cannot_do_is_refused(engine, more, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        torchrun.Engine(**engine).prepare(spec(tmp_path, **more))


def test_what_the_other_hosts_need_is_said_by_name(tmp_path):
    shown = torchrun.Engine(nodes=2, interface="lo").preview(spec(tmp_path, num_members=2, env={"KEY": "secret"}))
    assert "and PACELINE_TOKEN, KEY the same as here: " in shown
    assert "secret" not in shown.splitlines()[1]


def test_several_hosts_need_a_token(tmp_path, monkeypatch):
    engine = torchrun.Engine(nodes=2, interface="lo", master_port=two_ports())
    for token, message in (("", "PACELINE_TOKEN is not set"), ("short", "PACELINE_TOKEN has 5 characters")):
        monkeypatch.setenv("PACELINE_TOKEN", token)
        with pytest.raises(ConfigError, match=message):
            engine.check(spec(tmp_path, num_members=2))
    monkeypatch.setenv("PACELINE_TOKEN", TOKEN)
    engine.check(spec(tmp_path, num_members=2))


@pytest.mark.parametrize("before", [0, 1])
def test_a_port_that_is_in_use(before, tmp_path, monkeypatch):
    """torchrun's own, or that of the rendezvous."""
    monkeypatch.setenv("PACELINE_TOKEN", TOKEN)
    port = two_ports()
    engine = torchrun.Engine(nodes=2, interface="lo", master_port=port)
    with socket.create_server(("127.0.0.1", port + before)):
        with pytest.raises(ConfigError, match=rf"--master-port {port}: cannot listen at 127.0.0.1:{port + before} "):
            engine.check(spec(tmp_path, num_members=2))


def test_members_are_told_where_to_meet():
    """As torchrun tells the rest; without it they meet in torchrun's store."""
    its = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a"}
    its |= {"MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x"}
    place = detect(its | {"PACELINE_RENDEZVOUS": "127.0.0.1:5", "PACELINE_TOKEN": "t", "PACELINE_SERVERS": "0"})
    assert (place.kind, place.rank, place.size, place.launched) == ("torchrun", 1, 2, True)
    assert (place.rendezvous, place.token) == ("127.0.0.1:5", "t")
    assert not detect(its).launched
    with pytest.raises(ConfigError, match="PACELINE_TOKEN is not set"):
        detect(its | {"PACELINE_RENDEZVOUS": "127.0.0.1:5"})


# ---- what it writes

SAID = """\
[paceline-rank0]:whole
[paceline-rank0]:part [paceline-rank1]:other
[paceline-rank0]:98%
W1118 21:51:06.743000 6118 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 6243 closing signal
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
torch.distributed.DistNetworkError: The server socket has failed to listen
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
Failures:
[1]:
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 6243)  (SIGTERM)
Root Cause (first observed failure):
[0]:
  time      : 2026-11-18_21:51:06
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 6247)  (SIGKILL)
[paceline-rank1]:the end
"""


def test_lines_are_told_apart_by_rank(tmp_path):
    lines: list[tuple[int, str, str]] = []
    said: list[str] = []
    show = types.SimpleNamespace(line=lambda *line: lines.append(line), raw=None)
    dialect = torchrun.Dialect()
    output = starter_job.Output(tmp_path / "logs", 2, engines.Shown(show=show, say=said.append), dialect)
    for text in SAID.splitlines():
        output.line(0, "out", text)
    output.close()
    assert lines == [(0, "out", "whole"), (1, "out", "other"), (0, "out", "part 98%"), (1, "out", "the end")]
    assert dialect.failed == (1, -9)
    assert said == ["torchrun: torch.distributed.DistNetworkError: The server socket has failed to listen"]
    assert (tmp_path / "logs/rank-0.log").read_text() == "whole\npart 98%\n"


# ---- real runs


def test_members_under_torchrun(tmp_path):
    """With the options of the command line, under which the script's own do not count."""
    script = "import paceline, sys\nrun = paceline.join(name='other', seed=1)\nrun.barrier()\n"
    script += "print(run.rank, run.size, run.settings.seed, run.dir.name, sys.argv[1:])\n"
    (tmp_path / "train.py").write_text(script)
    done = paceline(tmp_path, "-n", "2", "--name", "big", "--seed", "7", "train.py", "--lr", "1")
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"[{rank}] {rank} 2 7 big ['--lr', '1']" in done.stdout
        assert f"{rank} 2 7 big" in (tmp_path / f"runs/big/logs/rank-{rank}.log").read_text()
    assert sorted(path.name for path in (tmp_path / "runs/big/logs").iterdir()) == ["rank-0.log", "rank-1.log"]
    run = record.read(tmp_path / "runs/big")
    assert run is not None
    assert run.exit_code == 0


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--strategy", "async", "--servers", "colocated"), ("--transport", "gloo")])
def test_the_digits_train(more, tmp_path):
    pytest.importorskip("sklearn")
    done = paceline(tmp_path, "-n", "2", *more, str(ROOT / "examples/digits.py"))
    assert done.returncode == 0, done.stderr
    accuracy = [line.split()[-1] for line in done.stdout.splitlines() if line.startswith("[0] test accuracy:")]
    assert len(accuracy) == 1, done.stdout
    assert float(accuracy[0].rstrip("%")) >= 97.0


LONG = """
import os, pathlib, time, paceline
run = paceline.join()
pathlib.Path(f"pid-{run.rank}").write_text(str(os.getpid()))
for _ in run.epochs(1):
    time.sleep(300)
"""


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["launcher killed", "member killed", "stopped"])
def test_no_member_outlives_the_others(fault, tmp_path):
    (tmp_path / "train.py").write_text(LONG)
    with subprocess.Popen(
        words("-n", "2", "train.py"), cwd=tmp_path, env=ENV, stderr=subprocess.PIPE, text=True
    ) as run:
        files = [tmp_path / f"pid-{rank}" for rank in range(2)]
        deadline = time.monotonic() + 200
        while not all(file.exists() and file.read_text() for file in files):
            assert time.monotonic() < deadline
            assert run.poll() is None, run.communicate()
            time.sleep(0.1)
        members = [Process.of(int(file.read_text())) for file in files]
        if fault == "launcher killed":
            run.kill()
        elif fault == "stopped":
            run.terminate()
        else:
            os.kill(int(files[1].read_text()), signal.SIGKILL)
        _, said = run.communicate(timeout=120)
    deadline = time.monotonic() + 60
    while any(member and member.alive for member in members):
        assert time.monotonic() < deadline, said
        time.sleep(0.1)
    if fault == "member killed":
        assert run.returncode == 128 + signal.SIGKILL
        assert "rank 1 failed first: exit code -9 (SIGKILL)" in said
    elif fault == "stopped":
        assert run.returncode == 128 + signal.SIGTERM
        assert "stopped by SIGTERM; to go on: paceline run" in said


@pytest.mark.slow
def test_two_hosts(tmp_path):
    """Both on this machine's loopback; the second is what the first one says."""
    script = "import paceline, torch\nrun = paceline.join()\n"
    script += "print('sum', run.all_reduce(torch.tensor([run.rank + 1.0])).item(), run.rank, run.size, flush=True)\n"
    (tmp_path / "train.py").write_text(script)
    port = str(two_ports())
    options = ("-n", "2", "--nodes", "2", "--interface", "lo", "--master-port", port, "--name", "two", "train.py")
    env = ENV | {"PACELINE_TOKEN": TOKEN, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    dry = paceline(tmp_path, *options[:-1], "--dry-run", "train.py", **env)
    told = next(line for line in dry.stdout.splitlines() if line.startswith("# on the other hosts"))
    other = told.partition("as here: ")[2].replace("--node-rank I", "--node-rank 1")
    pipe = subprocess.PIPE
    with (
        subprocess.Popen(words(*options), cwd=tmp_path, env=env, stdout=pipe, stderr=pipe, text=True) as first,
        subprocess.Popen(other, shell=True, cwd=tmp_path, env=env, stdout=pipe, stderr=pipe, text=True) as second,
    ):
        said, errors = first.communicate(timeout=300)
        there, more = second.communicate(timeout=120)
    assert first.returncode == second.returncode == 0, errors + more
    assert "[0] sum 3.0 0 2" in said
    assert "sum 3.0 1 2" in there
