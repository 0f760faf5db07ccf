"""A launcher that goes on in the background (`--detach`): whoever started it returns once the run has begun."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

LOG = "launcher.log"


class Left(NamedTuple):
    """What the process that stays behind learns."""

    code: int  # the other one's, where it has ended before it settled
    name: str  # of the run; "": it has not begun


def leave_terminal() -> Callable[[Path], None] | Left:
    """In the process that goes on: what to call once the run has a directory, with it. In the other one, after that:
    how it went. Called before there are threads."""
    read, write = os.pipe()
    if child := os.fork():
        os.close(write)
        return _await(child, read)
    os.close(read)
    os.setsid()
    return lambda directory: _settle(directory, write)


def _await(child: int, read: int) -> Left:
    with open(read) as told:
        while True:
            try:
                name = told.read()
                break
            except KeyboardInterrupt:  # which reaches only us
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGINT)
    if not name:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return Left(code if code >= 0 else 128 - code, "")
    return Left(0, name)


def _settle(directory: Path, write: int) -> None:
    """What is said from now on is kept in the run's directory."""
    (directory / "logs").mkdir(parents=True, exist_ok=True)
    log = os.open(directory / "logs" / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, to in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, to)
    os.close(log)
    os.close(nothing)
    os.write(write, directory.name.encode())
    os.close(write)
