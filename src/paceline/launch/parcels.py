"""What passes between `paceline.launch` and the members that it starts: a function, its results, its errors.

Files in a folder that the parent has made for this one call, and that only their owner can enter or read. What is in
them is pickled: whoever could put something else there is the same user on the same host, who can do to these processes
whatever a pickle could (docs/decisions/0032). Nothing that has come from a socket, a checkpoint or another host is ever
read here.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any, BinaryIO

import cloudpickle

from paceline.core.errors import PacelineError


def write(path: Path, value: Any, about: str = "") -> None:
    """All of it or nothing, for the owner's eyes; `about` can be read also where the value cannot."""
    part = path.with_name(f".{path.name}")
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            pickle.dump(about, file)
            cloudpickle.dump(value, file)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def read(path: Path) -> Any:
    """What was written; refused if anybody else could have written it."""
    with _opened(path) as file:
        pickle.load(file)  # noqa: S301  (see above)
        return pickle.load(file)  # noqa: S301


def about(path: Path) -> str:
    """What was written about it."""
    with _opened(path) as file:
        return str(pickle.load(file))  # noqa: S301


def _opened(path: Path) -> BinaryIO:
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb")
    for stat in (os.fstat(file.fileno()), os.stat(path.parent)):
        if stat.st_uid != os.geteuid() or stat.st_mode & 0o077:
            file.close()
            raise PacelineError(f"{path} is not private to this user, and is not read")
    return file
