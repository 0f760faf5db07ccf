"""SIGTERM and SIGINT, heard from before the private folder is made until it is gone.

The loop's own handlers end with the loop, and then a second signal, sent while the keeper is waited for, would end the
process and leave the folder. These stay: outside of the loop a signal is only remembered.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable
from typing import Any

_NUMBERS = (signal.SIGTERM, signal.SIGINT)


class Signals:
    """In the main thread."""

    def __init__(self) -> None:
        self._heard = False
        self._tell: Callable[[], object] = lambda: None

    def __enter__(self) -> Signals:
        self._before = {number: signal.signal(number, self._hear) for number in _NUMBERS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def to(self, end: Callable[[], None]) -> None:
        """Call `end` in this loop at each signal, and now if there was one already."""
        loop = asyncio.get_running_loop()
        self._tell = lambda: loop.call_soon_threadsafe(end)
        if self._heard:
            end()

    def _hear(self, *_: Any) -> None:
        self._heard = True
        with contextlib.suppress(RuntimeError):  # the loop is closed: all ends already
            self._tell()
