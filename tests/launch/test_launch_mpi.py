"""`paceline run --on mpi`: what is started, and real runs under mpirun."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from paceline.core.errors import ConfigError
from paceline.core.settings import Settings
from paceline.environment import this_host
from paceline.launch import engines, record
from paceline.launch.beforehand import shows_gpu
from paceline.launch.engines import mpi, starter_job
from paceline.launch.spec import Elastic, JobSpec
from paceline.testing.hosts import Hosts
from paceline.testing.processes import Process

ROOT = Path(__file__).parents[2]
MPIRUN = "mpirun --oversubscribe"
needs_mpirun = pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun: apt-get install openmpi-bin")


def spec(tmp_path: Path, **more: object) -> JobSpec:
    (tmp_path / "train.py").touch()
    return JobSpec(script="train.py", args=("--lr", "1"), cwd=str(tmp_path), **more)  # type: ignore[arg-type]


def split(words: list[str]) -> list[list[str]]:
    at = words.index(":")
    return [words[:at], words[at + 1 :]]


def test_the_command(tmp_path):
    words = mpi.command(spec(tmp_path, num_members=4), "mpirun --hostfile 'my hosts'")
    assert words[:6] == ["mpirun", "--hostfile", "my hosts", "--tag-output", "--bind-to", "none"]
    assert words[6:8] == ["-n", "4"]
    assert words[-4:] == [sys.executable, "train.py", "--lr", "1"]
    carried = [words[i + 1] for i, word in enumerate(words) if word == "-x"]
    assert {"PACELINE_RENDEZVOUS", "PACELINE_TOKEN", "PACELINE_SERVERS"} <= set(carried)
    assert not any("=" in name for name in carried)  # or the token would show in `ps`


def test_servers_come_after_the_workers(tmp_path):
    workers, servers = split(mpi.command(spec(tmp_path, num_members=3, num_servers=2), "mpirun"))
    assert workers[workers.index("-n") + 1] == "3"
    assert servers[:2] == ["-n", "2"]
    assert servers[-3:] == [sys.executable, "-m", "paceline.server"]


def test_options_of_the_user_and_of_another_version_are_kept(tmp_path):
    words = mpi.command(spec(tmp_path), "mpirun --bind-to socket", major=5)
    assert words[:5] == ["mpirun", "--bind-to", "socket", "--output", "tag"]


def test_what_is_previewed_holds_no_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_TOKEN", "of another run")
    shown = mpi.Engine().preview(spec(tmp_path, num_members=2))
    assert "PACELINE_TOKEN='<token>'" in shown
    assert "of another run" not in shown
    assert shown.splitlines()[-1].startswith("# settings")


def test_what_mpirun_cannot_do_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="mpirun ends all ranks when one is lost"):
        mpi.Engine().prepare(spec(tmp_path, elastic=Elastic(least=1, most=1)))
    with pytest.raises(ConfigError, match="--label has no meaning"):
        mpi.Engine().prepare(spec(tmp_path, labels=("gpu",)))


def test_an_mpirun_that_is_not_there_or_somebody_elses(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no 'mpirun-nowhere' here; install Open MPI .*apt-get"):
        mpi.Engine(mpirun="mpirun-nowhere").check(spec(tmp_path))
    other = tmp_path / "mpiexec"
    other.write_text("#!/bin/sh\necho 'HYDRA build details:'\n")
    other.chmod(0o755)
    with pytest.raises(ConfigError, match=r"is not Open MPI's .it says 'HYDRA build details:'"):
        mpi.Engine(mpirun=str(other)).check(spec(tmp_path))


def test_lines_are_told_apart_by_rank(tmp_path):
    """As mpirun writes them: a tag before each part that a rank has written, others' in between."""
    lines: list[tuple[int, str, str]] = []
    said: list[str] = []
    show = types.SimpleNamespace(line=lambda *line: lines.append(line), raw=None)
    dialect = mpi.Dialect()
    output = starter_job.Output(tmp_path / "logs", 2, engines.Shown(show=show, say=said.append), dialect)
    for text in (
        "[1,0]<stdout>:whole",
        "[1,0]<stdout>:acc: [1,1]<stdout>:other",
        "[1,0]<stdout>:98%[1,0]<stdout>:",
        "[1,1]<stderr>: two  blanks",
        "[prterun-n1-7@1,1]<stdout>: of five",
        "mpirun noticed that process rank 1 with PID 0 on node n1 exited on signal 9 (Killed).",
        "-----",
        "[1,0]<stdout>:the end",
    ):
        output.line(0, "out", text)
    output.close()
    assert lines == [
        (0, "out", "whole"),
        (1, "out", "other"),
        (0, "out", "acc: 98%"),
        (1, "err", " two  blanks"),
        (1, "out", "of five"),
        (0, "out", "the end"),
    ]
    assert dialect.failed == (1, -9)
    assert len(said) == 1
    assert (tmp_path / "logs/rank-0.log").read_text() == "whole\nacc: 98%\nthe end\n"


