"""What a member is doing right now, in a small file that others can read while the member is stuck.

The file is mapped into memory, so that saying what one does costs a copy of a few bytes, and a reader needs
nothing from the member: `paceline status RUN` works on a member that hangs or was killed.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path

import msgspec

_HEAD = struct.Struct("<QQqqdH")  # sequence, pid, step, epoch, since, length of the text
_SIZE = 512


class Doing(msgspec.Struct, frozen=True):
    """One member's line in `paceline status`."""

    rank: int
    pid: int
    step: int
    epoch: int
    since: float  # time.time() when it began
    what: str

    @property
    def alive(self) -> bool:
        """Whether the process exists (only meaningful on the member's own host)."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True


class Status:
    """The writing side: `status.set("waiting for member 3")`."""

    def __init__(self, path: Path | None) -> None:
        self.step = 0
        self.epoch = 0
        self._sequence = 0
        self._map: mmap.mmap | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w+b") as file:
                file.truncate(_SIZE)
                self._map = mmap.mmap(file.fileno(), _SIZE)
        self.set("starting")

    def set(self, what: str) -> None:
        self.what = what
        if self._map is None:
            return
        text = what.encode()[: _SIZE - _HEAD.size]
        self._sequence += 2  # odd while being written, so that a reader sees a torn record
        self._map[:8] = struct.pack("<Q", self._sequence - 1)
        self._map[_HEAD.size : _HEAD.size + len(text)] = text
        head = _HEAD.pack(self._sequence - 1, os.getpid(), self.step, self.epoch, time.time(), len(text))
        self._map[8 : _HEAD.size] = head[8:]
        self._map[:8] = struct.pack("<Q", self._sequence)


def read(path: Path, rank: int) -> Doing | None:
    """What the member said last, or None where it has said nothing yet."""
    for _ in range(100):
        try:
            data = path.read_bytes()
        except OSError:
            return None
        if len(data) < _HEAD.size:
            return None
        sequence, pid, step, epoch, since, length = _HEAD.unpack_from(data)
        if sequence and sequence % 2 == 0:
            text = data[_HEAD.size : _HEAD.size + length].decode(errors="replace")
            return Doing(rank=rank, pid=pid, step=step, epoch=epoch, since=since, what=text)
        time.sleep(0.001)
    return None
