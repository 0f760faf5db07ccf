"""Who holds a run that was submitted to a queue: engine.json in its directory, next to where run.json will be."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from paceline.core.errors import ConfigError

FILE = "engine.json"


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """What engine.json holds."""

    engine: str
    id: str  # by which the engine knows it
    command: list[str] = []  # that submitted it
    at: float = 0.0  # time.time()
    log: str = ""  # where what is printed before the run begins is kept


def write(directory: Path, held: Held) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / FILE).write_bytes(msgspec.json.format(msgspec.json.encode(held)) + b"\n")


def read(directory: Path) -> Held | None:
    """None where a run was not submitted; ConfigError where the file cannot be understood."""
    try:
        return msgspec.json.decode((directory / FILE).read_bytes(), type=Held)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{directory / FILE} cannot be read: {error}") from None


def is_this(directory: Path) -> bool:
    """Whether this process is in the very job that was submitted for the run."""
    found = read(directory)
    return found is not None and found.engine == "slurm" and found.id == os.environ.get("SLURM_JOB_ID")
