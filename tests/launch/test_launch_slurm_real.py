"""`--on slurm` and srun in a real Slurm: a controller and two nodes on this machine."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.core.errors import PacelineError
from paceline.testing.slurm import Slurm
from tests.launch._slurm import DIGITS, LIMIT_S, Site, started

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with contextlib.closing(started(tmp_path_factory.mktemp("slurm"), *Slurm.PREEMPTS)) as running:
        yield running


@pytest.fixture
def site(slurm: Slurm, tmp_path: Path) -> Iterator[Site]:
    yield Site(tmp_path / "work", slurm)
    slurm.cancel_all()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def accuracy(text: str) -> float:
    found = re.findall(r"test accuracy: ([\d.]+)%", text)
    assert len(found) == 1, text
    return float(found[0])


def steps(site: Site) -> int:
    """Done so far, as far as was printed."""
    return max(map(int, re.findall(r"epoch 1 +step (\d+)", site.said())), default=0)


def resumed(text: str) -> list[int]:
    return [int(step) for step in re.findall(r"resumed at step (\d+)", text)]


def hurried(site: Site, job: str) -> bool:
    """A job that was requeued would begin two minutes later."""
    if site.state(job) == "PENDING":
        with contextlib.suppress(PacelineError):  # it begins meanwhile
            site.slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now")
    return True


def saved(site: Site) -> list[int]:
    return sorted(int(path.name.rpartition("-")[2]) for path in (site.run / "checkpoints").glob("step-*"))


def test_digits_reach_their_accuracy_in_a_job(site: Site) -> None:
    job = site.submit("-n", "2", "--nodes", "2", "--env", "KEY=not-to-be-seen", DIGITS)
    followed = site.paceline("logs", "it", "--follow")
    assert accuracy(followed.stdout) >= 97.0
    site.until(lambda: site.state(job) == "COMPLETED", "the end of the job")
    assert {"host n1 has joined", "host n2 has joined"} <= set(re.findall(r"host n\d has joined", site.said()))
    assert f"Slurm job {job} ended: completed" in site.paceline("status", "it").stdout


def test_digits_in_an_allocation_survive_the_loss_of_a_member(site: Site) -> None:
    words = ["salloc", "--nodes=2", "--ntasks=2", sys.executable, "-m", "paceline", "run"]
    words += ["-n", "2", "--on", "slurm", "--name", "it", "--standbys", "0", DIGITS, "--epochs", "40"]
    with subprocess.Popen(
        words, cwd=site.dir, env=site.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        site.until(lambda: "epoch 2/40" in site.log() or process.poll() is not None, "the second epoch")
        status = site.paceline("status", "it").stdout
        found = re.search(r"^ +1 +in .*?(\d+) on n\d", status, flags=re.M)
        assert found, status
        os.kill(int(found[1]), signal.SIGKILL)
        out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, out
    assert re.search(r"member 1( on n\d)? was killed by signal 9; the others", out), out
    assert accuracy(out) >= 97.0


def test_the_token_is_on_no_command_line(site: Site) -> None:
    site.submit("-n", "2", "--nodes", "2", "--env", "KEY=not-to-be-seen", "long.py")
    site.until(lambda: "trains" in site.log(), "the first steps")
    found = re.search(r'"token":"(\w+)"', (site.run / "scheduler.json").read_text())
    assert found
    shown = site.call("ps", "-eo", "args").stdout
    assert "paceline agent --join - --together --name n2" in shown
    assert found[1] not in shown
    assert "not-to-be-seen" not in shown
    assert (site.run / "scheduler.json").stat().st_mode & 0o077 == 0


def test_a_run_is_scaled_and_stopped(site: Site) -> None:
    job = site.submit("-n", "1:2", "--nodes", "2", "long.py")
    site.until(lambda: "trains" in site.log(), "the first steps")
    assert site.paceline("scale", "it", "1").stdout.startswith("2 to 1 members")
    site.until(lambda: re.search(r"member \d has left", site.said()), "one to leave")
    done = site.paceline("stop", "it")
    assert done.returncode == 0, done.stderr
    assert "ended with exit code 143" in done.stdout
    site.until(lambda: site.state(job) == "FAILED", "the end of the job")
    assert len(saved(site)) == 1
    assert "is over already" in site.paceline("stop", "it").stdout


def test_a_job_that_is_cancelled_leaves_a_checkpoint(site: Site) -> None:
    job = site.submit("-n", "2", "--nodes", "2", "long.py")
    site.until(lambda: "trains" in site.log(), "the first steps")
    site.slurm.run("scancel", job)
    site.until(lambda: site.record and site.record.finished, "the end of the run")
    site.until(lambda: site.state(job) == "CANCELLED", "the end of the job")
    (step,) = saved(site)
    site.submit("-n", "2", "--nodes", "2", "long.py")
    site.until(lambda: resumed(site.log()), "the run to go on")
    assert resumed(site.log()) == [step]


@pytest.mark.parametrize("why", ["time", "preempted"])
def test_a_run_that_must_go_waits_and_goes_on(site: Site, why: str) -> None:
    job = site.submit("-n", "2", "--nodes", "2", "--requeue", "long.py")
    site.until(lambda: "trains" in site.log(), "the first steps")
    if why == "time":
        site.slurm.run("scancel", "--batch", "--signal=USR1", job)  # as Slurm does a minute before
    else:
        site.slurm.run("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--wrap=sleep 4")
    waits = f"Slurm job {job} waits"
    site.until(lambda: waits in site.paceline("status", "it").stdout, "the job to be in the queue again")
    (step,) = saved(site)
    site.until(lambda: hurried(site, job) and resumed(site.log()), "the run to go on")
    assert resumed(site.log()) == [step]
    assert f"Slurm job {job} runs on n[1-2]" in site.paceline("status", "it").stdout


def test_a_job_that_fails_before_the_first_step(site: Site) -> None:
    (site.dir / "bad.py").write_text("import nonesuch")
    job = site.submit("-n", "2", "bad.py")
    site.until(lambda: site.state(job) == "FAILED", "the end of the job")
    told = site.paceline("status", "it").stdout
    assert f"Slurm job {job} ended: failed with exit code 1; the last lines of" in told
    assert "No module named 'nonesuch'" in told


def test_what_slurm_refuses(site: Site) -> None:
    done = site.paceline("run", "-n", "2", "--on", "slurm", "--partition", "nope", "long.py")
    assert done.returncode == 2
    assert "sbatch refuses: invalid partition specified: nope" in done.stderr
    assert "sinfo lists the partitions" in done.stderr


def test_more_than_there_is_is_waited_for_and_taken_back(site: Site) -> None:
    job = site.submit("-n", "40", "long.py")
    site.until(lambda: "PartitionConfig" in site.paceline("status", "it").stdout, "the reason")
    assert f"Slurm job {job} waits for what its partition does not have" in site.paceline("status", "it").stdout
    assert f"Slurm job {job} is taken back" in site.paceline("stop", "it").stdout
    assert "ended: cancelled" in site.paceline("status", "it").stdout


@pytest.mark.parametrize("nodes", [1, 2])
def test_srun_alone_is_a_run(site: Site, nodes: int) -> None:
    if nodes > 1:  # whose names nobody else knows here
        site.env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = site.call("srun", f"--nodes={nodes}", "--ntasks=2", sys.executable, DIGITS)
    assert done.returncode == 0, done.stderr
    assert accuracy(done.stdout) >= 97.0


def test_a_node_that_is_lost_is_its_members_lost(tmp_path: Path) -> None:
    with contextlib.closing(started(tmp_path / "slurm")) as slurm:
        site = Site(tmp_path / "work", slurm)
        site.submit("-n", "1:2", "--nodes", "2", "long.py")
        site.until(lambda: "trains" in site.log(), "the first steps")
        batch = slurm.run("scontrol", "show", "job", "1").partition("BatchHost=")[2].split()[0]
        other = next(node for node in slurm.nodes if node != batch)
        slurm.kill(other)
        site.until(lambda: re.search(rf"host {other} was silent .*; the others go on", site.said()), "the loss")
        before = steps(site)
        site.until(lambda: steps(site) > before, "another step")
        assert site.state("1") == "RUNNING"