def environment() -> dict[str, str]:
    return os.environ | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1"}


def paceline(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline", "run", "--on", "mpi", "--mpirun", MPIRUN, *words]
    return subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=400)


@needs_mpirun
def test_too_few_slots_are_one_error(tmp_path):
    (tmp_path / "train.py").touch()
    done = paceline(tmp_path, "-n", "64", "--mpirun", "mpirun --host localhost:2", "train.py")
    assert done.returncode == 2
    assert "started 0 of 64 processes. It says:" in done.stderr
    assert "not enough slots" in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.skipif(shows_gpu(), reason="this host has a GPU")
@pytest.mark.parametrize("has", [True, False])
def test_gpus_are_looked_for_where_the_members_will_be(tmp_path, has):
    (tmp_path / "train.py").touch()
    told = json.dumps(["far", "3.11.7", "2.13.0", "0.1.0", "far-1", has])
    fake = tmp_path / "mpirun"  # of hosts that this one does not have
    fake.write_text(f"#!/bin/sh\n[ $1 = --version ] && echo '(Open MPI) 4.1.4' || echo 'paceline-rank {told}'\n")
    fake.chmod(0o755)
    engine = engines.make("mpi", {"mpirun": str(fake)})
    spec = JobSpec(script="train.py", cwd=str(tmp_path), settings=Settings().with_(device="cuda"))
    words = ("-n", "1", "--mpirun", str(fake), "--device", "cuda", "--dry-run", "train.py")
    assert paceline(tmp_path, *words).returncode == 0
    if has:
        engine.check(spec)
        return
    with pytest.raises(ConfigError, match="host far, where mpirun would start members, shows no GPU"):
        engine.check(spec)


@pytest.mark.parametrize(("far", "said"), [(True, "this host has"), (False, "would start all members on this host")])
def test_an_interface_that_leads_nowhere(far, said, tmp_path):
    told = json.dumps(["far", "3.11.7", "2.13.0", "0.1.0", "far-1" if far else this_host(), True])
    fake = tmp_path / "mpirun"
    fake.write_text(f"#!/bin/sh\n[ $1 = --version ] && echo '(Open MPI) 4.1.4' || echo 'paceline-rank {told}'\n")
    fake.chmod(0o755)
    engine = engines.make("mpi", {"mpirun": str(fake), "interface": "nothing0"})
    with pytest.raises(ConfigError, match=f"--interface.*{said}"):
        engine.check(JobSpec(script="train.py", cwd=str(tmp_path), settings=Settings()))


