"""The queue of a run whose batches are lent as workers ask: how far each epoch under way has come, and who has what.

Written about once a second by the server that deals, read by `paceline status`, also after the server was killed.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import msgspec

FILE = "status/queue.json"


class Loan(msgspec.Struct, frozen=True, kw_only=True):
    """What a member has been lent, and not done."""

    rank: int
    batches: int
    since: float  # time.time() when the oldest of them was lent


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """How far the batches of one kind have come."""

    label: str  # "": anybody may have them
    done: int
    left: int  # not lent now
    lent: tuple[Loan, ...] = ()
    returned: int = 0  # so often one came back from a member that was lost


class Course(msgspec.Struct, frozen=True, kw_only=True):
    """One epoch over one loader."""

    loader: int  # in the order in which the script made them
    epoch: int  # from 0
    parts: tuple[Part, ...]


class Queue(msgspec.Struct, frozen=True, kw_only=True):
    """All that is under way."""

    at: float  # time.time()
    courses: tuple[Course, ...] = ()


def write(directory: Path, courses: tuple[Course, ...]) -> None:
    """Into a run's directory; a reader sees the old one or the new one. What cannot be written is not worth a stop."""
    file = directory / FILE
    part = file.with_name(f".{file.name}.part")
    with contextlib.suppress(OSError):
        part.write_bytes(msgspec.json.encode(Queue(at=time.time(), courses=courses)))
        part.replace(file)


def read(directory: Path) -> Queue | None:
    """What was written last; None where nothing was, or not by us."""
    try:
        return msgspec.json.decode((directory / FILE).read_bytes(), type=Queue)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def clear(directory: Path) -> None:
    """Forget that of an earlier start."""
    (directory / FILE).unlink(missing_ok=True)
