"""Disks that fill up and clocks that jump, seen from other processes; nothing of either stays."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.core.errors import ConfigError
from paceline.testing import disk
from paceline.testing.clocks import Clocks
from paceline.testing.disk import SmallDisk

needs_mount = pytest.mark.skipif(bool(SmallDisk.missing()), reason=SmallDisk.missing())


def mounts() -> str:
    return Path("/proc/mounts").read_text()


@needs_mount
def test_a_disk_is_filled_and_freed() -> None:
    with SmallDisk(4 << 20) as small:
        assert str(small.dir) in mounts()
        file = small.dir / "file"
        file.write_bytes(b"x" * 1000)
        small.fill()
        with pytest.raises(OSError) as full:
            (small.dir / "more").write_bytes(b"x" * 10_000)
        assert full.value.errno == errno.ENOSPC
        small.fill(but_bytes=1 << 20)
        (small.dir / "more").write_bytes(b"x" * (900 << 10))
        with pytest.raises(OSError):
            (small.dir / "too much").write_bytes(b"x" * (300 << 10))
        small.free()
        (small.dir / "more").write_bytes(b"x" * (2 << 20))
        assert file.read_bytes() == b"x" * 1000
    assert not small.dir.exists()
    assert str(small.dir) not in mounts()


@needs_mount
def test_a_disk_goes_after_an_error_and_with_open_files() -> None:
    with pytest.raises(KeyError):
        with SmallDisk(1 << 20) as small, (small.dir / "open").open("w"):
            raise KeyError
    assert not small.dir.exists()
    with SmallDisk(1 << 20) as small:
        held = (small.dir / "open").open("w")
    held.close()
    assert not small.dir.exists()


@needs_mount
def test_the_disk_of_a_killed_owner_goes_with_the_next() -> None:
    code = """
import time
from paceline.testing.disk import SmallDisk
print(SmallDisk(1 << 20).__enter__().dir, flush=True)
time.sleep(100)
"""
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    path = Path(owner.stdout.readline().strip())
    with SmallDisk(1 << 20) as own:
        assert disk.clean() == []  # both live
        assert own.dir.is_mount()
    assert path.is_mount()
    owner.kill()
    owner.communicate()
    assert path in disk.clean()
    assert not path.exists()


def test_too_small_a_disk() -> None:
    with pytest.raises(ConfigError, match="size_bytes=10"):
        SmallDisk(10)


TELL = """
import sys, time
start = time.monotonic()
for line in sys.stdin:
    print(time.time(), time.time_ns() / 1e9, time.monotonic(), flush=True)
"""


class Told:
    """A process that tells its clocks when asked."""

    def __init__(self, env: dict[str, str], rank: int | None) -> None:
        own = {} if rank is None else {"PACELINE_RANK": str(rank)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen([sys.executable, "-c", TELL], env={**os.environ, **env, **own}, **pipes)

    def off_s(self) -> tuple[float, float, float]:
        """How far its clocks are from ours."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        wall, wall_ns, monotonic = map(float, self._process.stdout.readline().split())
        return wall - time.time(), wall_ns - time.time(), monotonic - time.monotonic()

    def close(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.communicate()


def test_clocks_jump_for_one_or_for_all() -> None:
    with Clocks() as clocks:
        told = [Told(clocks.env, rank) for rank in (0, 1, None)]
        try:

            def offs() -> list[int]:
                all_three = [t.off_s() for t in told]
                for wall, wall_ns, monotonic in all_three:
                    assert abs(wall - wall_ns) < 5
                    assert abs(monotonic) < 50
                return [round(wall / 100) * 100 for wall, _, _ in all_three]

            assert offs() == [0, 0, 0]
            clocks.jump(-3600, member=1)
            assert offs() == [0, -3600, 0]
            clocks.jump(10_000)
            assert offs() == [10_000, 6400, 10_000]
            clocks.back()
            assert offs() == [0, 0, 0]
        finally:
            for each in told:
                each.close()
        with pytest.raises(ConfigError, match="member=-1"):
            clocks.jump(1, member=-1)
    assert not clocks.dir.exists()


def test_a_hook_that_is_hidden_runs_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os; os.environ['HOOKED'] = 'yes'")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    with Clocks() as clocks:
        code = "import os; print(os.environ['HOOKED'])"
        argv = [sys.executable, "-c", code]
        done = subprocess.run(argv, env={**os.environ, **clocks.env}, capture_output=True, text=True, timeout=30)
    assert done.stdout == "yes\n", done.stderr
