"""Members that were lost while the others went on: lost.json in a run's directory.

Written by whoever watches the processes, read by the first member for its summary.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import msgspec

_FILE = "lost.json"


class Lost(msgspec.Struct, frozen=True, kw_only=True):
    """One of them."""

    rank: int
    how: str  # such as "killed by signal 9"
    at: float  # time.time()
    again: bool = False  # it was to be started again

    def __str__(self) -> str:
        return f"member {self.rank} was lost ({self.how})" + (" and started again" if self.again else "")


def write(directory: Path, lost: Sequence[Lost]) -> None:
    """Keep these; none: take the file of an earlier run away."""
    path = directory / _FILE
    if not lost:
        path.unlink(missing_ok=True)
        return
    part = path.with_name(f".{_FILE}.{os.getpid()}")
    part.write_bytes(msgspec.json.encode(lost) + b"\n")
    part.replace(path)


def read(directory: Path) -> list[Lost]:
    """Those that are known; none where nothing can be read."""
    try:
        return msgspec.json.decode((directory / _FILE).read_bytes(), type=list[Lost])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return []


def how(code: int) -> str:
    """How a process ended, in words.

    >>> how(-9), how(1)
    ('killed by signal 9', 'exit code 1')
    """
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


def of_shell(code: int) -> int:
    """What an exit code means that was counted as a shell does: of a signal, the negative of it.

    >>> of_shell(137), of_shell(1), of_shell(255)
    (-9, 1, 255)
    """
    return 128 - code if code - 128 in set(signal.Signals) else code


def was(how: str) -> str:
    """The same as what happened to a member.

    >>> was("killed by signal 9"), was("stopped for 3 s"), was("exit code 1")
    ('was killed by signal 9', 'was stopped for 3 s', 'ended with exit code 1')
    """
    return f"ended with {how}" if how.startswith("exit code") else f"was {how}"
