"""Events: one JSON object per line, always written, from which everything that a person sees can be made.

A sink is anything that takes an event. The file sink flushes each line, so that a killed member's last words stay.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Event = dict[str, Any]
Sink = Callable[[Event], None]


class Events:
    """Hands each event to every sink, one after the other, whichever thread it comes from.

    >>> seen = []
    >>> events = Events(rank=0, sinks=[seen.append])
    >>> _ = events.emit("epoch", epoch=1)
    >>> seen[0]["kind"], seen[0]["epoch"], seen[0]["rank"]
    ('epoch', 1, 0)
    """

    def __init__(self, rank: int, sinks: list[Sink] | None = None) -> None:
        self.rank = rank
        self.sinks: list[Sink] = list(sinks or [])
        self.newest: dict[str, Event] = {}  # of each kind, for sinks that come later
        self._lock = threading.RLock()

    def emit(self, kind: str, **fields: Any) -> Event:
        event = {"kind": kind, "time": time.time(), "rank": self.rank, **fields}
        with self._lock:
            self.newest[kind] = event
            for sink in self.sinks:
                sink(event)
        return event


class JsonLines:
    """Appends events to a file. Numbers that JSON does not know (nan, inf) are written as strings."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = path.open("a", encoding="utf-8")
        with path.open("rb") as file:
            if file.seek(0, os.SEEK_END) and file.seek(-1, os.SEEK_END) >= 0 and file.read() != b"\n":
                self._file.write("\n")  # the last word of a killed member stays a line of its own
        self._failed = False

    def __call__(self, event: Event) -> None:
        if self._failed:
            return
        try:
            self._file.write(json.dumps(_plain(event), default=str) + "\n")
            self._file.flush()
        except OSError as error:  # a full disk must not stop the training
            self._failed = True
            print(f"paceline: events are no longer written to {self.path}: {error}")

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what a full disk has not taken would be written once more
            self._file.close()


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value
