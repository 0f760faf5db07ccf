"""Members that were lost while the others went on: lost.json in a run's directory.

Written by whoever watches the processes, read by the first member for its summary.
"""

from __future__ import annotations

import os
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
