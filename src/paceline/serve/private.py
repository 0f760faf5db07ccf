"""The private folder of a server: settings, the token among them, and the last versions. It goes when the server goes.

However that ends: a server that ends by itself removes its folder. One that is killed cannot; its replicas do it, since
they see that it is gone, and where they were killed too, the next server that starts here. Whether a server lives is
told by a lock that it holds on the folder, which the kernel takes away with the process: a process number could be
another's by then.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "paceline-serving-"


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """A new one, which its owner alone can read; those that killed servers have left here are removed before."""
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        remove_left(left)
    made = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}"))
    held = lock(made)
    assert held is not None
    # Under its name only now that it is locked: another server that starts would take it for one that was left.
    directory = made.rename(made.with_name(made.name.removeprefix(".")))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(held)


def remove_left(directory: Path) -> None:
    """Remove a folder whose server is gone; one whose server lives stays, and so does another user's."""
    held = lock(directory)
    if held is not None:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(held)


def lock(directory: Path) -> int | None:
    """A descriptor that holds the lock; None where somebody else does, or there is no such folder of ours."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        if os.fstat(descriptor).st_uid != os.getuid():
            raise PermissionError(directory)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
