"""What a member is doing right now, in a small file that others can read while the member is stuck.

The file is mapped into memory, so that saying what one does costs a copy of a few bytes, and a reader needs
nothing from the member: `paceline status RUN` works on a member that hangs or was killed. A sequence number in
front is odd while something is being written, so that a reader notices a record that is half old, half new.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

STARTING = "starting"
BEFORE = -1  # the epoch of one who comes late, until it takes part
SERVING = "serving"  # how what a server does begins, once the first epoch has begun
_HEAD = struct.Struct("<QQqqdH")  # sequence, pid, step, epoch, since, length of the text
_SIZE = 768
_HOST_AT, _LABELS_AT, _EPOCH_AT = 384, 512, 752  # to the next, and to the end
_EPOCH = struct.Struct("<qq")  # steps before this epoch, and of it
_BODY = struct.Struct("<QqqdH").pack_into  # the head after the sequence
_BODY_AT = 8
_PLACE = struct.Struct("<qqd").pack_into  # step, epoch, since
_PLACE_AT = 16
_TRIES = 1000  # of a reader, a tenth of a second in all


class Doing(msgspec.Struct, frozen=True):
    """One member's line in `paceline status`."""

    rank: int
    pid: int
    step: int
    epoch: int
    since: float  # time.time() when it began to do this, or when the last step ended if that was later
    what: str
    host: str = ""  # on which it runs, where it said so
    labels: str = ""  # that it has, between commas
    epoch_step: int = 0  # steps before this epoch
    steps: int = 0  # of this epoch; 0: not known


class Status:
    """The writing side: `status.set("waiting for member 3")`. `host` tells readers whether they can see the process.

    `labels` are those of the member.
    """

    def __init__(self, path: Path | None, host: str = "", labels: Sequence[str] = ()) -> None:
        self.step = 0
        self.epoch = 0
        self._sequence = 0
        self._map: mmap.mmap | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)  # a new file: cutting the old one short would kill whoever still maps it
            with path.open("w+b") as file:
                file.truncate(_SIZE)
                self._map = mmap.mmap(file.fileno(), _SIZE)
                # One store of eight bytes: pack_into would make the number 0 for a moment.
                self._sequences = memoryview(self._map).cast("Q")
                for text, start, end in ((host, _HOST_AT, _LABELS_AT), (",".join(labels), _LABELS_AT, _EPOCH_AT)):
                    self._map[start:end] = text.encode()[: end - start].ljust(end - start, b"\0")
        self.set(STARTING)

    def set(self, what: str) -> None:
        self.what = what
        if self._map is None:
            return
        text = what.encode()[: _HOST_AT - _HEAD.size]
        self._sequence = sequence = self._sequence + 2
        self._sequences[0] = sequence - 1
        self._map[_HEAD.size : _HEAD.size + len(text)] = text
        _BODY(self._map, _BODY_AT, os.getpid(), self.step, self.epoch, time.time(), len(text))
        self._sequences[0] = sequence

    def enter(self, epoch: int, epoch_step: int, steps: int) -> None:
        """An epoch of so many steps begins after so many, or has another number of them from now on."""
        self.epoch = epoch
        if self._map is not None:
            self._sequence = sequence = self._sequence + 2
            self._sequences[0] = sequence - 1
            _EPOCH.pack_into(self._map, _EPOCH_AT, epoch_step, steps)
            self._sequences[0] = sequence

    def at(self, step: int, epoch: int) -> None:
        """A step has ended; costs about a microsecond, so that every step can say so."""
        self.step, self.epoch = step, epoch
        if self._map is None:
            return
        self._sequence = sequence = self._sequence + 2
        self._sequences[0] = sequence - 1
        _PLACE(self._map, _PLACE_AT, step, epoch, time.time())
        self._sequences[0] = sequence


def read(path: Path, rank: int) -> Doing | None:
    """What the member said last, or None where it has said nothing yet."""
    try:
        with path.open("rb", buffering=0) as file:
            data = _whole(file.fileno())
    except OSError:
        return None
    if len(data) < _HEAD.size:
        return None
    sequence, pid, step, epoch, since, length = _HEAD.unpack_from(data)
    if not sequence:
        return None
    text = data[_HEAD.size : _HEAD.size + length].decode(errors="replace")
    host, labels = (
        d.rstrip(b"\0").decode(errors="replace") for d in (data[_HOST_AT:_LABELS_AT], data[_LABELS_AT:_EPOCH_AT])
    )
    epoch_step, steps = _EPOCH.unpack_from(data, _EPOCH_AT) if len(data) == _SIZE else (0, 0)
    return Doing(
        rank=rank,
        pid=pid,
        step=step,
        epoch=epoch,
        since=since,
        what=text,
        host=host,
        labels=labels,
        epoch_step=epoch_step,
        steps=steps,
    )


def _whole(descriptor: int) -> bytes:
    """The record, read when nobody wrote; that of a member that was killed while writing must do as it is."""
    data = os.pread(descriptor, _SIZE, 0)
    for _ in range(_TRIES):
        if data[:1] and data[0] % 2 == 0 and os.pread(descriptor, 8, 0) == data[:8]:
            break
        time.sleep(0.0001)
        data = os.pread(descriptor, _SIZE, 0)
    return data
