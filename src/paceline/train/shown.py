"""The summary of a run as it is shown when the run ends: a table in a terminal, plain text elsewhere."""

from __future__ import annotations

import io
import sys
from typing import IO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from paceline.train import figures
from paceline.train.summary import Share, Summary

_OUTCOMES = {"finished": "bold green", "failed": "bold red", "stopped": "bold yellow", "left early": "bold yellow"}


def table(summary: Summary) -> RenderableType:
    """The summary as rich shows it."""
    head = Text()
    head.append(summary.outcome or "ended", style=_OUTCOMES.get(summary.outcome, "bold"))
    facts = [f"{summary.step:,} steps", f"{figures.duration(summary.seconds)}"]
    facts += [f"{figures.count(summary.samples_per_s)} samples/s", f"{figures.size(summary.sent_bytes)} sent"]
    head.append("  " + "  ".join(facts))
    rows = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    rows.add_column("member", justify="right")
    several = len({m.host for m in summary.members if m.host}) > 1
    if several:
        rows.add_column("host", overflow="ellipsis", no_wrap=True, max_width=32)
    there = ["there"] * summary.some_of_the_time
    for name in (*there, "samples", "samples/s", "sent", "data", "compute", "wait"):
        rows.add_column(name, justify="right", no_wrap=True)
    rows.add_column("")
    for m in summary.members:
        slow = m.rank == summary.slowest
        note = f"slowest, {summary.slowest_by:.2f}x the others" if slow else m.gone
        first: list[str | Text] = [str(m.rank), *[Text(m.host)] * several, *[figures.duration(m.seconds)] * len(there)]
        rows.add_row(*first, *_cells(m), note, style="yellow" if slow else "")
    if len(summary.members) > 1:
        rows.add_section()
        first = ["all", *[Text()] * several, *[figures.duration(summary.trained_s)] * len(there)]
        rows.add_row(*first, *_cells(summary), "", style="bold")
    parts: list[RenderableType] = [head]
    if summary.members:
        parts += ["", rows]
    if summary.lost:
        parts += ["", Text(summary.lost_line, style="yellow")]
    if summary.views:
        parts += ["", Text(summary.views.text)]
    if summary.pushed:
        parts += ["", Text(summary.pushed.line)]
    if summary.apart:
        parts += ["", Text(summary.apart.line)]
    if summary.called:
        parts += ["", Text(summary.called.line)]
    if summary.cast:
        parts += ["", Text("precision " + summary.cast.line)]
    if summary.coded:
        parts += ["", Text("codec " + summary.coded.line)]
    if summary.advice:
        parts += ["", Text("advice: " + summary.advice, style="yellow")]
    return Group(*parts)


def text(summary: Summary, width: int = 200) -> str:
    """The table as plain text."""
    console = Console(file=io.StringIO(), width=width, highlight=False, force_terminal=False, force_jupyter=False)
    with console.capture() as capture:
        console.print(table(summary))
    return "".join(f"{line.rstrip()}\n" for line in capture.get().splitlines())


def print_summary(summary: Summary, stream: IO[str] | None = None) -> None:
    """Shows the table, as plain text where there is no terminal."""
    stream = stream if stream is not None else sys.stdout
    try:
        if stream.isatty():
            Console(file=stream, highlight=False).print(table(summary))
        else:
            stream.write(text(summary))
            stream.flush()
    except (OSError, ValueError):  # nobody reads any more; the same is in summary.json
        return


def _cells(part: Share | Summary) -> list[str]:
    counts = [figures.count(part.samples), figures.count(part.samples_per_s), figures.size(part.sent_bytes)]
    shares = [figures.percent(s) for s in (part.data_share, part.compute_share, part.wait_share)]
    return [*counts, *shares]
