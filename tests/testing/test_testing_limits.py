"""Limits: they hold, what was killed for them is told, and nothing is left; groups of both versions."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from paceline.core.errors import ConfigError
from paceline.testing import limits as limited
from paceline.testing.limits import Limits

MISSING = Limits.missing()
needs_limits = pytest.mark.skipif(bool(MISSING), reason=MISSING)

HOLD = "import sys; held = b'x' * int(sys.argv[1]); print(len(held))"
BURN = """
import time
begin = time.perf_counter()
while time.perf_counter() - begin < 1:
    pass
print(time.process_time())
"""


def run(limits: Limits, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*limits.words, sys.executable, "-c", *words], capture_output=True, text=True, timeout=60)


@needs_limits
def test_memory_and_cores_are_limited() -> None:
    with Limits(memory_bytes=60_000_000, cores=0.25) as limits:
        assert run(limits, HOLD, "20000000").stdout == "20000000\n"
        assert float(run(limits, BURN).stdout) < 0.5
        assert limits.killed == 0
        assert run(limits, HOLD, "90000000").returncode == -9
        assert limits.killed == 1


@needs_limits
def test_nothing_is_left() -> None:
    sleep = [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(100)"]
    with Limits(memory_bytes=60_000_000, cores=1) as limits:
        program = subprocess.Popen([*limits.words, *sleep], stdout=subprocess.PIPE)
        assert program.stdout is not None
        with program.stdout:
            program.stdout.readline()
        groups = list(limits._distinct())
        assert all(str(program.pid) in (group / "cgroup.procs").read_text().split() for group in groups)
    assert program.wait(10) == -9
    assert not any(group.exists() for group in groups)


@needs_limits
def test_the_next_one_clears_up_after_an_owner_that_was_killed() -> None:
    code = """
    import os
    from subprocess import DEVNULL as null, Popen
    from paceline.testing.limits import Limits
    with Limits(memory_bytes=60_000_000, cores=1) as limits:
        program = Popen([*limits.words, "sleep", "100"], stdout=null, stderr=null)
        print(program.pid, *limits._distinct(), flush=True)
        os.kill(os.getpid(), 9)
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)
    pid, *groups = ended.stdout.split()
    assert all(Path(group).exists() for group in groups)
    with Limits(memory_bytes=60_000_000, cores=1):
        assert not any(Path(group).exists() for group in groups)
    deadline = time.monotonic() + 10
    while _lives(int(pid)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_groups_of_version_1(tmp_path: Path) -> None:
    """The nearest group that is there, where a mount shows only a part of the path; for each controller its own."""
    ours = _told(tmp_path, "5:cpuset:/\n4:memory:/a/b\n1:cpu,cpuacct:/c/d\n0::/\n")
    memory, cpu = _group(tmp_path / "sys/memory/a/b"), _group(tmp_path / "sys/cpu")
    assert limited._where(ours, tmp_path / "sys") == {"memory": memory, "cpu": cpu}
    (memory / "memory.memsw.limit_in_bytes").touch()
    assert dict(limited._settings({"memory": memory, "cpu": cpu}, 5, 0.25)) == {
        memory / "memory.limit_in_bytes": "5",
        memory / "memory.memsw.limit_in_bytes": "5",
        cpu / "cpu.cfs_period_us": "100000",
        cpu / "cpu.cfs_quota_us": "25000",
    }


def test_groups_of_version_2(tmp_path: Path) -> None:
    """The nearest group that hands both controllers on: ours, which has processes, does not."""
    ours = _told(tmp_path, "0::/a/b\n")
    for path, handed in (("", "cpu memory pids"), ("a", "cpu memory"), ("a/b", "")):
        (_group(tmp_path / "sys" / path) / "cgroup.subtree_control").write_text(handed + "\n")
    place = tmp_path / "sys/a"
    assert limited._where(ours, tmp_path / "sys") == {"memory": place, "cpu": place}
    (place / "cgroup.subtree_control").write_text("memory\n")
    assert set(limited._where(ours, tmp_path / "sys").values()) == {tmp_path / "sys"}
    (place / "memory.swap.max").touch()
    assert dict(limited._settings({"memory": place, "cpu": place}, 5, 1.5)) == {
        place / "memory.max": "5",
        place / "memory.swap.max": "0",
        place / "cpu.max": "150000 100000",
    }


def test_it_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no control groups for memory and cpu in"):
        limited._where(tmp_path / "none", tmp_path)
    with pytest.raises(ConfigError, match="cores=0"):
        Limits(memory_bytes=1, cores=0)


def _told(tmp_path: Path, text: str) -> Path:
    ours = tmp_path / "cgroup"
    ours.write_text(text)
    return ours


def _group(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "cgroup.procs").touch()
    return path


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_groups_that_cannot_be_made_are_told_and_nothing_is_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in a container that shows control groups without leave to change them."""
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "none"):
        monkeypatch.setattr(limited, "_where", lambda *_, place=place: dict.fromkeys(("memory", "cpu"), place))
        assert "control groups" in Limits.missing()
        with pytest.raises(OSError), Limits(memory_bytes=1 << 26, cores=0.1):
            pass
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
