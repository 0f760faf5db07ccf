"""Where a run keeps its files: one directory per run, named by the user or after the script and the time."""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path

from paceline.core.errors import ConfigError


def new_name(script: str, now: float) -> str:
    """A name from the script and the time.

    >>> new_name("examples/my digits.py", 0.0).startswith("my-digits-19")
    True
    """
    stem = re.sub(r"[^A-Za-z0-9_]+", "-", Path(script).stem).strip("-") or "run"
    return f"{stem}-{time.strftime('%Y%m%d-%H%M', time.localtime(now))}"


def make_directory(root: Path, name: str, script: str) -> Path:
    """The directory `root/name`; without a name a new one, named after the script and the time."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        if name:
            (root / name).mkdir(exist_ok=True)
            return root / name
        base = new_name(script, time.time())
        for number in range(1, 10_000):
            directory = root / (base if number == 1 else f"{base}-{number}")
            with contextlib.suppress(FileExistsError):
                directory.mkdir()  # by one run only, even if two start in the same minute
                return directory
        raise ConfigError(f"root={str(root)!r} holds too many runs of {script!r}: give a --name")
    except OSError as error:
        raise ConfigError(
            f"cannot make a run directory in root={str(root)!r}: {error.strerror}; "
            f"run from a directory that you may write to, or give another --root"
        ) from None


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read, at once or not at all: it holds the run's token."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.unlink(missing_ok=True)
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
