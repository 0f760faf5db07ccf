"""The display on a terminal: a bar with epoch, step and time left; below it scalars, rate, split of time.

    epoch 3/10  ━━━━━━━━━━━━━━━━━━━━━──────────────────────────────────────  step 120/400 (920)  left 0:12
    loss 0.1234  lr 0.1000  5,210 samples/s  ━━━━━━━━━━━━━━━━  data 2% compute 90% wait 8%

Drawn at most ten times a second and for at most a hundredth of the time, whichever is less.
"""

from __future__ import annotations

import time
from typing import IO

from rich.console import Console
from rich.text import Text

from paceline.core.events import Event
from paceline.train import figures
from paceline.train.screen import Line, Screen
from paceline.train.story import SPLIT, Story

_DRAW_S = 0.1
_SHARE = 0.01  # of the time that drawing may take
_BAR_CELLS = 60  # at most
_SPLIT_CELLS = 16
COLOURS = {"data": "yellow", "compute": "cyan", "wait": "magenta"}
_ABOVE = {"start": "bold", "checkpoint": "dim", "end": "red"} | dict.fromkeys(
    ("warning", "checkpoint_failed"), "yellow"
)


class Living:
    """The two lines and what is printed above them."""

    def __init__(self, stream: IO[str]) -> None:
        self._story = Story(brief=True)
        self._pace = self._story.pace
        self._screen = Screen(stream)
        # The console only turns styles into text; it never writes by itself.
        self._console = Console(file=stream, force_terminal=True, force_jupyter=False, width=10_000)
        self._full, self._empty = "━─" if self._console.encoding.startswith("utf") else "=-"
        self._ended = False
        self._next = 0.0

    def take(self, event: Event) -> None:
        kind = str(event.get("kind"))
        for told, text in self._story.take(event):
            if told == kind or kind != "end":  # where the run ended, the two lines stay and say it
                self.line(self._styled(Text(text, style=_ABOVE.get(told, ""))))
        if kind == "end":
            self._ended = True
            self.close()
        elif time.monotonic() >= self._next:
            self._draw()

    def line(self, text: str) -> None:
        self._screen.above(text)

    def close(self) -> None:
        if self._pace.stepped:
            self._draw()
        self._screen.close()

    def _draw(self) -> None:
        if self._screen.closed or (self._pace.epoch is None and not self._pace.stepped):
            return
        began = time.monotonic()
        width = self._screen.width() - 1  # the last column would fold the line on some terminals
        lines = [line for line in (self._where(width), self._how(width)) if line.plain.strip()]
        for line in lines:
            line.truncate(width, overflow="ellipsis")
        self._screen.show([Line(self._styled(line), line.cell_len) for line in lines])
        now = time.monotonic()
        self._next = now + max(_DRAW_S, (now - began) / _SHARE)

    def _where(self, width: int) -> Text:
        """Epoch, bar, step, time left."""
        pace = self._pace
        left = Text(pace.where(), style="bold")
        right = Text()
        if pace.epoch_steps:
            right.append(f"step {min(pace.within(), pace.epoch_steps)}/{pace.epoch_steps}")
            if pace.epoch_begin:
                right.append(f" ({pace.step:,})", style="dim")
        else:
            right.append(f"step {pace.step:,}")
        if self._ended:
            right.append(f"  in {figures.duration(pace.elapsed_s())}", style="bold")
        elif (seconds := pace.left_s()) is not None:
            right.append(f"  left {figures.duration(seconds)}", style="bold")
        room = min(width - left.cell_len - right.cell_len - 4, _BAR_CELLS)
        if (done := pace.done()) is not None and room >= 5:
            full = round(done * room)
            left.append("  ").append(self._full * full, style="green").append(
                self._empty * (room - full), style="bright_black"
            )
        return Text.assemble(left, "  ", right)

    def _how(self, width: int) -> Text:
        """Scalars, samples per second, and where the time goes; what does not fit is cut off."""
        pace = self._pace
        line = Text()
        for name, x in pace.scalars.items():
            line.append(f"{figures.clean(name, 24)} ").append(figures.number(x), style="bold").append("  ")
        if (rate := pace.samples_per_s()) is not None:
            line.append(f"{figures.count(rate)} samples/s  ")
        if (split := pace.split()) is None:
            return line
        legend = Text(" ").join(
            Text(f"{name} {figures.percent(share)}", style=COLOURS[name]) for name, share in zip(SPLIT, split)
        )
        if line.cell_len + legend.cell_len + _SPLIT_CELLS + 2 <= width:
            ends = [round(sum(split[: i + 1]) * _SPLIT_CELLS) for i in range(3)]
            for name, begin, end in zip(SPLIT, [0, *ends], ends):
                line.append(self._full * (end - begin), style=COLOURS[name])
            line.append("  ")
        return line.append_text(legend)

    def _styled(self, text: Text) -> str:
        with self._console.capture() as capture:
            self._console.print(text, end="", soft_wrap=True)
        return capture.get()
