"""What RUN|CHECKPOINT names: a run, a directory of checkpoints, one checkpoint, or a file of weights."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from paceline.checkpoint import shelf
from paceline.core.errors import CheckpointError, ConfigError, nearest

_MODEL = "model."  # before the numbers of a run's models, among what its checkpoints hold


def find(text: str, root: Path) -> Path:
    """A file of safetensors, a checkpoint, or the directory of a run's checkpoints; ConfigError: none of them."""
    for path in (Path(text), root / text):
        if path.is_file():
            return path
        if (path / "manifest.json").is_file():
            return path
        if (path / "checkpoints").is_dir():
            return path / "checkpoints"
        if path.is_dir() and shelf.newest_first(path):
            return path
    names = [path.parent.name for path in root.glob("*/checkpoints")]
    near = f": {nearest(text, names)}" if names else f"; there is none in {str(root)!r}"
    raise ConfigError(f"{text!r} is no run, checkpoint or file of safetensors{near}")


class OneFile:
    """A source with one version: the file, or the newest checkpoint when it is read."""

    def __init__(self, path: Path, number: int = 0) -> None:
        self._path = path
        self._name = f"{_MODEL}{number}"

    def read(self) -> dict[str, torch.Tensor]:
        path = self._path
        try:
            if path.is_file():
                return load_file(path)
            if not (path / "manifest.json").is_file():
                found = shelf.newest_first(path)
                if not found:
                    raise ConfigError(f"{path} has no whole checkpoint")
                path = found[0][0]
            state = shelf.load(path).shared
        except (CheckpointError, OSError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from None
        if self._name not in state:
            raise ConfigError(f"{path} has no {self._name!r}: {nearest(self._name, state)}")
        tensors: dict[str, torch.Tensor] = state[self._name]
        return tensors
