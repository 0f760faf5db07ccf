"""A few lines that stay at the bottom of a terminal, while everything else is printed above them.

The lines are drawn over themselves; the cursor is never hidden, so a killed process leaves its terminal in
order. `print`, logging and progress bars of the user's own go on working: `write` of the stream *objects*
is replaced, not `sys.stdout`, because a logging handler made before the run began holds the old object.
Text that does not end its line (a prompt, tqdm) hides the lines until it does, or for a second. What goes
past the stream objects (C code, child processes) is not seen. Assumes an ANSI terminal of at least a few
columns.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import IO, NamedTuple

_REST_S = 0.05  # between two redraws that the user's own printing causes
_OPEN_S = 1.0  # how long an unfinished line of the user's keeps ours away


class Line(NamedTuple):
    """One line to show: its text with colours, and the columns that it takes."""

    text: str
    width: int


class Screen:
    """`show(lines)` replaces the lines, `above(text)` prints over them, `close()` leaves them standing.

    Nothing here raises: a terminal that is gone closes the screen, and `closed` says so.
    """

    def __init__(self, stream: IO[str]) -> None:
        self.closed = False
        self._stream = stream
        self._write = stream.write
        self._lock = threading.RLock()  # re-entrant: a signal may interrupt a draw and print
        self._pid = os.getpid()
        self._lines: list[Line] = []
        self._rows: list[int] = []  # widths of the lines that are on the screen now
        self._open_since = 0.0  # when somebody else left a line unfinished; 0: nobody did
        self._drawn = 0.0
        self._undo: list[Callable[[], None]] = []
        for other in {id(s): s for s in (stream, sys.stdout, sys.stderr)}.values():
            if other is stream or _same_terminal(other, stream):
                self._watch(other)

    def width(self) -> int:
        """Columns now."""
        with contextlib.suppress(OSError, ValueError):
            return max(os.get_terminal_size(self._stream.fileno()).columns, 20)
        return 80

    def show(self, lines: list[Line]) -> None:
        with self._lock:
            self._lines = lines
            if self._open_since:
                if time.monotonic() - self._open_since < _OPEN_S:
                    return
                self._end_open_line()
            self._draw()

    def above(self, text: str) -> None:
        with self._lock:
            self._end_open_line()
            self._put(self._home() + text + "\n")
            self._draw()

    def close(self) -> None:
        """Ends the last line and gives the streams back."""
        with self._lock:
            if self._rows:
                self._put("\n")
            self._release()

    def _end_open_line(self) -> None:
        if self._open_since:
            self._put("\n")
            self._open_since = 0.0

    def _home(self) -> str:
        """Clears our lines and moves to where the first began."""
        columns = self.width()  # a window made narrower has folded our lines
        rows = sum(max(-(-width // columns), 1) for width in self._rows)
        self._rows = []
        # In this form, line by line, since a launcher slips the lines of other members in where it ends.
        return "\r\x1b[2K" + "\x1b[1A\x1b[2K" * (rows - 1) if rows else ""

    def _draw(self) -> None:
        if not self._lines:
            return
        self._put(self._home() + "\n".join(line.text for line in self._lines))  # one write: nothing flickers
        self._rows = [line.width for line in self._lines]
        self._drawn = time.monotonic()

    def _put(self, text: str) -> None:
        if self.closed or os.getpid() != self._pid:
            return
        try:
            self._write(text)
            self._stream.flush()
        except (OSError, ValueError):  # the terminal went away, or somebody closed the stream
            self._release()

    def _release(self) -> None:
        self.closed = True
        while self._undo:
            self._undo.pop()()

    def _watch(self, stream: IO[str]) -> None:
        """Puts our lines out of the way of whatever is written to `stream`."""
        write, before = stream.write, getattr(stream, "__dict__", {}).get("write")

        def aside(text: str) -> int:
            if self.closed or not text or os.getpid() != self._pid:
                return write(text)  # a forked child has no screen, and there the lock may be held for ever
            with self._lock:
                if self._rows:
                    self._put(self._home())
                written = write(text)
                stream.flush()
                if not text.endswith("\n"):
                    self._open_since = time.monotonic()
                else:
                    self._open_since = 0.0
                    if time.monotonic() - self._drawn > _REST_S:
                        self._draw()
                return written

        def undo() -> None:
            if stream.__dict__.get("write") is not aside:
                return  # somebody wrapped us since; a closed screen passes everything on
            if before is None:
                del stream.__dict__["write"]
            else:
                stream.__dict__["write"] = before

        # An object that cannot be changed stays as it is: what goes there is not seen.
        with contextlib.suppress(AttributeError):
            setattr(stream, "write", aside)  # noqa: B010 (mypy refuses to assign a method)
            self._undo.append(undo)


def _same_terminal(one: IO[str], other: IO[str]) -> bool:
    try:
        return one.isatty() and os.fstat(one.fileno()).st_rdev == os.fstat(other.fileno()).st_rdev
    except (OSError, ValueError, AttributeError, io.UnsupportedOperation):
        return False
