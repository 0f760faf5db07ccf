"""Where versions come from: a run with servers or without, a checkpoint, a file. See `source` for what they do."""

from __future__ import annotations

import re
from pathlib import Path

from paceline.checkpoint import newest_first
from paceline.core.errors import ConfigError, nearest
from paceline.serve.sources.checkpoints import CheckpointSource
from paceline.serve.sources.files import FileSource
from paceline.serve.sources.run import RunSource
from paceline.serve.sources.source import Source, Update

_FILES = (".safetensors", ".pt", ".pth", ".bin")
_PARTS = ("run.json", "status", "checkpoints")  # one of them makes a directory a run's; the first is there at once


def make_source(where: str, *, root: Path = Path("runs"), token: str = "", model: int = 0, codec: str = "") -> Source:
    """What a user names: a run in `root` or its directory, "host:port" with a token, checkpoints, a checkpoint, a file.

    Args:
        model: the number of the model among a run's.
        codec: in which changes travel from a run's servers, such as "quantize(8)"; "": exactly.
    """
    if token or (re.search(r":\d+$", where) and not Path(where).exists()):
        return RunSource(where, token=token, model=model, codec=codec)
    for path in (Path(where), root / where):
        if path.is_file() or path.suffix in _FILES:
            return FileSource(path)
        if (path / "manifest.json").is_file():
            return CheckpointSource(path, model=model, fixed=True)
        if any((path / part).exists() for part in _PARTS):
            return RunSource(path, model=model, codec=codec)
        if path.is_dir() and newest_first(path):
            return CheckpointSource(path, model=model)
    names = sorted({path.parent.name for part in _PARTS for path in root.glob(f"*/{part}")})
    near = f": {nearest(where, names)}" if names else f"; there is no run in {str(root)!r}"
    raise ConfigError(f"{where!r} is no run, checkpoint or file of weights{near}")


__all__ = ["CheckpointSource", "FileSource", "RunSource", "Source", "Update", "make_source"]
