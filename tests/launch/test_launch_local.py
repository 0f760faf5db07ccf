"""What is started, before it is started: commands, environments, threads, directories."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.core.errors import ConfigError
from paceline.core.settings import Settings
from paceline.launch import beforehand, cores, names, record, script
from paceline.launch.plan import plan
from paceline.launch.spec import JobSpec


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "train.py").write_text("")
    return tmp_path


def test_each_member_gets_its_place_and_its_share_of_threads(here, monkeypatch):
    monkeypatch.setenv("PACELINE_RANK", "7")  # of a run that we are started from
    starts = plan(JobSpec(script="train.py", args=("--lr", "1"), num_members=2), "127.0.0.1:9", "t")
    assert [s.command for s in starts] == [(sys.executable, "train.py", "--lr", "1")] * 2
    for rank, start in enumerate(starts):
        env = start.env
        assert (env["PACELINE_RANK"], env["PACELINE_SIZE"], env["PACELINE_TOKEN"]) == (str(rank), "2", "t")
        assert (env["PACELINE_LOCAL_RANK"], env["PACELINE_LOCAL_SIZE"]) == (str(rank), "2")
        assert env["PYTHONUNBUFFERED"] == "1"
        assert env["OMP_NUM_THREADS"] == env["MKL_NUM_THREADS"] == str(max(1, cores.cores().usable // 2))
        assert env["PATH"] == os.environ["PATH"]


def test_threads_that_the_user_set_stay(here, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    (start,) = plan(JobSpec(script="train.py"), "a:1", "t")
    assert start.env["OMP_NUM_THREADS"] == "5"
    assert "MKL_NUM_THREADS" not in start.env
    (start,) = plan(JobSpec(script="train.py", threads=3), "a:1", "t")
    assert start.env["OMP_NUM_THREADS"] == start.env["MKL_NUM_THREADS"] == "3"


@pytest.mark.parametrize(
    ("members", "usable", "threads", "warns"), [(1, 8, 8, False), (3, 8, 2, False), (8, 8, 1, False), (9, 8, 1, True)]
)
def test_the_share_of_the_cores(members, usable, threads, warns):
    share, warning = cores.share(members, usable)
    assert share == threads
    assert bool(warning) == warns
    assert not warns or "9 members share 8 cores" in warning


def test_quotas_of_both_kinds_of_control_groups(tmp_path):
    group = tmp_path / "sys/a/b"
    group.mkdir(parents=True)
    (tmp_path / "cgroup").write_text("0::/a/b\n")
    assert cores._quota(tmp_path / "cgroup", tmp_path / "sys") is None
    (group / "cpu.max").write_text("max 100000\n")
    assert cores._quota(tmp_path / "cgroup", tmp_path / "sys") is None
    (group.parent / "cpu.max").write_text("150000 100000\n")  # the parent bounds it
    assert cores._quota(tmp_path / "cgroup", tmp_path / "sys") == 1.5
    assert cores.Cores(8, 1.5).usable == 1

    old = tmp_path / "sys/cpu/x"
    old.mkdir(parents=True)
    (tmp_path / "cgroup").write_text("4:cpu,cpuacct:/x\n1:name=systemd:/x\n")
    (old / "cpu.cfs_quota_us").write_text("-1")
    (old / "cpu.cfs_period_us").write_text("100000")
    assert cores._quota(tmp_path / "cgroup", tmp_path / "sys") is None
    (old / "cpu.cfs_quota_us").write_text("400000")
    assert cores._quota(tmp_path / "cgroup", tmp_path / "sys") == 4.0


def test_affinity_counts():
    code = "import os; os.sched_setaffinity(0, {0}); from paceline.launch.cores import cores; print(cores().affinity)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "1\n"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("trian.py", r"script 'trian.py' does not exist: did you mean 'train.py'\?"),
        ("train", r"script 'train' does not exist: did you mean 'train.py'\?"),
        ("zzzzzzzz.py", "does not exist: the Python files there are train.py"),
        ("no/where.py", "there is no directory 'no'"),
        ("empty/x.py", "there is no Python file in that directory"),
        ("empty", "is a directory without __main__.py"),
        ("data.csv", "is not a Python file"),
        ("book.ipynb", "is a notebook"),
    ],
)
def test_scripts_that_cannot_be_run(here, name, message):
    (here / "empty").mkdir()
    (here / "data.csv").write_text("1,2\n")
    (here / "book.ipynb").write_text("{}")
    with pytest.raises(ConfigError, match=message):
        script.command(name, (), module=False, python="python", cwd=here)


def test_scripts_that_can(here):
    (here / "tool").write_text("#!/usr/bin/env python3\n")
    (here / "package").mkdir()
    (here / "package/__main__.py").write_text("")
    for name in ("train.py", "tool", "package", str(here / "train.py")):
        assert script.command(name, ("x",), module=False, python="python", cwd=here) == ("python", name, "x")
    for name in ("package", "json.tool", "train"):
        assert script.command(name, (), module=True, python="python", cwd=here) == ("python", "-m", name)
    with pytest.raises(ConfigError, match="there is no module 'nosuch'"):
        script.command("nosuch.train", (), module=True, python="python", cwd=here)


def test_a_gpu_is_asked_for_only_where_there_is_one(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    for device in ("auto", "cpu"):
        beforehand.check_device(device, tmp_path)
    for device in ("cuda", "cuda:1"):
        with pytest.raises(ConfigError, match=rf"device '{device}' was asked for, .*Use --device cpu"):
            beforehand.check_device(device, tmp_path)
    (tmp_path / "nvidia-smi").touch(0o755)
    beforehand.check_device("cuda", tmp_path)
    (tmp_path / "nvidia-smi").rename(tmp_path / "nvidia0")
    beforehand.check_device("cuda", tmp_path)


@pytest.mark.parametrize("num_members", [0, -1])
def test_a_run_has_members(num_members):
    with pytest.raises(ConfigError, match="at least one member"):
        JobSpec(script="train.py", num_members=num_members)


def test_a_run_gets_a_directory_of_its_own(here):
    settings = Settings(root="r")
    with record.Record(settings, "my train.py", 2) as one, record.Record(settings, "my train.py", 2) as two:
        assert one.dir != two.dir
        assert one.dir.name.startswith("my-train-2")
        one.finish(0)
    run = record.read(one.dir)
    assert (run.size, run.exit_code, run.pid, run.name) == (2, 0, os.getpid(), one.dir.name)
    assert record.read(two.dir).exit_code is None


def test_a_run_that_is_running_cannot_be_started_again(here):
    settings = Settings(root="r", name="x")
    with record.Record(settings, "train.py", 1):
        assert record.is_running(Path("r/x"))
        with pytest.raises(ConfigError, match=rf"run 'x' is already running \(launcher: process {os.getpid()}\)"):
            record.Record(settings, "train.py", 1)
    assert not record.is_running(Path("r/x"))
    with record.Record(settings, "train.py", 1):
        pass


def test_asking_whether_it_runs_does_not_keep_it_from_starting(here):
    settings = Settings(root="r", name="x")
    with record.Record(settings, "train.py", 1):
        pass
    asking = os.open("r/x/lock", os.O_RDONLY)
    fcntl.flock(asking, fcntl.LOCK_SH)
    assert not record.is_running(Path("r/x"))
    os.close(asking)


def test_a_root_that_cannot_be_made(here):
    with pytest.raises(ConfigError, match=r"cannot make a run directory in root='train.py/r'"):
        record.Record(Settings(root="train.py/r"), "train.py", 1)


def test_a_torn_run_json_is_no_run(here):
    (here / "run.json").write_text('{"name": "x"')
    assert record.read(here) is None


@pytest.mark.parametrize(
    ("check", "good", "bad", "message"),
    [
        (names.strategy, "allreduce", "alreduce", "unknown strategy 'alreduce': did you mean 'allreduce'?"),
        (names.strategy, "allreduce()", "allreduce(", "cannot read strategy"),
        (names.transport, "gloo", "glo", "unknown transport 'glo': did you mean 'gloo'?"),
        (names.device, "cuda:3", "cuda:x", "unknown device 'cuda:x': did you mean 'cuda'?"),
        (names.progress, "off", "verbose", "unknown progress 'verbose': known: 'auto', 'off', 'plain', 'rich'"),
        (names.run, "a-1.b", "../x", "name '../x': use up to 200 letters"),
        (names.run, "1", "", "name '': use"),
    ],
)
def test_words(check, good, bad, message):
    assert check(good) == good
    with pytest.raises(ConfigError) as caught:
        check(bad)
    assert message in str(caught.value)
