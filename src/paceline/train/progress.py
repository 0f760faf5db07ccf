"""What a person sees while a run goes on: two living lines on a terminal, plain lines anywhere else.

`make_progress` gives a sink for the events of the first member. Nothing here may cost or stop the training:
the display thins itself out, and whatever goes wrong with the output ends the display, not the run. The
living lines are in living.py; what both show comes from pace.py.
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
from paceline.train import figures
from paceline.train.pace import Pace

MODES = ("auto", "rich", "plain", "off")
_PLAIN_S = 5.0  # between two plain lines within an epoch
_MANY_EPOCHS = 100  # after which their ends are shown at most once a second
SPLIT = ("data", "compute", "wait")


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
        self._pace = Pace()
        self._shown_step = -1
        self._due = time.monotonic() + _PLAIN_S
        self._epoch_lines = 0

    def take(self, event: Event) -> None:
        kind, now = event.get("kind"), time.monotonic()
        if kind in ("epoch", "end"):
            # Thousands of tiny epochs would flood a log.
            if self._epoch_lines < _MANY_EPOCHS or now > self._due - _PLAIN_S + 1 or kind == "end":
                self._line_of_step()
            self._epoch_lines += 1
        self._pace.take(event)
        if kind == "step":
            if now >= self._due or self._pace.within() == self._pace.epoch_steps:
                self._line_of_step()
        elif text := happening(event, self._pace):
            self.line(text)

    def line(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()

    def close(self) -> None:
        self._line_of_step()

    def _line_of_step(self) -> None:
        if self._pace.step == self._shown_step or not self._pace.stepped:
            return
        self._shown_step = self._pace.step
        self._due = time.monotonic() + _PLAIN_S
        self.line(step_line(self._pace))


def step_line(pace: Pace) -> str:
    """Where the run stands, in one line."""
    parts = [pace.where(), f"step {pace.step}"]
    parts += [f"{figures.clean(name)} {figures.number(x)}" for name, x in pace.scalars.items()]
    if (rate := pace.samples_per_s()) is not None:
        parts.append(f"{figures.count(rate)} samples/s")
    if (split := pace.split()) is not None:
        parts.append(" ".join(f"{n} {figures.percent(x)}" for n, x in zip(SPLIT, split)))
    if (left := pace.left_s()) is not None:
        parts.append(f"left {figures.duration(left)}")
    return "  ".join(filter(None, parts))


def happening(event: Event, pace: Pace) -> str:
    """The line for an event that is not a step, or "" where it needs none."""
    kind = event.get("kind")
    if kind == "start":
        parts = [
            f"run {figures.clean(event.get('name') or '')}".rstrip(),
            figures.members(event.get("size") or 1),
        ]
        parts += [figures.clean(event[key]) for key in ("strategy", "device") if event.get(key)]
        if event.get("resumed_step"):
            parts.append(f"resumed at step {event['resumed_step']}")
        return "  ".join(parts)
    if kind == "metric":
        step = event.get("step")
        parts = [pace.where(), f"step {pace.step if step is None else step}"]
        return "  ".join(
            filter(None, [*parts, f"{figures.clean(event.get('name'))} {figures.number(event.get('value'))}"])
        )
    if kind == "checkpoint":
        cost = f"{figures.size(event.get('bytes'))} in {figures.value(event.get('seconds')):.2f} s"
        path = figures.clean(event.get("path") or "", 500)
        return f"checkpoint  step {event.get('step')}  {cost}  {path}".rstrip()
    if kind == "checkpoint_failed":
        return f"warning: checkpoint not written: {figures.clean(event.get('reason'), 2000)}"
    if kind == "warning":
        return f"warning: {figures.clean(event.get('message'), 2000)}"
    if kind == "end":
        seconds = figures.duration(event.get("seconds", pace.elapsed_s()))
        outcome = figures.clean(event.get("outcome") or "ended")
        return f"{outcome}  step {event.get('step', pace.step)}  after {seconds}"
    return ""


def _is_terminal(stream: IO[str]) -> bool:
    try:
        return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
    except ValueError:  # closed
        return False