@needs_mpirun
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["allreduce", "async"])
def test_the_digits_train(strategy, tmp_path):
    pytest.importorskip("sklearn")
    words = ("-n", "2", "--strategy", strategy, "--name", "digits", str(ROOT / "examples/digits.py"))
    done = paceline(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    accuracy = [line.split()[-1] for line in done.stdout.splitlines() if line.startswith("[0] test accuracy:")]
    assert len(accuracy) == 1, done.stdout
    assert float(accuracy[0].rstrip("%")) >= 97.0
    run = record.read(tmp_path / "runs/digits")
    assert run is not None
    assert run.exit_code == 0
    assert "test accuracy" in (tmp_path / "runs/digits/logs/rank-0.log").read_text()


@needs_mpirun
@pytest.mark.slow
def test_the_rank_that_failed_is_named(tmp_path):
    lines = ["import paceline, sys", "run = paceline.join()", "print('hello')"]
    lines += ["if run.rank == 1: sys.exit('no luck today')", "run.barrier()"]
    (tmp_path / "train.py").write_text("\n".join(lines))
    done = paceline(tmp_path, "-n", "2", "--name", "fails", "train.py")
    assert done.returncode == 1, done.stderr
    assert "paceline: rank 1 failed first: exit code 1" in done.stderr
    assert "    no luck today\n" in done.stderr
    assert (tmp_path / "runs/fails/logs/rank-1.log").read_text() == "hello\nno luck today\n"


LONG = """
import os, pathlib, time, paceline
run = paceline.join()
pathlib.Path(f"pid-{run.rank}").write_text(str(os.getpid()))
for _ in run.epochs(1):
    time.sleep(300)
"""


@needs_mpirun
@pytest.mark.slow
@pytest.mark.parametrize("fault", ["launcher killed", "rank killed", "stopped"])
def test_no_rank_outlives_the_others(fault, tmp_path):
    (tmp_path / "train.py").write_text(LONG)
    command = [sys.executable, "-m", "paceline", "run", "--on", "mpi", "--mpirun", MPIRUN, "-n", "2", "train.py"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True) as run:
        files = [tmp_path / f"pid-{rank}" for rank in range(2)]
        deadline = time.monotonic() + 100
        while not all(file.exists() and file.read_text() for file in files):
            assert time.monotonic() < deadline
            assert run.poll() is None, run.communicate()
            time.sleep(0.1)
        ranks = [Process.of(int(file.read_text())) for file in files]
        if fault == "launcher killed":
            run.kill()
        elif fault == "stopped":
            run.terminate()
        else:
            os.kill(int(files[1].read_text()), signal.SIGKILL)
        _, said = run.communicate(timeout=60)
    deadline = time.monotonic() + 30
    while any(rank and rank.alive for rank in ranks):
        assert time.monotonic() < deadline, said
        time.sleep(0.1)
    if fault == "rank killed":
        assert run.returncode == 128 + signal.SIGKILL
        assert "rank 1 failed first: exit code -9 (SIGKILL)" in said
    elif fault == "stopped":
        assert run.returncode == 128 + signal.SIGTERM
        assert "stopped by SIGTERM; to go on: paceline run" in said


@needs_mpirun
@pytest.mark.slow
@pytest.mark.skipif(bool(Hosts.missing()), reason=Hosts.missing() or "hosts can be made")
def test_two_hosts_train(tmp_path):
    """Two network namespaces; what leads to the other one, where mpirun would call ssh, is a script."""
    script = "import paceline, torch\nrun = paceline.join()\nsum = run.all_reduce(torch.tensor([run.rank + 1.0]))\n"
    script += "from paceline.environment import this_host\nprint('sum', sum.item(), this_host(), flush=True)\n"
    (tmp_path / "train.py").write_text(script)
    with Hosts(2) as hosts:
        agent = tmp_path / "agent"
        agent.write_text(f"""#!/bin/sh\nshift\nexec ip netns exec {hosts.name(1)} sh -c "$*"\n""")
        agent.chmod(0o755)
        reach = f"{MPIRUN} --mca plm_rsh_agent {agent} --host {hosts.ips[0]}:1,{hosts.ips[1]}:1"
        words = ["run", "--on", "mpi", "--mpirun", reach, "--interface", "eth0", "-n", "2", "--name", "two", "train.py"]
        command = [sys.executable, "-m", "paceline", *words]
        pipe = subprocess.PIPE
        run = hosts.popen(0, command, environment(), cwd=tmp_path, stdout=pipe, stderr=pipe, text=True)
        said, errors = run.communicate(timeout=120)
    assert run.returncode == 0, errors
    told = [line.split() for line in said.splitlines() if " sum " in line]
    assert sorted(words[:3] for words in told) == [["[0]", "sum", "3.0"], ["[1]", "sum", "3.0"]], said
    assert told[0][3] != told[1][3], said
