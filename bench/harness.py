"""What every benchmark shares: its arguments, fair repeats, and the table of figures.

A figure is a ratio to a peer that was measured in the same run. `interleave` takes the sides' blocks in
turns (A B, B A, A B, ...), so that a machine that slows down or heats up slows both; the figure is the median
of the ratios of neighbouring blocks, and the spread shown is the range of the middle half of those ratios.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One line of the table. `value` is what the JSON holds; `goal` reads like `>= 3` or `<= 2`."""

    name: str
    value: float
    ours: str = ""
    peer: str = ""
    spread: str = ""
    goal: str = ""

    @property
    def holds(self) -> bool | None:
        if not self.goal:
            return None
        sign, number = self.goal.split()
        return self.value >= float(number) if sign == ">=" else self.value <= float(number)


@dataclass
class Report:
    """Figures as they come in; printed as one table and written as one flat JSON object."""

    title: str
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    extra: dict[str, float] = field(default_factory=dict)  # in the JSON, not in the table

    def add(self, figure: Figure) -> None:
        self.figures.append(figure)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def finish(self, json_file: str | None) -> None:
        self.print()
        if json_file:
            values = {f.name: f.value for f in self.figures} | self.extra
            Path(json_file).write_text(json.dumps(values, indent=1) + "\n")

    def print(self) -> None:
        header = ["figure", "ours", "peer", "ratio", "spread", "goal", "holds"]
        words = {True: "yes", False: "NO", None: "-"}
        rows = [[f.name, f.ours, f.peer, short(f.value), f.spread, f.goal, words[f.holds]] for f in self.figures]
        print(f"\n{self.title}: {machine()}")
        try:
            from rich.console import Console
            from rich.table import Table
        except ImportError:  # a machine where nothing can be installed
            widths = [max(len(r[i]) for r in [header, *rows]) for i in range(len(header))]
            for row in [header, *rows]:
                print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
        else:
            table = Table(*header)
            for row in rows:
                table.add_row(*row, style="red" if row[-1] == "NO" else None)
            console = Console()
            console = console if console.is_terminal else Console(width=120)
            console.print(table)
        for text in self.notes:
            print(f"note: {text}")


def short(value: float) -> str:
    """Three digits that mean something.

    >>> short(3.14159), short(1234.5), short(2e-7), short(-0.512)
    ('3.14', '1234', '2e-07', '-0.512')
    """
    if value and abs(value) < 1e-3:
        return f"{value:.0e}"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def machine() -> str:
    """The machine in a line: processor, cores, torch."""
    name = platform.processor() or platform.machine()
    try:
        with Path("/proc/cpuinfo").open() as file:
            name = next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    import torch

    cores = len(os.sched_getaffinity(0))
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{name}, {cores} cores{gpu}, torch {torch.__version__}, Python {platform.python_version()}"


def arguments(doc: str | None, extra: Callable[[argparse.ArgumentParser], None] | None = None) -> argparse.Namespace:
    """`--quick`, `--json FILE` and what the benchmark adds."""
    parser = argparse.ArgumentParser(
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="python -m bench.NAME [options]",
    )
    parser.add_argument("--quick", action="store_true", help="fewer repeats: an answer within a minute")
    parser.add_argument("--json", metavar="FILE", help="write figure -> number as one JSON object")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    if extra:
        extra(parser)
    return parser.parse_args()


Block = Callable[[int], float]  # run so many iterations, return the seconds that they took


def interleave(sides: Mapping[str, Block], *, repeats: int, block_s: float, limit_s: float) -> dict[str, list[float]]:
    """Seconds per iteration of every side, `repeats` times, in turns.

    Each side first runs twice unmeasured (which also says how many iterations last about `block_s`). Past
    `limit_s` no further repeat is begun, but three are made in any case.
    """
    iterations = {}
    for name, block in sides.items():
        block(2)
        iterations[name] = max(1, round(block_s / (block(2) / 2)))
    times: dict[str, list[float]] = {name: [] for name in sides}
    end = time.monotonic() + limit_s
    for repeat in range(repeats):
        if repeat >= 3 and time.monotonic() > end:
            break
        for name in list(sides) if repeat % 2 == 0 else reversed(list(sides)):
            times[name].append(sides[name](iterations[name]) / iterations[name])
    return times


def compare(
    name: str,
    ours: list[float],
    peer: list[float],
    *,
    goal: str = "",
    ratio: Callable[[float, float], float] = lambda ours, peer: peer / ours,
) -> Figure:
    """The figure of two interleaved series of seconds. By default: how many times faster ours is."""
    ratios = [ratio(a, b) for a, b in zip(ours, peer)]
    low, high = middle(ratios)
    return Figure(
        name=name,
        value=statistics.median(ratios),
        ours=milliseconds(ours),
        peer=milliseconds(peer),
        spread=f"{short(low)} .. {short(high)}",
        goal=goal,
    )


def overhead(ours: float, peer: float) -> float:
    """What ours adds, in percent."""
    return (ours / peer - 1) * 100


def milliseconds(times: list[float]) -> str:
    return f"{short(statistics.median(times) * 1e3)} ms"


def middle(values: list[float]) -> tuple[float, float]:
    """The range of the middle half.

    >>> middle([5.0, 1.0, 2.0, 3.0, 4.0])
    (2.0, 4.0)
    """
    ordered = sorted(values)
    quarter = (len(ordered) - 1) / 4
    return ordered[math.floor(quarter)], ordered[math.ceil(3 * quarter)]
