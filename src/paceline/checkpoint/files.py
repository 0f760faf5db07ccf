"""Checkpoints of a run in one directory: written in the background by one process, read by whoever resumes.

    checkpoints/step-00000120/manifest.json        names every file with its size and SHA-256; written last
                              shared.safetensors   what is the same on all members: model, optimizer, loader
                              rank-0.safetensors   one per member: random states, the strategy's own state
                              frozen.safetensors   parameters that are not trained; a link where it is as before
    checkpoints/.writing-…                         one that is being written; becomes step-… by a rename

There is one writer. Members hand it their own parts as bytes (`part.pack`), so hosts need no directory in
common and nobody waits for files of others. The directory knows nothing of runs or groups.

A checksum tells torn and altered files from whole ones. It is no signature: who can write here can write a
valid checkpoint. But nothing that is read is ever run as code.
"""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Sequence, Set
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from paceline.checkpoint import durable, manifest, part, shelf, tree
from paceline.checkpoint.frozen import Frozen
from paceline.checkpoint.manifest import Entry, Manifest
from paceline.checkpoint.part import Snapshot
from paceline.checkpoint.shelf import Loaded
from paceline.core.errors import CheckpointError, ConfigError, PacelineError

Taken = TypeVar("Taken")
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)


class CheckpointFailed(PacelineError):
    """A checkpoint could not be written. Those before it are untouched, and the next one may well succeed."""


class Written(NamedTuple):
    """A checkpoint that is on the disk."""

    path: Path
    step: int
    seconds: float  # in the background
    bytes: int  # that were written, besides links
    note: str  # what went wrong without harming it; "" when nothing did


