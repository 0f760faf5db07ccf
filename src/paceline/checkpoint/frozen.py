"""What does not change from one checkpoint to the next: frozen parameters, written once.

They lie in a file of their own, `frozen.safetensors`. A checkpoint after the first gets a hard link to the file of the
one before: it takes no room and no time, each checkpoint is whole by itself, and the file goes with the last one that
has it. Whether anything has changed is seen by comparing with a copy in host memory: a parameter without a gradient may
well change, as a moving average does. A file system without hard links gets the file anew.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from paceline.checkpoint import durable, manifest, shelf
from paceline.checkpoint.manifest import Entry
from paceline.checkpoint.part import Snapshot
from paceline.core.errors import CheckpointError


class _Lies(NamedTuple):
    """A file as it was when it was known to be right."""

    path: Path
    entry: Entry
    mark: tuple[int, int, int]


class Frozen:
    """Tensors that stay, copied to host memory, and where they lie on the disk."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._snapshot = Snapshot(dict(tensors))
        self._copies = self._snapshot.copies
        self._lies: _Lies | None = None

    def is_of(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether these are what was copied, to the last bit."""
        if tensors.keys() != self._copies.keys():
            return False
        return all(_same(tensors[name], copy) for name, copy in self._copies.items())

    def put(self, directory: Path, beside: Path) -> tuple[Entry, bool]:
        """Have the file in `directory`, by a link where a checkpoint in `beside` has it; whether it was written."""
        target = directory / manifest.FROZEN
        lies = self._lies if self._lies and _mark(self._lies.path) == self._lies.mark else self._found(beside)
        written = lies is None
        if lies is not None:
            try:
                os.link(lies.path, target)
            except OSError:
                written = True
        if written:
            size, sha256 = durable.write_file(target, self._snapshot.pieces())
            entry = Entry(name=manifest.FROZEN, bytes=size, sha256=sha256)
        else:
            assert lies is not None
            entry = lies.entry
        return entry, written

    def settle(self, directory: Path, entry: Entry) -> None:
        """The file lies in this checkpoint now."""
        path = directory / manifest.FROZEN
        mark = _mark(path)
        self._lies = _Lies(path, entry, mark) if mark else None

    def _found(self, beside: Path) -> _Lies | None:
        """The file of the newest checkpoint, as after a resume, if it has the same bytes and is whole."""
        for path, found in shelf.newest_first(beside)[:1]:
            for entry in found.files:
                mark = _mark(path / entry.name)
                if entry.name != manifest.FROZEN or mark is None or entry.bytes != self._snapshot.nbytes:
                    continue
                digest = hashlib.sha256()
                for piece in self._snapshot.pieces():
                    digest.update(piece)
                try:
                    if digest.hexdigest() == entry.sha256:
                        shelf.verify_file(path, entry)
                        return _Lies(path / entry.name, entry, mark)
                except CheckpointError:
                    return None
        return None


def _mark(path: Path) -> tuple[int, int, int] | None:
    """Changes when somebody writes to the file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _same(tensor: torch.Tensor, copy: torch.Tensor) -> bool:
    if tensor.shape != copy.shape or tensor.dtype != copy.dtype:
        return False
    mine = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return torch.equal(mine, copy.reshape(-1).view(torch.uint8))  # as bytes: nan is nan
