"""Runs on a Ray cluster of several nodes: nodes that are lost and come, and what Ray's users look at."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.launch import record
from tests.launch._ray import Place, nodes, place, without_ray
from tests.launch._scripts import LONG

__all__ = ["nodes", "place"]
pytestmark = [without_ray, pytest.mark.slow]
DIGITS = Path(__file__).parents[2] / "examples" / "digits.py"


@contextlib.contextmanager
def under_way(place: Place, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A long run, which has begun to train."""
    place.script(LONG)
    launcher = place.begin(*options)
    try:
        place.until(lambda: "step 10 size" in place.output or launcher.poll() is not None)
        assert launcher.poll() is None, place.output
        yield launcher
    finally:
        if launcher.poll() is None:
            launcher.terminate()
        launcher.wait(60)


def steps(place: Place, size: int) -> int:
    """How often members have printed that they are so many."""
    return len(re.findall(rf"step \d+ size {size}\b", place.output))


def test_digits_to_its_accuracy_on_two_nodes(place: Place) -> None:
    done = place.paceline("run", "-n", "2", "--on", "ray", "--name", "it", str(DIGITS))
    assert done.returncode == 0, done.stdout + done.stderr
    accuracy = re.search(r"test accuracy: ([\d.]+)%", done.stdout)
    assert accuracy
    assert float(accuracy[1]) >= 97.0
    hosts = re.search(r"2 slots on (\S+), (\S+)", done.stderr)
    assert hosts
    assert hosts[1] != hosts[2]
    logs = place.paceline("logs", "it").stdout
    assert "test accuracy" in logs
    assert "finished" in place.paceline("status", "it").stdout


def test_a_node_is_lost_and_another_comes(place: Place) -> None:
    with under_way(place, "-n", "1:2"):
        place.until(lambda: steps(place, 2) > 1)
        place.nodes.kill()
        place.until(lambda: steps(place, 1) > 1)  # the run goes on with the other
        assert "the others go on" in place.output
        assert "state-dump" not in place.output  # which Ray has to say of it
        before = steps(place, 2)
        place.nodes.add()
        place.until(lambda: steps(place, 2) > before)
        assert "the run is over" not in place.output


@pytest.mark.parametrize("options", [("--strategy", "async"), ("--mesh", "shard=2")])
def test_runs_whose_members_stay(place: Place, options: tuple[str, ...]) -> None:
    script = DIGITS.read_text()
    if "--mesh" in options:
        script = script.replace("Net().to(run.device)", "run.model(Net())")
    place.script(script)
    done = place.paceline("run", "-n", "2", "--on", "ray", "--name", "it", *options, "train.py")
    assert done.returncode == 0, done.stdout + done.stderr
    accuracy = re.search(r"test accuracy: ([\d.]+)%", done.stdout)
    assert accuracy
    assert float(accuracy[1]) >= 97.0
    assert "2 slots on" in done.stderr


def test_a_worker_that_is_lost_is_started_again_on_its_node(place: Place) -> None:
    with under_way(place, "-n", "2", "--strategy", "async", "--replacements", "2") as launcher:
        workers = members(place)
        assert len(workers) == 2, place.output
        os.kill(workers[-1], signal.SIGKILL)
        place.until(lambda: "was killed by signal 9; the others go on; it is started again" in place.output)
        place.until(lambda: "joined: 2 members train now" in place.output)
        assert place.paceline("stop", "it").returncode == 0
        assert launcher.wait(60) == 143
    place.until(lambda: not members(place))


def test_scale_status_logs_and_stop(place: Place) -> None:
    with under_way(place, "-n", "1:2") as launcher:
        place.until(lambda: steps(place, 2) > 1)
        assert place.paceline("scale", "it", "1").returncode == 0
        place.until(lambda: steps(place, 1) > 1)
        status = place.paceline("status", "it")
        assert status.returncode == 0
        assert "running for" in status.stdout
        assert re.search(r"step \d+ size 1\n", place.paceline("logs", "it", "--lines", "3").stdout)
        stopped = place.paceline("stop", "it")
        assert stopped.returncode == 0, stopped.stdout + stopped.stderr
        assert launcher.wait(30) == 143
        assert "stopped by SIGTERM" in place.output


def test_the_scheduler_is_started_again_by_ray(place: Place) -> None:
    with under_way(place, "-n", "2"):
        run = record.read(place.folder / "runs" / "it")
        assert run
        os.kill(run.scheduler_pid, signal.SIGKILL)
        place.until(lambda: "the scheduler is back" in place.output)
        after = record.read(place.folder / "runs" / "it")
        assert after
        assert (after.scheduler, after.scheduler_pid != run.scheduler_pid) == (run.scheduler, True)
        before = steps(place, 2)
        place.until(lambda: steps(place, 2) > before + 1)
        assert place.paceline("scale", "it", "2").returncode == 0  # it answers
        assert "was lost" not in place.output


@pytest.mark.parametrize("strategy", ["allreduce", "sync"])
def test_members_end_with_the_launcher_however_it_ends(place: Place, strategy: str) -> None:
    with under_way(place, "-n", "2", "--strategy", strategy) as launcher:
        assert len(members(place)) == 2
        launcher.kill()  # the fixture waits until Ray has all of its cores back
        launcher.wait(10)
        place.until(lambda: not members(place))


def test_what_members_print_and_log_is_where_rays_users_look(place: Place) -> None:
    with under_way(place, "-n", "2"):

        def ours() -> list[str]:
            printed = [file.read_text() for file in (place.nodes.session / "logs").glob("worker-*.out")]
            return [text for text in printed if str(place.folder) in text and re.search(r"step \d+ size 2\b", text)]

        place.until(lambda: len(ours()) == 2)  # an actor on each node


def test_a_run_on_a_cluster_of_its_own_may_have_more_members_than_cores(place: Place) -> None:
    place.script("import paceline\nrun = paceline.join()\nprint('hello', run.rank, run.size)\n")
    done = place.paceline("run", "-n", "3", "--on", "ray", "--address", "local", "train.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {f"hello {rank} 3" in done.stdout for rank in range(3)} == {True}
    assert "a Ray cluster of our own" in done.stderr


def test_the_working_directory_is_brought_along(place: Place) -> None:
    place.script("import os, helper, paceline\nrun = paceline.join()\nprint('in', os.getcwd(), helper.WORD)\n")
    (place.folder / "helper.py").write_text("WORD = 'brought'\n")
    done = place.paceline("run", "-n", "2", "--on", "ray", "--sync", "train.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"in \S*working_dir_files\S* brought", done.stdout), done.stdout


def test_too_few_cores_are_counted(place: Place) -> None:
    place.script("")
    said = place.refused("-n", "9", "train.py")
    assert "9 members need 9 CPUs" in said
    assert "has 2 (2 free)" in said
    assert "-n 2" in said
    assert "2 GPUs, and the cluster" in place.refused("-n", "2", "--gpus", "1", "train.py")


def members(place: Place) -> list[int]:
    """Processes of the script."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (path / "cmdline").read_bytes().split(b"\0")
            if b"train.py" in words and b"run" not in words and str(place.folder) in os.readlink(path / "cwd"):
                found.append(int(path.name))
    return sorted(found)
