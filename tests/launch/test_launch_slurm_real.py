"""`--on slurm` and srun in a real Slurm: a controller and two nodes on this machine."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.core.errors import PacelineError
from tests.launch._slurm import DIGITS, LIMIT_S, Site, started

pytestmark = pytest.mark.slow


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
    return max(map(int, re.findall(r"epoch 1/1 +step (\d+)", site.said())), default=0)


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


def members(site: Site) -> list[int]:
    """Processes of the script."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (path / "cmdline").read_bytes().split(b"\0")
            if b"long.py" in words and b"run" not in words and os.readlink(path / "cwd") == str(site.dir):
                found.append(int(path.name))
    return sorted(found)


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
    with contextlib.closing(started(tmp_path / "slurm")) as slurm:  # nobody else has use for it then
        site = Site(tmp_path / "work", slurm)
        job = site.submit("-n", "1:2", "--nodes", "2", "long.py")
        site.until(lambda: "trains" in site.log(), "the first steps")
        batch = slurm.run("scontrol", "show", "job", job).partition("BatchHost=")[2].split()[0]
        other = next(node for node in slurm.nodes if node != batch)
        slurm.kill(other)
        site.until(lambda: re.search(rf"host {other} was silent .*; the others go on", site.said()), "the loss")
        before = steps(site)
        site.until(lambda: steps(site) > before, "another step")
        assert site.state(job) == "RUNNING"


@pytest.mark.parametrize("options", [("--strategy", "async"), ("--mesh", "shard=2")])
def test_runs_whose_members_stay(site: Site, options: tuple[str, ...]) -> None:
    script = Path(DIGITS).read_text()
    if "--mesh" in options:
        script = script.replace("Net().to(run.device)", "run.model(Net())")
    (site.dir / "train.py").write_text(script)
    site.submit("-n", "2", "--nodes", "2", "--threads", "1", *options, "--env", "KEY=not-to-be-seen", "train.py")
    followed = site.paceline("logs", "it", "--follow")
    assert accuracy(followed.stdout) >= 97.0, site.said()
    assert "2 hosts with Python" in site.said()  # which preflight has found
    assert "slowest link" in site.said()


def test_a_worker_that_is_lost_is_started_again_on_its_node(site: Site) -> None:
    site.submit("-n", "2", "--nodes", "2", "--strategy", "async", "--replacements", "2", "long.py")
    site.until(lambda: "trains" in site.log(), "the first steps")
    workers = members(site)
    assert len(workers) == 2, site.said()
    os.kill(workers[-1], signal.SIGKILL)
    site.until(lambda: "was killed by signal 9; the others go on; it is started again" in site.said(), "the loss")
    site.until(lambda: "joined: 2 members train now" in site.said(), "its return")
    assert "ended with exit code 143" in site.paceline("stop", "it").stdout
    site.until(lambda: not members(site), "the end of all members")


def test_a_node_that_cannot_take_part_is_named_before_anything_starts(site: Site) -> None:
    words = ["salloc", "--quiet", "--nodes=2", "--ntasks=2", sys.executable, "-m", "paceline", "run", "-n", "2"]
    done = site.call(*words, "--on", "slurm", "--python", "/nowhere/python", "long.py")
    assert done.returncode != 0
    for node in site.slurm.nodes:
        assert f"host {node}: there is no /nowhere/python" in done.stderr
    assert not (site.dir / "runs").exists()
