"""A file of weights as a source: safetensors, or what `torch.save(model.state_dict())` writes. It may be replaced.

It is read into memory before anything in it is looked at: a file that is mapped and then cut short, or written over,
would end this process, or change a version that is served. Nothing in it is run as code.
"""

from __future__ import annotations

import io
import pickle
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from paceline.core.errors import Interrupted
from paceline.serve.places import Unfit
from paceline.serve.sources.source import Update, beside, changed

_LOOK_S = 0.1
_PICKLED = (b"PK", b"\x80")  # how what torch.save writes begins, now and before 1.6
_WRAPPED = ("state_dict", "model_state_dict", "model")  # where scripts put the weights among other things


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
        self.orders: Path | None = beside(path)

    def newest(self, wait_s: float) -> Update | None:
        deadline = time.monotonic() + wait_s
        while (stat := self._look()) == self._seen:
            if (left := deadline - time.monotonic()) <= 0:
                return None
            time.sleep(min(_LOOK_S, left))
        self._seen = stat
        tensors = _tensors(self._path)
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


def _tensors(path: Path) -> dict[str, Tensor]:
    """Of a file of either kind; which it is, is seen from its first bytes."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise Interrupted(f"{path} cannot be read: {error.strerror}") from None
    try:
        if data[8:9] == b"{":
            return dict(safetensors.torch.load(data))
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except safetensors.SafetensorError as error:
        raise Unfit(f"{path} is not a whole safetensors file: {error}") from None
    except Exception as error:  # garbage may raise anything in the unpickler
        if not isinstance(error, pickle.UnpicklingError):
            raise Unfit(f"{path} is neither safetensors nor a state dict of torch: {error}") from None
        if not data.startswith(_PICKLED):
            raise Unfit(f"{path} is neither safetensors nor a state dict of torch") from None
        raise Unfit(f"{path} holds more than tensors, and opening it could run code: save model.state_dict()") from None
    return _state(state, path)


def _state(state: Any, path: Path) -> dict[str, Tensor]:
    if isinstance(state, Mapping):
        if state and all(isinstance(value, Tensor) for value in state.values()):
            return dict(state)
        inner = [key for key in _WRAPPED if isinstance(state.get(key), Mapping)]
        if len(inner) == 1:
            return {name: value for name, value in state[inner[0]].items() if isinstance(value, Tensor)}
    raise Unfit(f"{path} holds a {type(state).__name__}: save model.state_dict()")
