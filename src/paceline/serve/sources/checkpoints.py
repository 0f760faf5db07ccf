"""Checkpoints as a source: those of a run as they appear, or one that stays as it is."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from paceline.checkpoint import manifest, newest_first, shelf
from paceline.core.errors import CheckpointError, Interrupted, nearest
from paceline.serve.places import Unfit
from paceline.serve.sources.source import Update, beside, changed

_LOOK_S = 0.1
_SETTLES_S = 1.0  # after which one that was refused, and has changed, is taken to be copied
_MODEL = "model."  # before the numbers of a run's models, among what its checkpoints hold


class Found(NamedTuple):
    """A model out of a checkpoint."""

    name: str
    step: int
    made_at: float
    tensors: dict[str, Tensor]


# Of the files of one checkpoint: name, size, time in ns.
Stamp = frozenset[tuple[str, int, int]]


class _Doubt(NamedTuple):
    """A checkpoint that was refused."""

    stamp: Stamp
    since: float  # when it was first seen so
    tried: bool  # whether it was read so


class Checkpoints:
    """Reads what is new in a directory of checkpoints. `model`: the number of the model among the run's.

    A run's own appear whole. One that somebody copies here does not: refused at first, it is read again when its files
    have changed and then stayed as they are.
    """

    def __init__(self, directory: Path, model: int = 0) -> None:
        self.directory = directory
        self._model = f"{_MODEL}{model}"
        self._stamps: dict[str, Stamp] = {}  # of what was there at the last look, where nothing is left to do
        self._number = -1  # of the last that was given
        self._refused: dict[str, _Doubt] = {}

    def again(self) -> None:
        """Give the newest once more, if it is asked for."""
        self._stamps, self._number = {}, -1

    def newest(self, since: float = 0.0) -> Found | None:
        """The newest one, if it is newer than the last, and made after `since` (time.time()).

        Unfit where one cannot be used; the next call looks at the one before it.
        """
        stamps = _stamps(self.directory)
        self._refused = {name: doubt for name, doubt in self._refused.items() if name in stamps}
        if stamps == self._stamps:
            return None
        for path, saved in newest_first(self.directory):
            if saved.number <= self._number or saved.created <= since:
                break
            stamp = stamps.get(path.name, frozenset())
            if self._is_barred(path.name, stamp):
                continue
            try:
                found = read_model(path, self._model)
            except (CheckpointError, Unfit) as error:
                self._refused[path.name] = _Doubt(stamp, time.monotonic(), True)
                if not path.exists():  # the run has removed it while it was read
                    continue
                raise Unfit(f"checkpoint {path.name}: {error}") from None
            self._refused.pop(path.name, None)
            self._number = saved.number
            return Found(path.name, saved.step, saved.created, found)
        self._stamps = stamps if all(doubt.tried for doubt in self._refused.values()) else {}
        return None

    def _is_barred(self, name: str, stamp: Stamp) -> bool:
        doubt = self._refused.get(name)
        if doubt is None:
            return False
        if doubt.stamp != stamp:
            self._refused[name] = _Doubt(stamp, time.monotonic(), False)
            return True
        return doubt.tried or time.monotonic() - doubt.since < _SETTLES_S


class CheckpointSource:
    """The checkpoints in a directory, or (`fixed`) the one that it is."""

    ended = ""
    note = ""

    def __init__(self, path: Path, *, model: int = 0, fixed: bool = False) -> None:
        self._path, self._fixed, self._model = path, fixed, f"{_MODEL}{model}"
        self._checkpoints = Checkpoints(path, model)
        self._given: dict[str, Tensor] | None = None
        self.orders: Path | None = beside(path)
        self.what = f"checkpoint {path.name}" if fixed else f"the checkpoints in {path}"

    def newest(self, wait_s: float) -> Update | None:
        if not self._fixed:
            found = wait_for(self._checkpoints.newest, wait_s)
            if found is None and not self._path.is_dir():
                self._checkpoints.again()  # whatever is put there
                raise Interrupted(f"there is no directory {self._path}")
            return self._update(found) if found else None
        if self._given is not None:
            time.sleep(wait_s)
            return None
        read = manifest.read(self._path)
        tensors = read_model(self._path, self._model)
        self.ended = "it stays as it is"
        return self._update(Found(self._path.name, read.step, read.created, tensors))

    def close(self) -> None:
        pass

    def _update(self, found: Found) -> Update:
        before, self._given = self._given, found.tensors
        new = found.tensors if before is None else changed(before, found.tensors)
        whole = before is None or before.keys() != found.tensors.keys()
        return Update(found.step, found.made_at, found.tensors if whole else new, whole)


def _stamps(directory: Path) -> dict[str, Stamp]:
    """Of all checkpoints, by name; those that cannot be seen (any more) are left out."""
    found = {}
    for path in directory.glob("*/"):
        with contextlib.suppress(OSError), os.scandir(path) as files:
            stats = [(file.name, file.stat()) for file in files]
            found[path.name] = frozenset((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
    return found


def read_model(path: Path, name: str) -> dict[str, Tensor]:
    """A model's state out of a checkpoint, which is compared with its checksums."""
    shared = shelf.load(path).shared
    if name not in shared:
        models = [key for key in shared if key.startswith(_MODEL)]
        raise Unfit(f"it has no {name!r}: {nearest(name, models) if models else 'its script gave the run no model'}")
    return {key: value for key, value in shared[name].items() if isinstance(value, Tensor)}


def wait_for(look: Callable[[], Found | None], wait_s: float) -> Found | None:
    """Look until there is something, for at most so long."""
    deadline = time.monotonic() + wait_s
    while (found := look()) is None and (left := deadline - time.monotonic()) > 0:
        time.sleep(min(_LOOK_S, left))
    return found