class Checkpoints:
    """The checkpoints in `directory`, of which the last `keep` are kept.

    One thread of the caller's uses this object; it starts one more for each write.
    """

    def __init__(self, directory: Path, keep: int = 3, wait_limit_s: float = 600.0) -> None:
        if keep < 1:
            raise ConfigError(f"keep is {keep}, it must be at least 1; to keep no checkpoints, write none")
        self.directory = Path(directory)
        self.keep = keep
        self.wait_limit_s = wait_limit_s
        self._pending: Future[Written] | None = None
        self._last: Snapshot | None = None
        self._buffer: torch.Tensor | None = None  # the memory of the last snapshot, for the next one
        self._frozen: Frozen | None = None  # what the last snapshot has left to it
        self._number = 0
        self._refused: set[Path] = set()
        durable.remove_leftovers(self.directory)

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written: a snapshot taken now would wait for it."""
        return self._pending is not None and not self._pending.done()

    def snapshot(self, state: Any, frozen: Set[int] = frozenset()) -> Snapshot:
        """Copy `state` to host memory. Valid until the next snapshot, which reuses the memory.

        `frozen`: addresses of tensors that are not expected to change; they are copied and written when they have.

        Waits for a write under way, since its bytes are in that memory: only one copy is ever held.
        """
        self._wait()
        self._last = None
        try:
            self._last = Snapshot(state, self._buffer, frozen)
            if not self._last.frozen:
                self._frozen = None
            elif self._frozen is None or not self._frozen.is_of(self._last.frozen):
                self._frozen = None  # frees its memory
                self._frozen = Frozen(self._last.frozen)
            self._last.frozen = {}
        except MemoryError as error:
            raise CheckpointFailed(f"no checkpoint now: {error}; training can go on") from None
        self._buffer = self._last.buffer
        return self._last

    def write(
        self, step: int, shared: Snapshot, own: Sequence[bytes | bytearray], meta: dict[str, Any]
    ) -> Future[Written]:
        """Write a checkpoint in the background; the future carries Written or CheckpointFailed.

        `own` has the packed own part of every member, by rank; `meta` is small and without tensors.
        """
        if shared is not self._last:
            raise ConfigError("this snapshot is no longer valid: write the last one that was taken here")
        coded, tensors = tree.flatten(meta)
        if tensors or type(coded) is not dict or any(key.startswith("$") for key in coded):
            raise ConfigError("meta must be a dict with string keys and no tensors; tensors go into the state")
        self._wait()
        future: Future[Written] = Future()
        arguments = (future, step, shared, list(own), coded, self._frozen)
        threading.Thread(target=self._write, args=arguments, name="checkpoint", daemon=True).start()
        self._pending = future
        return future

    def latest(self, on_refused: Callable[[str], None]) -> Path | None:
        """The newest complete checkpoint; each one that is not is refused by name with the reason."""
        return self._newest(shelf.verify, on_refused)

    def load_latest(self, on_refused: Callable[[str], None]) -> Loaded | None:
        """`load` of `latest`, reading each file once."""
        return self._newest(shelf.load, on_refused)

    def load(self, path: Path) -> Loaded:
        """Read one checkpoint; CheckpointError names the file that is torn or altered."""
        return shelf.load(path)

    def clear(self) -> None:
        """Remove every checkpoint, for a run that starts over."""
        self._wait()
        for path in shelf.listed(self.directory):
            try:
                durable.remove_directory(path)
            except OSError as error:
                raise CheckpointFailed(
                    f"{path} could not be removed: {error.strerror}; remove it by hand, or give the run another name"
                ) from None

    def close(self, limit_s: float = 600.0) -> bool:
        """Wait for the write under way and give the memory back; False when it is not done by the limit."""
        if self._pending is not None:
            wait_for([self._pending], timeout=limit_s)
        if self.busy:
            return False
        self._buffer = self._last = self._frozen = None
        return True

    def _newest(self, take: Callable[[Path], Taken], on_refused: Callable[[str], None]) -> Taken | None:
        def refuse(path: Path, error: CheckpointError) -> None:
            self._refused.add(path)
            on_refused(f"checkpoint {path.name} is refused: {error}")

        for path, _ in shelf.newest_first(self.directory, refuse):
            try:
                return take(path)
            except CheckpointError as error:
                refuse(path, error)
        return None

    def _wait(self) -> None:
        if self._pending is not None:
            wait_for([self._pending], timeout=self.wait_limit_s)
        if self.busy:
            raise CheckpointFailed(
                f"the checkpoint before this is still being written to {self.directory} after "
                f"{self.wait_limit_s:g} s; is the disk slow or stuck? The one due now is left out"
            )

    # What follows runs in the writing thread.

    def _write(
        self,
        future: Future[Written],
        step: int,
        shared: Snapshot,
        own: list[bytes | bytearray],
        meta: dict[str, Any],
        frozen: Frozen | None,
    ) -> None:
        try:
            written = self._write_now(step, shared, own, meta, frozen)
        except (OSError, CheckpointError) as error:
            reason = str(error)
            if isinstance(error, OSError) and error.strerror:
                reason = error.strerror + (f" ({error.filename})" if error.filename else "")
            future.set_exception(
                CheckpointFailed(
                    f"the checkpoint of step {step} could not be written to {self.directory}: {reason}; "
                    "earlier ones are untouched, and the next one is tried as usual"
                )
            )
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(written)

    def _write_now(
        self,
        step: int,
        shared: Snapshot,
        own: list[bytes | bytearray],
        meta: dict[str, Any],
        frozen: Frozen | None,
    ) -> Written:
        began = time.monotonic()
        self.directory.mkdir(parents=True, exist_ok=True)
        temporary = durable.hidden(self.directory, "writing")
        try:
            temporary.mkdir()
            files = [_put(temporary / manifest.SHARED, shared.pieces())]
            for rank, data in enumerate(own):
                files.append(_put(temporary / manifest.own_name(rank), [part.open_seal(data)]))
            size = sum(entry.bytes for entry in files)
            if frozen:
                entry, written = frozen.put(temporary, self.directory)
                files.append(entry)
                size += entry.bytes if written else 0
            known = [found.number for _, found in shelf.newest_first(self.directory)]
            self._number = 1 + max([self._number, *known])
            whole = Manifest(step=step, number=self._number, created=time.time(), size=len(own), meta=meta, files=files)
            _put(temporary / manifest.NAME, [memoryview(manifest.render(whole))])
            durable.sync_directory(temporary)
            path = self._publish(temporary, step)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        durable.sync_directory(self.directory)
        if frozen:
            frozen.settle(path, files[-1])
        note = self._prune(path)
        return Written(path, step, time.monotonic() - began, size, note)

    def _publish(self, temporary: Path, step: int) -> Path:
        """Give the final name. A checkpoint that has it already stays, and this one is called step-…-2."""
        for attempt in itertools.count(1):
            path = self.directory / (f"step-{step:08d}" + (f"-{attempt}" if attempt > 1 else ""))
            try:
                if not path.exists():  # an empty directory would be replaced
                    os.rename(temporary, path)
                    return path
            except OSError as error:
                if error.errno not in _TAKEN:
                    raise
        raise AssertionError("unreachable")

    def _prune(self, newest: Path) -> str:
        """Remove all but the last `keep`, and the refused: the run has gone on from before them."""
        whole = [path for path, _ in shelf.newest_first(self.directory) if path not in self._refused]
        notes = []
        for path in [*whole[self.keep :], *list(self._refused)]:
            try:
                if path != newest:
                    durable.remove_directory(path)
            except FileNotFoundError:
                pass
            except OSError as error:
                notes.append(f"{path.name} could not be removed: {error.strerror}")
            self._refused.discard(path)
        return "; ".join(notes)


def _put(path: Path, pieces: Iterable[memoryview]) -> Entry:
    size, sha256 = durable.write_file(path, pieces)
    return Entry(name=path.name, bytes=size, sha256=sha256)
