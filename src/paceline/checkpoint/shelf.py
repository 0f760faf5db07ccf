"""What is in a directory of checkpoints, for those who read: list, verify, load. Nothing is changed here."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from paceline.checkpoint import manifest, part, rebuild
from paceline.checkpoint.manifest import Entry, Manifest
from paceline.core.errors import CheckpointError

_NAME = re.compile(r"step-\d{8,}(-\d+)?")
Refused = Callable[[Path, CheckpointError], None]


class Loaded(NamedTuple):
    """A checkpoint that was read and matched its checksums."""

    path: Path
    step: int
    meta: dict[str, Any]
    shared: Any
    own: list[bytes]  # by rank at the time of saving; for part.unpack


def listed(directory: Path) -> list[Path]:
    """Everything that is named like a checkpoint, whole or not."""
    try:
        names = sorted(os.listdir(directory))
    except FileNotFoundError:
        return []
    except OSError as error:  # not a reason to start from nothing in silence
        raise CheckpointError(f"the checkpoints in {directory} cannot be listed: {error.strerror}") from None
    return [directory / name for name in names if _NAME.fullmatch(name)]


def newest_first(directory: Path, refused: Refused | None = None) -> list[tuple[Path, Manifest]]:
    """Checkpoints with a good manifest, the one written last in front; the others are told to `refused`."""
    found = []
    for path in listed(directory):
        try:
            found.append((path, manifest.read(path)))
        except CheckpointError as error:
            if refused:
                refused(path, error)
    return sorted(found, key=lambda pair: pair[1].number, reverse=True)


def verify(path: Path) -> Path:
    """`path`, after every file was compared with the manifest; CheckpointError names one that differs."""
    for entry in manifest.read(path).files:
        verify_file(path, entry)
    return path


def load(path: Path) -> Loaded:
    """Read one checkpoint, each file once; CheckpointError names the one that is torn or altered."""
    found = manifest.read(path)
    shared, *own = found.files
    frozen = _read_frozen(path, own.pop()) if own and own[-1].name == manifest.FROZEN else {}
    with _naming(shared.name), (path / shared.name).open("rb", buffering=0) as file:
        _compare("size", shared.bytes, os.fstat(file.fileno()).st_size)
        try:
            state, sha256 = part.read(file, shared.bytes, frozen)
        except CheckpointError:
            verify_file(path, shared)  # a wrong checksum explains more than what came of it
            raise
        _compare("SHA-256", shared.sha256, sha256)
    parts = []
    for entry in own:
        with _naming(entry.name):
            data = (path / entry.name).read_bytes()
            _compare("size", entry.bytes, len(data))
            sealed = part.seal(data)
            _compare("SHA-256", entry.sha256, sealed[: part.DIGEST_BYTES].hex())
            parts.append(sealed)
    return Loaded(path, found.step, rebuild.unflatten(found.meta, {}), state, parts)


def _read_frozen(path: Path, entry: Entry) -> dict[str, torch.Tensor]:
    with _naming(entry.name), (path / entry.name).open("rb", buffering=0) as file:
        _compare("size", entry.bytes, os.fstat(file.fileno()).st_size)
        try:
            tensors, sha256 = part.read(file, entry.bytes)
        except CheckpointError:
            verify_file(path, entry)
            raise
        _compare("SHA-256", entry.sha256, sha256)
    return dict(tensors)


def verify_file(path: Path, entry: Entry) -> None:
    """CheckpointError where a file is not what the manifest says."""
    with _naming(entry.name), (path / entry.name).open("rb") as file:
        _compare("size", entry.bytes, os.fstat(file.fileno()).st_size)
        _compare("SHA-256", entry.sha256, hashlib.file_digest(file, "sha256").hexdigest())


def _compare(what: str, promised: int | str, found: int | str) -> None:
    if promised != found:
        raise CheckpointError(f"its {what} should be {promised} and is {found}; it was torn or altered")


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Puts the file's name in front of what is wrong with it."""
    try:
        yield
    except CheckpointError as error:
        text = str(error)
        raise CheckpointError(text if text.startswith(name) else f"{name}: {text}") from None
    except OSError as error:
        raise CheckpointError(f"{name}: {error.strerror}") from None
