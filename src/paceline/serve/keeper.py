"""Takes versions from a source, puts them on the shelf, and follows orders."""

from __future__ import annotations

import time
from typing import Any, Protocol

import msgspec
import torch

from paceline.serve.shelf import Shelf, Version


class Source(Protocol):
    """Where versions come from."""

    def read(self) -> dict[str, torch.Tensor]: ...


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """How versions stand."""

    versions: list[Version]
    current: int
    pinned: int | None = None
    paused: bool = False


class Keeper:
    """In the parent."""

    def __init__(self, shelf: Shelf, source: Source, rules: Any = None) -> None:
        self._shelf, self._source = shelf, source
        self._versions: list[Version] = []
        self._pinned: int | None = None
        self._paused = False

    def start(self) -> None:
        version = Version(number=1, source_version=1, made_at=time.time())
        self._shelf.put(version, self._source.read())
        self._versions.append(version)

    def state(self) -> Standing:
        current = self._shelf.current()
        return Standing(versions=self._versions, current=current, pinned=self._pinned, paused=self._paused)

    def pin(self, number: int) -> None:
        self._pinned = number

    def unpin(self) -> None:
        self._pinned = None

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def roll_back(self) -> None:
        return None

    def close(self) -> None:
        return None
