"""A run's directory and its run.json: that the run exists, who started it, and how it ended.

Written by the launcher, read by `paceline status`. While the run lasts the launcher holds a lock in the
directory, which the kernel drops when it dies: so nobody has to guess from a process number whether a run
is still alive.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import msgspec

from paceline.core import queue
from paceline.core.directory import make_directory
from paceline.core.errors import ConfigError
from paceline.core.settings import Settings
from paceline.environment import this_host

_FILE = "run.json"
SUBMISSION = "PACELINE_SUBMISSION"  # in pods: the same whenever one submission is started again


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What run.json holds."""

    name: str
    command: list[str]
    cwd: str = ""  # in which it was given
    size: int
    pid: int  # of the launcher
    host: str
    started: float  # time.time()
    members: list[int] = []  # their process numbers, by rank; 0: none now
    least: int = 0  # of an elastic run, whose size is the most; 0: the size is fixed
    scheduler: str = ""  # "ip:port"
    scheduler_pid: int = 0
    submission: str = ""  # see `Record`
    finished: float | None = None
    exit_code: int | None = None


class Record:
    """The launcher's hold on a run's directory.

    Args:
        submission: an id that an engine repeats whenever it starts the same command again. To start over (`fresh`) is
            meant once for each, or every restart would throw away what it is to go on from.
    """

    def __init__(self, settings: Settings, script: str, size: int, least: int = 0, submission: str = "") -> None:
        self.dir = make_directory(Path(settings.root), settings.name, script)
        self._lock = _lock(self.dir)
        before = read(self.dir) if submission else None
        self.fresh = settings.fresh and not (before and before.submission == submission)
        self.run = Run(
            name=self.dir.name,
            command=list(sys.argv),
            cwd=os.getcwd(),
            size=size,
            pid=os.getpid(),
            host=this_host(),
            started=time.time(),
            least=least,
            submission=submission,
        )
        for old in (self.dir / "status").glob("rank-*"):  # of members that are gone
            old.unlink(missing_ok=True)
        queue.clear(self.dir)
        if self.fresh:
            for old in (self.dir / "logs").glob("rank-*.log"):
                old.unlink(missing_ok=True)
            if submission:  # before run.json says that it was done: members may be lost before they do it
                shutil.rmtree(self.dir / "checkpoints", ignore_errors=True)
        self._write()

    def started(self, members: list[int]) -> None:
        self.run = msgspec.structs.replace(self.run, members=members)
        self._write()

    def scheduled(self, address: str, pid: int) -> None:
        """A scheduler runs there."""
        self.run = msgspec.structs.replace(self.run, scheduler=address, scheduler_pid=pid)
        self._write()

    def finish(self, exit_code: int) -> None:
        self.run = msgspec.structs.replace(self.run, finished=time.time(), exit_code=exit_code)
        try:
            self._write()
        except OSError:  # a full disk: the run is over all the same, and the file has room for how it ended
            with contextlib.suppress(OSError):
                self._write_over()

    def __enter__(self) -> Record:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._lock)

    def _write(self) -> None:
        part = self.dir / f".run.json.{os.getpid()}"
        try:
            part.write_bytes(self._text)
            part.replace(self.dir / _FILE)
        except OSError:
            part.unlink(missing_ok=True)
            raise

    def _write_over(self) -> None:
        """Without a new file: in the blocks that the present one has; it stays as it was where they do not suffice."""
        with (self.dir / _FILE).open("r+b", buffering=0) as file:
            before = file.read()
            if os.pwrite(file.fileno(), self._text, 0) < len(self._text):
                os.pwrite(file.fileno(), before, 0)
                file.truncate(len(before))
            else:
                file.truncate(len(self._text))

    @property
    def _text(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self.run)) + b"\n"


def read(directory: Path) -> Run | None:
    """What is known of the run in this directory; None where it is not one."""
    try:
        return msgspec.json.decode((directory / _FILE).read_bytes(), type=Run)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def is_running(directory: Path) -> bool:
    """Whether a launcher holds this run."""
    try:
        descriptor = os.open(directory / "lock", os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def await_end(directory: Path, limit_s: float, say: Callable[[str], None]) -> None:
    """Until nobody holds the run, or until the limit. A lock on a network disk outlives its holder's host for a while:
    until its lease ends, by default 90 s for NFS."""
    deadline, told = time.monotonic() + limit_s, False
    while time.monotonic() < deadline and is_running(directory):
        if not told:
            say(f"{directory} is held by a launcher, which may be gone: waiting for up to {limit_s:g} s")
            told = True
        time.sleep(min(1.0, limit_s / 10))


def _lock(directory: Path) -> int:
    descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    for _ in range(20):  # `is_running` holds it for a moment
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        time.sleep(0.01)
    os.close(descriptor)
    run = read(directory)
    raise ConfigError(
        f"run {directory.name!r} is already running{f' (launcher: process {run.pid})' if run else ''}: "
        f"stop it first, or give another --name"
    )
