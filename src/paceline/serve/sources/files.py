"""A file of weights as a source: safetensors, or what `torch.save(model.state_dict())` writes. It may be replaced."""

from __future__ import annotations

import time
from pathlib import Path

from torch import Tensor

from paceline.core.errors import ConfigError, Interrupted
from paceline.layers.transfer.files import read
from paceline.serve.places import Unfit
from paceline.serve.sources.source import Update, changed

_LOOK_S = 0.1


class FileSource:
    """The file at `path`, and whatever takes its place. One that is being written is refused until it is whole."""

    ended = ""
    note = ""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self._version = 0
        self._given: dict[str, Tensor] = {}
        self.what = f"file {path}"

    def newest(self, wait_s: float) -> Update | None:
        deadline = time.monotonic() + wait_s
        while (stat := self._look()) == self._seen:
            if (left := deadline - time.monotonic()) <= 0:
                return None
            time.sleep(min(_LOOK_S, left))
        self._seen = stat
        try:
            tensors = read(self._path)
        except ConfigError as error:
            raise Unfit(str(error)) from None
        first = not self._version
        self._version += 1
        new = changed(self._given, tensors)
        whole = first or self._given.keys() != tensors.keys()
        self._given = tensors
        return Update(self._version, stat[2] / 1e9, tensors if whole else new, whole)

    def close(self) -> None:
        pass

    def _look(self) -> tuple[int, int, int]:
        try:
            stat = self._path.stat()
        except OSError as error:
            raise Interrupted(f"{self._path} cannot be read: {error.strerror}") from None
        return stat.st_ino, stat.st_size, stat.st_mtime_ns
