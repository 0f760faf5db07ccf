"""What a server was ordered, kept beside what it serves, so that the next start goes on with it.

    runs/big/serving/    a shelf with the orders and the version that they name, which its source may not have any more

It is there while something is pinned or paused: a server that is ordered nothing writes nothing. One that starts takes
over what is there. The first that has an order to keep has the folder until that is withdrawn or the server ends; what
others are ordered meanwhile ends with them, and `note` says so.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

from msgspec.structs import replace

from paceline.core.errors import PacelineError
from paceline.serve.private import lock
from paceline.serve.shelf import Shelf


class Kept:
    """In this folder, whose parent is there; None: nowhere."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._lock: int | None = None
        self._turn = threading.Lock()
        self.note = ""  # why what is ordered now is not kept

    def load(self, shelf: Shelf) -> str:
        """Put all that is there on an empty shelf, unchecked; why that cannot be done."""
        if self._directory is None or not self._directory.is_dir():
            return ""
        try:
            left = Shelf(self._directory)
            left.orders()
            shelf.copy(left)
        except (PacelineError, OSError) as error:
            return f"what was ordered before does not count, since it cannot be read: {error}"
        return ""

    def keep(self, shelf: Shelf) -> None:
        """The orders of now, which count already; where they cannot be kept, `note` says why."""
        with self._turn:
            self.note = ""
            orders = shelf.orders()
            ordered = orders.pinned is not None or orders.paused
            try:
                if self._directory is None:
                    self.note = "what is ordered ends with this server: --orders DIR keeps it" if ordered else ""
                elif not ordered and not self._directory.is_dir():
                    self._let_go()
                elif not self._hold(self._directory):
                    self.note = f"what is ordered ends with this server: another one has {self._directory}"
                elif ordered:
                    _write(Shelf(self._directory, keep=2), shelf)
                else:
                    Shelf(self._directory).clear()
                    with contextlib.suppress(OSError):  # something else lies there
                        self._directory.rmdir()
                    self._let_go()
            except (PacelineError, OSError) as error:
                self.note = f"what is ordered ends with this server, since it cannot be kept: {error}"

    def close(self) -> None:
        """What is kept stays."""
        with self._turn:
            self._let_go()

    def _hold(self, directory: Path) -> bool:
        """Whether the folder is ours, from now on at the latest."""
        if self._lock is not None and not directory.is_dir():
            self._let_go()  # somebody has removed it
        if self._lock is None:
            directory.mkdir(mode=0o700, exist_ok=True)
            self._lock = lock(directory)
        return self._lock is not None

    def _let_go(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _write(kept: Shelf, shelf: Shelf) -> None:
    """The orders, and of the versions the one that they serve."""
    orders = shelf.orders()
    served = next((version for version in shelf.versions() if version.number == orders.serving), None)
    if served:
        served = replace(served, metric=None)  # the next start may measure another
        if served not in kept.versions():
            kept.take(shelf, served)
    kept.order(orders)
    for version in kept.versions():
        if version.number != orders.serving:
            kept.remove(version.number)
    kept.prune()
