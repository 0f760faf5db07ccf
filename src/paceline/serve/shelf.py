"""Versions of a model as files in a private directory: the keeper puts them there, replicas read them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file, save_file


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """One version: `number` rises with each that is taken, `source_version` is what the source calls it."""

    number: int
    source_version: int
    made_at: float
    metric: float | None = None


class Shelf:
    """The directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = Path(directory)

    def put(self, version: Version, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write a version and make it the one to be served."""
        file = self.directory / f"{version.number}.safetensors"
        part = file.with_name(f".{file.name}")
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, part)
        os.replace(part, file)
        pointer = self.directory / ".current"
        pointer.write_text(str(version.number))
        os.replace(pointer, self.directory / "current")

    def read(self, number: int) -> dict[str, torch.Tensor]:
        return load_file(self.directory / f"{number}.safetensors")

    def current(self) -> int:
        """0: there is none yet."""
        try:
            return int((self.directory / "current").read_text())
        except FileNotFoundError:
            return 0
