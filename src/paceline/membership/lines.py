"""Lines out of the bytes that a process prints, whatever it prints.

Between the agent's pipes and whoever shows or keeps the lines. A line that is drawn over and over (a
progress bar) is shown now and then, not each time; an unfinished one is shown when nothing follows it for a
while; a very long one is cut; bytes that are not text are replaced. With `hold_s`, lines wait that long
before they count, since a display of several lines that is drawn again moves the cursor up and takes them
back.
"""

from __future__ import annotations

import re
from collections import deque

_QUIET_S = 1.0  # an unfinished line is shown after this silence; a redrawn one at most this often
_LONGEST = 1 << 16  # bytes
_HELD = 200  # lines; no display is higher than that

_ENDS = re.compile(rb"\r?\n|\r(?:\x1b\[[0-9;]*[AK])*")
_CUT_OFF = re.compile(rb"\r(?:\x1b\[[0-9;]*[AK])*(?:\x1b(?:\[[0-9;]*)?)?\Z")  # an end may be cut off here
_UP = re.compile(rb"\x1b\[([0-9]*)A")
_ESCAPES = re.compile(r"\x1b\[[0-9;?<=>]*[ -/]*([@-~])|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[@-Z\\^_]?")
_CONTROLS = re.compile(r"[\x00-\x08\x0a-\x1a\x1c-\x1f\x7f\x80-\x9f]")


class Lines:
    """Feed it bytes, get lines.

    >>> lines = Lines()
    >>> lines.feed(b"one\\r\\ntw", now=0), lines.feed(b"o\\nthr", now=0)
    (['one'], ['two'])
    >>> lines.settle(now=0.5), lines.settle(now=2)
    ([], ['thr'])
    """

    def __init__(self, hold_s: float = 0.0) -> None:
        self._hold_s = hold_s
        self._held: deque[tuple[float, bytes]] = deque()
        self._open = bytearray()
        self._tail = b""  # the beginning of an end of line
        self._fed = 0.0
        self._redrawn = -_QUIET_S  # when a line that is drawn over was shown last
        self._shown = False  # the unfinished line was shown, so its end says nothing new

    def feed(self, data: bytes, now: float) -> list[str]:
        """The lines that `data` completes."""
        self._fed = now
        out: list[bytes] = []
        data = self._tail + data
        cut_off = _CUT_OFF.search(data)
        self._tail = data[cut_off.start() :] if cut_off else b""
        data = data[: len(data) - len(self._tail)]
        start = 0
        for end in _ENDS.finditer(data):
            self._extend(data[start : end.start()], out, now)
            start = end.end()
            if end[0].endswith(b"\n"):
                self._finish(out, now)
            else:
                self._redraw(end[0], out, now)
        self._extend(data[start:], out, now)
        return self._text(out, now)

    def settle(self, now: float) -> list[str]:
        """The lines that count because nothing came after them for a while."""
        out: list[bytes] = []
        if (self._open or self._tail) and not self._hold_s and now - self._fed >= _QUIET_S:
            self._tail = b""
            if self._open:
                self._finish(out, now)
                self._shown = True
        return self._text(out, now)

    def end(self) -> list[str]:
        """All that is left."""
        out: list[bytes] = []
        if self._open:
            self._finish(out, 0)
        return self._text(out, float("inf"))

    def _extend(self, part: bytes, out: list[bytes], now: float) -> None:
        if not part:
            return
        self._shown = False
        self._open += part
        while len(self._open) > _LONGEST:
            rest = self._open[_LONGEST:]
            del self._open[_LONGEST:]
            self._finish(out, now)
            self._open = rest

    def _finish(self, out: list[bytes], now: float) -> None:
        if self._open or not self._shown:
            line = bytes(self._open)
            if self._hold_s:
                self._held.append((now, line))
            else:
                out.append(line)
        self._open.clear()
        self._shown = False

    def _redraw(self, end: bytes, out: list[bytes], now: float) -> None:
        if self._hold_s:
            for _ in range(sum(int(n or 1) for n in _UP.findall(end))):
                if self._held:
                    self._held.pop()
        elif self._open and now - self._redrawn >= _QUIET_S:
            self._redrawn = now
            out.append(bytes(self._open))
        self._open.clear()

    def _text(self, out: list[bytes], now: float) -> list[str]:
        while self._held and (now - self._held[0][0] >= self._hold_s or len(self._held) > _HELD):
            out.append(self._held.popleft()[1])
        return [clean(line.decode("utf-8", "replace")) for line in out]


def clean(text: str, colours: bool = True) -> str:
    """Without anything that would move a terminal's cursor or ring its bell; colours stay if wanted.

    >>> clean("\\x1b[31mred\\x1b[0m\\x1b[2J\\x07"), clean("\\x1b[31mred\\x1b[0m", colours=False)
    ('\\x1b[31mred\\x1b[0m', 'red')
    """
    if "\x1b" in text:
        text = _ESCAPES.sub(lambda m: m[0] if m[1] == "m" and colours else "", text)
    return _CONTROLS.sub("", text)
