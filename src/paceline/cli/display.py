"""What the members print, on our own output.

Without a terminal every line gets its member's rank in front. On a terminal the ranks have colours, and
member 0 may draw on the terminal itself: its bytes pass as they are, and the others' lines are slipped in
where its display begins to be drawn again, which is the one moment when the cursor stands above it.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from typing import TextIO

from paceline.membership.lines import clean

_COLOURS = (36, 33, 35, 32, 34, 31)
_PATIENCE_S = 1.0  # how long lines wait for the display to be drawn again

# A display is drawn again by going to the beginning of the line, and up line by line, clearing each.
_AGAIN = re.compile(rb"\r(?!\n)(?:\x1b\[[0-9;]*[KA])*")
_CUT_OFF = re.compile(rb"(?:\x1b(?:\[[0-9;]*)?)?")
_CLEAR = b"\r\x1b[2K"
_SHOW_CURSOR = b"\x1b[?25h"


class Display:
    """Writes lines with their member's rank in front. Lines of all members come from one thread."""

    def __init__(self, num_members: int) -> None:
        self._width = len(str(num_members - 1))
        self._lock = threading.Lock()
        self._broken: set[TextIO] = set()

    def line(self, rank: int, stream: str, text: str) -> None:
        out = sys.stderr if stream == "err" else sys.stdout
        with self._lock:
            self._write(out, self._prefixed(rank, text, out))

    def raw(self, data: bytes) -> None:
        raise AssertionError("no member was given a terminal")

    def say(self, text: str) -> None:
        """The launcher's own words."""
        with self._briefly() as mine:
            if mine:
                self._write(sys.stderr, f"paceline: {text}\n".encode())

    def tick(self) -> None:
        """Called now and then."""

    def close(self) -> None:
        """No member is left."""

    @contextlib.contextmanager
    def _briefly(self) -> Iterator[bool]:
        """The lock, if it can be had soon: who holds it may be stuck in our output, and signals must not wait."""
        mine = self._lock.acquire(timeout=_PATIENCE_S)
        try:
            yield mine
        finally:
            if mine:
                self._lock.release()

    def _prefixed(self, rank: int, text: str, out: TextIO) -> bytes:
        prefix = f"[{rank:>{self._width}}] "
        if not coloured(out):
            return f"{prefix}{clean(text, colours=False)}\n".encode()
        end = "\x1b[0m" if "\x1b" in text else ""
        return f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{prefix}\x1b[0m{text}{end}\n".encode()

    def _write(self, out: TextIO, data: bytes) -> None:
        if out in self._broken:
            return
        try:
            out.flush()
            out.buffer.write(data)
            out.buffer.flush()
        except (OSError, ValueError):  # the reader has gone: the training goes on, and the logs are kept
            self._broken.add(out)


class Screen(Display):
    """A display that member 0 draws on."""

    def __init__(self, num_members: int) -> None:
        super().__init__(num_members)
        self._waiting: list[bytes] = []
        self._since = 0.0
        self._fresh = True  # the cursor stands at the beginning of an empty line

    def line(self, rank: int, stream: str, text: str) -> None:
        with self._lock:
            self._slip_in(self._prefixed(rank, text, sys.stdout))

    def say(self, text: str) -> None:
        with self._briefly() as mine:
            if mine:
                self._slip_in(f"paceline: {text}\n".encode())

    def raw(self, data: bytes) -> None:
        with self._lock:
            if self._waiting:
                data = self._with_waiting(data)
            self._write(sys.stdout, data)
            self._fresh = data.endswith(b"\n")
            if self._fresh:
                self._let_out(b"")

    def tick(self) -> None:
        with self._briefly() as mine:
            if mine and self._waiting and time.monotonic() - self._since > _PATIENCE_S:
                self._let_out(b"\n")

    def close(self) -> None:
        with self._lock:
            self._write(sys.stdout, _SHOW_CURSOR if self._fresh else b"\n" + _SHOW_CURSOR)
            self._fresh = True
            self._let_out(b"")

    def _slip_in(self, data: bytes) -> None:
        if self._fresh:
            self._write(sys.stdout, data)
            return
        if not self._waiting:
            self._since = time.monotonic()
        self._waiting.append(data)

    def _with_waiting(self, data: bytes) -> bytes:
        for again in reversed(list(_AGAIN.finditer(data))):
            at = again.end()
            if not _CUT_OFF.fullmatch(data, at):  # else more of the same may follow
                lines, self._waiting = b"".join(self._waiting), []
                return data[:at] + _CLEAR + lines + data[at:]
        return data

    def _let_out(self, before: bytes) -> None:
        if self._waiting:
            self._write(sys.stdout, before + b"".join(self._waiting))
            self._waiting = []
            self._fresh = True


def coloured(out: TextIO) -> bool:
    return out.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"


def can_draw() -> bool:
    """Whether our standard output is a terminal that a display can be drawn on."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
