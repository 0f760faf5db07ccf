"""Versions of a model as files in a private directory: the keeper puts them there, replicas read them.

    tensors-00000012.safetensors    what was new in version 12
    version-00000012.json           version 12: in which file each of its tensors lies, with its SHA-256; written last
    orders.json                     which version is to be served, and what was ordered

A version whose tensors are mostly those of an earlier one writes only what changed. Files are written under a hidden
name and renamed, so that nobody reads a half; what the disk lost all the same is told by the checksums. A reader that
has a file open is not hurt when it is removed, and one that comes too late asks again what is served. One process
writes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from paceline.checkpoint import layout
from paceline.core.directory import write_private
from paceline.core.errors import CheckpointError, ConfigError
from paceline.serve.places import Unfit

_ORDERS = "orders.json"
_VERSION = re.compile(r"version-(\d{8,})\.json")
_TENSORS = re.compile(r"tensors-(\d{8,})\.safetensors")
_PARTS = (".orders.json.", ".version-", ".tensors-")  # how files that are being written are called
_MOST_FILES = 16  # that one version may lie in; else it is written whole


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """One version: `number` rises with each that is taken, `source_version` is what the source calls it."""

    number: int
    source_version: int
    made_at: float  # time.time() when the source made it
    metric: float | None = None  # on the holdout, where there is one


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be served. They outlive the process that gave them."""

    serving: int = 0  # 0: nothing yet
    pinned: int | None = None
    paused: bool = False
    withdrawn: tuple[int, ...] = ()  # rolled back: served only where they are pinned


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where a tensor lies."""

    file: int
    sha256: str


class _Index(msgspec.Struct, frozen=True, kw_only=True):
    version: Version
    tensors: dict[str, Place]


class Shelf:
    """The directory, of which the last `keep` versions are kept, and those that are served or pinned."""

    def __init__(self, directory: Path, keep: int = 8) -> None:
        if keep < 2:
            raise ConfigError(f"keep={keep}: at least 2 versions are kept, else there is nothing to roll back to")
        self.directory = Path(directory)
        self.keep = keep
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self.directory.stat().st_mode & 0o077:
            self.directory.chmod(0o700)

    # ---- reading

    def current(self) -> int:
        """The number of the version that is to be served; 0: there is none yet."""
        return self.orders().serving

    def orders(self) -> Orders:
        try:
            return msgspec.json.decode((self.directory / _ORDERS).read_bytes(), type=Orders)
        except FileNotFoundError:
            return Orders()
        except (OSError, msgspec.DecodeError) as error:
            raise Unfit(f"{self.directory / _ORDERS} cannot be read: {error}") from None

    def versions(self) -> list[Version]:
        """All that are here, by number."""
        found = [index.version for index in map(self._index, self._numbers()) if index]
        return sorted(found, key=lambda version: version.number)

    def where(self, number: int) -> dict[str, Place]:
        """Where each tensor of a version lies: two versions with the same place have the same tensor."""
        index = self._index(number)
        if index is None:
            raise Unfit(f"version {number} is not on the shelf")
        return index.tensors

    def read(self, number: int, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """The tensors of a version, or those of these names; Unfit where a file is torn, altered or gone."""
        where = self.where(number)
        wanted = {name: where[name] for name in (where if names is None else names)}
        found: dict[str, Tensor] = {}
        for file in sorted({place.file for place in wanted.values()}):
            own = {name: place.sha256 for name, place in wanted.items() if place.file == file}
            path = self._tensors(file)
            try:
                found |= _read(path, own)
            except (OSError, CheckpointError) as error:
                reason = error.strerror if isinstance(error, OSError) else error
                raise Unfit(f"version {number}: {path.name}: {reason}") from None
        return {name: found[name] for name in wanted}

    # ---- writing; one process

    def put(self, version: Version, tensors: Mapping[str, Tensor], base: int | None = None) -> None:
        """Add a version; it is not served yet. `base`: a version of which it has all tensors that are not given."""
        where = dict(self.where(base)) if base is not None else {}
        others = {place.file for name, place in where.items() if name not in tensors}
        if len(others) >= _MOST_FILES:
            assert base is not None
            tensors = {**self.read(base, [name for name in where if name not in tensors]), **tensors}
        if tensors:
            sums = self._write(self._tensors(version.number), tensors)
            where |= {name: Place(version.number, digest) for name, digest in sums.items()}
        index = _Index(version=version, tensors=where)
        write_private(self._path(version.number), msgspec.json.encode(index))

    def serve(self, number: int) -> None:
        """From now on this version is to be served."""
        self.order(msgspec.structs.replace(self.orders(), serving=number))

    def order(self, orders: Orders) -> None:
        """All at once. What is to be served must be here."""
        for number in (orders.serving, orders.pinned):
            if number and not self._path(number).exists():
                raise ConfigError(f"version {number} is not on the shelf: {self._told()}")
        write_private(self.directory / _ORDERS, msgspec.json.encode(orders))

    def prune(self) -> None:
        """Remove versions that are not kept, files that none of them needs, and what a killed process left."""
        orders = self.orders()
        numbers = sorted(self._numbers())
        kept = {*numbers[-self.keep :], orders.serving, orders.pinned}
        for number in numbers:
            if number not in kept:
                self._path(number).unlink(missing_ok=True)
        needed = {place.file for n in kept if n and (index := self._index(n)) for place in index.tensors.values()}
        for name in os.listdir(self.directory):
            match = _TENSORS.fullmatch(name)
            if name.startswith(_PARTS) or (match and int(match[1]) not in needed):
                (self.directory / name).unlink(missing_ok=True)

    def copy(self, other: Shelf) -> None:
        """All that is on another shelf, unread: for one that is empty."""
        for name in os.listdir(other.directory):
            if _is_ours(name):
                with contextlib.suppress(FileNotFoundError):  # it was put away just now
                    shutil.copyfile(other.directory / name, self.directory / name)

    def take(self, other: Shelf, version: Version) -> None:
        """This version of another shelf, whose files are not read, for one who waits; here it is called as given."""
        where = other.where(version.number)
        for file in {place.file for place in where.values()}:
            path = self._tensors(file)
            part = path.with_name(f".{path.name}.{os.getpid()}")
            try:
                shutil.copyfile(other._tensors(file), part)
                part.replace(path)
            finally:
                part.unlink(missing_ok=True)
        write_private(self._path(version.number), msgspec.json.encode(_Index(version=version, tensors=where)))

    def clear(self) -> None:
        """Take all away."""
        for name in os.listdir(self.directory):
            if _is_ours(name) or name.startswith(_PARTS):
                (self.directory / name).unlink(missing_ok=True)

    def remove(self, number: int) -> None:
        """A version that turned out to be no good."""
        self._path(number).unlink(missing_ok=True)

    # ---- inside

    def _write(self, path: Path, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        for name, tensor in held.items():
            if tensor.dtype not in layout.DTYPES:
                raise Unfit(f"{name!r} is {tensor.dtype}, which safetensors files do not hold")
        slots = layout.arrange(held)
        sums = {}
        part = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(layout.head(slots, {"format": "pt"}))
                for slot in slots:
                    view = _bytes(held[slot.name])
                    sums[slot.name] = hashlib.sha256(view).hexdigest()
                    file.write(view)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        return sums

    def _index(self, number: int) -> _Index | None:
        """None where it is not here, or cannot be read: then it is none."""
        with contextlib.suppress(OSError, msgspec.DecodeError):
            return msgspec.json.decode(self._path(number).read_bytes(), type=_Index)
        return None

    def _numbers(self) -> list[int]:
        return [int(match[1]) for name in os.listdir(self.directory) if (match := _VERSION.fullmatch(name))]

    def _told(self) -> str:
        numbers = sorted(self._numbers())
        return f"there are {', '.join(map(str, numbers))}" if numbers else "it is empty"

    def _path(self, number: int) -> Path:
        return self.directory / f"version-{number:08d}.json"

    def _tensors(self, number: int) -> Path:
        return self.directory / f"tensors-{number:08d}.safetensors"


def _is_ours(name: str) -> bool:
    return name == _ORDERS or bool(_VERSION.fullmatch(name) or _TENSORS.fullmatch(name))


def _read(path: Path, wanted: Mapping[str, str]) -> dict[str, Tensor]:
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(os.pread(file.fileno(), 8, 0), "little")
        if not 0 < length <= min(size - 8, layout.MAX_HEADER_BYTES):
            raise CheckpointError("it is torn")
        slots, _ = layout.parse(os.pread(file.fileno(), length, 8), size - 8 - length)
        places = {slot.name: slot for slot in slots}
        found = {}
        for name, sha256 in wanted.items():
            if name not in places:
                raise CheckpointError(f"it does not hold {name!r}")
            slot = places[name]
            tensor = torch.empty(slot.shape, dtype=slot.dtype)
            view = _bytes(tensor)
            file.seek(8 + length + slot.start)
            at = 0
            while at < len(view):
                count = file.readinto(view[at:])
                if not count:
                    raise CheckpointError("it ends before its data does")
                at += count
            if hashlib.sha256(view).hexdigest() != sha256:
                raise CheckpointError(f"{name!r} is not what was written: it was torn or altered")
            found[name] = tensor
        return found


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)
