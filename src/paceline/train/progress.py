"""What a person sees while a run goes on: two living lines on a terminal, plain lines anywhere else.

`make_progress` gives a sink for the events of the first member. Nothing here may cost or stop the training:
the display thins itself out, and whatever goes wrong with the output ends the display, not the run. The
living lines are in living.py; what both tell is in story.py.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Callable
from typing import IO, Protocol

from paceline.core.errors import ConfigError, nearest
from paceline.core.events import Event
from paceline.train.story import Story, standing

MODES = ("auto", "rich", "plain", "off")
_PLAIN_S = 5.0  # between two plain lines within an epoch
_SOON_S = 1.0  # before the line of an epoch's end, none is worth it


class Progress(Protocol):
    """A sink with an end. `line` prints text above the display: other members' output, for example."""

    def __call__(self, event: Event) -> None: ...
    def line(self, text: str) -> None: ...
    def close(self) -> None: ...


class Display(Protocol):
    """One way of showing; may raise."""

    def take(self, event: Event) -> None: ...
    def line(self, text: str) -> None: ...
    def close(self) -> None: ...


def make_progress(mode: str = "auto", stream: IO[str] | None = None) -> Progress:
    """The display for `mode`: auto (rich on a terminal, else plain), rich, plain, off. On standard error.

    >>> progress = make_progress("plain", sys.stdout)
    >>> progress({"kind": "warning", "message": "8 members share 2 cores"})
    warning: 8 members share 2 cores
    """
    if mode not in MODES:
        raise ConfigError(f"progress {mode!r} is not known: {nearest(mode, MODES)}")
    stream = stream if stream is not None else sys.stderr
    if mode == "off" or stream is None:  # no standard error at all: a service
        return Off()
    if mode == "rich" or (mode == "auto" and _is_terminal(stream)):
        from paceline.train.living import Living  # rich takes a moment to import

        return Guarded(Living(stream))
    return Guarded(Plain(stream))


class Off:
    """Shows nothing."""

    def __call__(self, event: Event) -> None:
        pass

    def line(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


class Guarded:
    """Keeps a display's trouble away from the training, and closes the display at exit."""

    def __init__(self, display: Display) -> None:
        self._display: Display | None = display
        self._pid = os.getpid()
        atexit.register(self.close)

    def __call__(self, event: Event) -> None:
        self._do(lambda display: display.take(event))

    def line(self, text: str) -> None:
        self._do(lambda display: display.line(text))

    def close(self) -> None:
        self._do(lambda display: display.close())
        self._display = None
        atexit.unregister(self.close)

    def _do(self, act: Callable[[Display], None]) -> None:
        if self._display is None or os.getpid() != self._pid:  # a forked child must not draw
            return
        try:
            act(self._display)
        except Exception as error:
            display, self._display = self._display, None
            with contextlib.suppress(Exception):
                display.close()
            if not isinstance(error, OSError):  # that one says that nobody reads any more; others are our bugs
                with contextlib.suppress(OSError, ValueError):
                    print(f"paceline: the progress display stopped: {error!r}", file=sys.stderr)


class Plain:
    """Lines to grep: one every few seconds, one at the end of each epoch, one for whatever else happens."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._story = Story()
        self._due = time.monotonic() + _PLAIN_S

    def take(self, event: Event) -> None:
        for kind, text in self._story.take(event):
            self.line(text)
            if kind == "epoch":
                self._due = time.monotonic() + _PLAIN_S
        left_s = self._story.pace.epoch_left_s()  # at whose end a line follows, with the means over it
        soon = left_s is not None and left_s < _SOON_S
        if event.get("kind") == "step" and time.monotonic() >= self._due and not soon:
            self._due = time.monotonic() + _PLAIN_S
            self.line(standing(self._story.pace))

    def line(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()

    def close(self) -> None:
        for _, text in self._story.epoch(last=True):
            self.line(text)


def _is_terminal(stream: IO[str]) -> bool:
    try:
        return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
    except ValueError:  # closed
        return False
