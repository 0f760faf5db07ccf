"""What lost workers of a run with servers had trained: status/trained.json in a run's directory.

A worker that is lost can tell nobody what it has done. The first server has counted it, and writes it down when that
worker is gone; those who come to the end read it for the summary.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

FILE = "status/trained.json"


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker's pushes came to.

    >>> Work(samples=8, pushes=1) + Work(samples=4, pushes=1)
    Work(samples=12, pushes=2)
    """

    samples: float = 0.0
    pushes: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(samples=self.samples + other.samples, pushes=self.pushes + other.pushes)


class Trained(msgspec.Struct, frozen=True, kw_only=True):
    """What is known."""

    began: float  # time.time() when the server did
    lost: dict[int, Work] = {}  # by rank, of all processes at this rank that were lost


def write(directory: Path, began: float, lost: Mapping[int, Work]) -> None:
    """A reader sees the old one or the new one. What cannot be written is not worth a stop."""
    file = directory / FILE
    part = file.with_name(f".{file.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        part.write_bytes(msgspec.json.encode(Trained(began=began, lost=dict(lost))))
        part.replace(file)


def read(directory: Path) -> Trained | None:
    """What was written last; None where nothing was, or not by us."""
    try:
        return msgspec.json.decode((directory / FILE).read_bytes(), type=Trained)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def clear(directory: Path) -> None:
    """Forget that of an earlier start."""
    (directory / FILE).unlink(missing_ok=True)
