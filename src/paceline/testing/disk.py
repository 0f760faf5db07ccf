"""A small disk that can be filled: a tmpfs, for tests of what a run does when there is no room.

    with SmallDisk(size_bytes=64 << 20) as disk:
        ...  # a run with root=disk.dir
        disk.fill()
        disk.free()

Needs root. It is taken away at the end, also after an error; one whose owner was killed outright goes with the next.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
from pathlib import Path

from paceline.core.errors import ConfigError, PacelineError
from paceline.testing.hosts import owner

_NAME = re.compile(r"(pace(\d+)x\d+)-disk-\w+")
_FILLER = ".filler"
_LIMIT_S = 30.0


class SmallDisk:
    """A file system of `size_bytes` in `dir`."""

    def __init__(self, size_bytes: int) -> None:
        if size_bytes < 1 << 16:
            raise ConfigError(f"size_bytes={size_bytes}: a disk has at least 65536 bytes")
        self.size_bytes = size_bytes
        self.dir = Path()

    @staticmethod
    def missing() -> str:
        """Why no disk can be made on this machine; "" where it can."""
        return "" if os.geteuid() == 0 else "mounting needs root"

    def __enter__(self) -> SmallDisk:
        if reason := self.missing():
            raise ConfigError(f"cannot make a disk: {reason}")
        clean()
        self.dir = Path(tempfile.mkdtemp(prefix=f"{owner(os.getpid())}-disk-"))
        try:
            _run("mount", "-t", "tmpfs", "-o", f"size={self.size_bytes}", "paceline-disk", str(self.dir))
        except BaseException:
            self.dir.rmdir()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        _remove(self.dir)

    def fill(self, but_bytes: int = 0) -> None:
        """Leave no room, or only `but_bytes`: every further write fails with ENOSPC."""
        self.free()
        with (self.dir / _FILLER).open("wb", buffering=0) as filler:
            for size in (1 << 20, 4096):
                with contextlib.suppress(OSError):
                    while self._room() > but_bytes + size - 4096 and filler.write(b"\1" * size):
                        pass

    def free(self) -> None:
        """Give the room back."""
        (self.dir / _FILLER).unlink(missing_ok=True)

    def _room(self) -> int:
        stat = os.statvfs(self.dir)
        return stat.f_bavail * stat.f_frsize


def clean() -> list[Path]:
    """Remove the disks of owners that are gone."""
    left = []
    for path in Path(tempfile.gettempdir()).glob("pace*-disk-*"):
        match = _NAME.fullmatch(path.name)
        if match and owner(int(match[2])) != match[1]:
            _remove(path)
            left.append(path)
    return left


def _remove(path: Path) -> None:
    """Also where something still has a file open there."""
    while path.is_mount():
        _run("umount", "--lazy", str(path))
    path.rmdir()


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=_LIMIT_S)
    if done.returncode:
        raise PacelineError(f"{' '.join(argv)}: {done.stderr.strip()}")
