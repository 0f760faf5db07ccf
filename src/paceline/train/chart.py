"""One chart of the report as HTML: drawn as inline SVG, with labels as text beside it.

The drawing is stretched to whatever width the page has, and the labels are not: so a chart can be read on a
phone. It is whole without any script; the page's script adds what is under the pointer.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from paceline.train import figures
from paceline.train.history import Floats
from paceline.train.thin import Drawn, log_ticks, span, ticks, time_ticks

_FEW = 30  # points that are drawn as dots as well
_MARKS = 60  # vertical lines at most; of more, every second, third, ... is drawn


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """What to draw."""

    title: str
    drawn: Drawn
    last: str = ""  # beside the title
    note: str = ""  # below the chart
    x_name: str = "step"  # or "time", in seconds
    unit: str = ""
    marks: tuple[float, ...] = ()  # epochs
    resumes: tuple[float, ...] = ()
    x_range: tuple[float, float] | None = None  # None: that of the points
    wide: bool = False
    zero: bool = False  # whether the axis begins at zero


class Stack(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of a whole over time, one on top of the other."""

    title: str
    x: Floats
    shares: Floats  # a row per moment, a column per name
    names: tuple[str, ...]
    note: str = ""


def draw(chart: Chart, key: str) -> str:
    """A figure; `key` is its name in the page and in `points`."""
    d = chart.drawn
    parts = [y for y in (d.y, d.low, d.high) if y is not None]
    values = np.concatenate(parts)
    x0, x1 = chart.x_range or _x_range(d.x)
    plots = [_plot(chart, (x0, x1), span(values, chart.zero), log=False)]
    positive = values[np.isfinite(values) & (values > 0)]
    switch = ""
    if len(positive) > 2 and positive.max() / positive.min() >= 10:
        low, high = float(positive.min()), float(positive.max())
        plots.append(_plot(chart, (x0, x1), (low / (high / low) ** 0.05, high * (high / low) ** 0.05), log=True))
        switch = f'<input type="checkbox" id="{key}-log"><label for="{key}-log">log</label>'
    last = f'<span class="last">{html.escape(chart.last)}</span>' if chart.last else ""
    note = f'<p class="note">{html.escape(chart.note)}</p>' if chart.note else ""
    head = f"<figcaption><h3>{html.escape(chart.title)}</h3>{last}</figcaption>"
    kinds = "chart" + (" wide" if chart.wide else "") + (" switched" if switch else "")
    return f'<figure class="{kinds}" data-key="{key}">{head}{switch}{"".join(plots)}{note}</figure>'


def points(chart: Chart) -> dict[str, Any]:
    """What the page's script shows under the pointer."""
    d = chart.drawn
    series = {"name": chart.title, "y": _short(d.y)}
    if d.low is not None and d.high is not None:
        series |= {"low": _short(d.low), "high": _short(d.high)}
    return {"x": _short(d.x, 7), "by": chart.x_name, "unit": chart.unit, "series": [series]}


def draw_stack(stack: Stack, key: str) -> str:
    """A figure of areas that fill the whole height."""
    x0, x1 = _x_range(stack.x)
    place = _scale(x0, x1, False)
    xs = [place(x) for x in stack.x]
    tops = np.cumsum(stack.shares, axis=1)
    below = np.zeros(len(stack.x))
    areas = []
    for column, name in enumerate(stack.names):
        upper = [f"{x:.1f} {1000 - 1000 * y:.0f}" for x, y in zip(xs, tops[:, column])]
        lower = [f"{x:.1f} {1000 - 1000 * y:.0f}" for x, y in zip(xs, below)]
        if xs:
            areas.append(f'<path class="{name}" d="M{"L".join(upper)}L{"L".join(reversed(lower))}Z"/>')
        below = tops[:, column]
    labels = _labels("x", [(place(t) / 10, _x_label(t, "time")) for t in time_ticks(x0, x1, 3)])
    labels += _labels("y", [(100 - 100 * t, f"{100 * t:.0f}%") for t in (0.0, 0.5, 1.0)])
    plot = f'<div class="plot" data-x="{x0:.6g} {x1:.6g}" data-y="0 1">{_svg("".join(areas))}{labels}</div>'
    head = f'<figcaption><h3>{html.escape(stack.title)}</h3><span class="last">{html.escape(stack.note)}</span>'
    return f'<figure class="chart small" data-key="{key}">{head}</figcaption>{plot}</figure>'


def stack_points(stack: Stack) -> dict[str, Any]:
    series = [{"name": n, "y": _short(stack.shares[:, i])} for i, n in enumerate(stack.names)]
    return {"x": _short(stack.x, 7), "by": "time", "unit": "%", "series": series, "stacked": True}


def _plot(chart: Chart, x_range: tuple[float, float], y_range: tuple[float, float], log: bool) -> str:
    d = chart.drawn
    across, up = _scale(*x_range, False), _scale(*y_range, log)
    y_ticks = log_ticks(*y_range) if log else ticks(*y_range)
    lines = "".join(f"M0 {1000 - up(t):.1f}H1000" for t in y_ticks)
    body = [f'<path class="grid" d="{lines}"/>'] if lines else []
    for kind, places in (("epoch", chart.marks), ("resume", chart.resumes)):
        every = -(-len(places) // _MARKS) or 1
        if marks := "".join(f"M{across(x):.1f} 0V1000" for x in places[::every]):
            body.append(f'<path class="{kind}" d="{marks}"/>')
    if d.low is not None and d.high is not None:
        body.append(f'<path class="band" d="{_band(d, across, up)}"/>')
    line, dots = _line(d.x, d.y, across, up)
    body.append(f'<path class="line" d="{line}"/>')
    if dots:
        body.append(f'<path class="dots" d="{dots}"/>')
    if len(d.lost):
        some = d.lost[:: -(-len(d.lost) // 200)]
        body.append(f'<path class="lost" d="{"".join(f"M{across(x):.1f} 1000v-30" for x in some)}"/>')
    labels = _labels("y", [(100 - up(t) / 10, _y_label(t, y_ticks, log)) for t in y_ticks])
    about = 6 if chart.wide else 4
    x_ticks = time_ticks(*x_range, about) if chart.x_name == "time" else ticks(*x_range, about)
    labels += _labels("x", [(across(t) / 10, _x_label(t, chart.x_name)) for t in x_ticks])
    ranges = f'data-x="{x_range[0]:.9g} {x_range[1]:.9g}" data-y="{y_range[0]:.9g} {y_range[1]:.9g}"'
    return f'<div class="plot{" log" if log else " lin"}" {ranges}>{_svg("".join(body))}{labels}</div>'


def _scale(low: float, high: float, log: bool) -> Callable[[float], float]:
    """From values to 0..1000; nan for what has no place on the axis."""
    if not log:
        half = high / 2 - low / 2 or 0.5  # halves: the range itself may overflow
        return lambda x: (x / 2 - low / 2) / half * 1000
    begin, length = math.log(low), math.log(high) - math.log(low) or 1.0
    return lambda x: (math.log(x) - begin) / length * 1000 if x > 0 else math.nan


def _line(xs: Floats, ys: Floats, across: Callable[[float], float], up: Callable[[float], float]) -> tuple[str, str]:
    """The line, broken where there is a gap, and dots for points without neighbours; for all where they are few."""
    pieces: list[list[str]] = [[]]
    for x, y in zip(xs.tolist(), ys.tolist()):
        height = up(y)
        if math.isnan(height):
            pieces.append([])
        else:
            pieces[-1].append(f"{across(x):.1f} {1000 - height:.1f}")
    line = "".join(f"M{'L'.join(piece)}" for piece in pieces if len(piece) > 1)
    few = len(xs) <= _FEW
    # A line of no length, which round ends make a dot.
    dots = "".join(f"M{point}h0" for piece in pieces if few or len(piece) == 1 for point in piece)
    return line, dots


def _band(d: Drawn, across: Callable[[float], float], up: Callable[[float], float]) -> str:
    """The area between the least and the greatest value, broken where there is a gap."""
    assert d.low is not None
    assert d.high is not None
    out: list[str] = []
    upper: list[str] = []
    lower: list[str] = []
    for x, low, high in [*zip(d.x.tolist(), d.low.tolist(), d.high.tolist()), (0.0, math.nan, math.nan)]:
        top, bottom = up(high), up(low)
        if math.isnan(top):
            if upper:
                out.append(f"M{'L'.join(upper)}L{'L'.join(reversed(lower))}Z")
            upper, lower = [], []
            continue
        upper.append(f"{across(x):.1f} {1000 - top:.1f}")
        lower.append(f"{across(x):.1f} {1000 - (0.0 if math.isnan(bottom) else bottom):.1f}")
    return "".join(out)


def _svg(body: str) -> str:
    return f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" aria-hidden="true">{body}</svg>'


def _labels(axis: str, places: Iterable[tuple[float, str]]) -> str:
    side = "left" if axis == "x" else "top"
    return "".join(f'<span class="{axis}" style="{side}:{at:.2f}%">{html.escape(text)}</span>' for at, text in places)


def _x_range(x: Floats) -> tuple[float, float]:
    if not len(x):
        return 0.0, 1.0
    low, high = float(x.min()), float(x.max())
    if 0 < low < 0.1 * (high - low):
        low = 0.0
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _x_label(x: float, by: str) -> str:
    if by == "time":
        return figures.duration(x)
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if x >= 10 * size or (x >= size and x % (size / 10) == 0):
            return f"{x / size:g}{unit}"
    return f"{x:g}"


def _y_label(y: float, all_ticks: list[float], log: bool) -> str:
    if y == 0:
        return "0"
    if not 1e-4 <= abs(y) < 1e6:
        return f"{y:.2g}"
    if log:
        return f"{y:g}"
    gap = min((b - a for a, b in pairwise(all_ticks)), default=abs(y))
    digits = max(0, -math.floor(math.log10(gap) + 1e-9)) if gap > 0 else 0
    if f"{gap:.{digits}f}" != f"{gap:g}" and gap < 10:
        digits += 1  # steps of 0.25
    return f"{y:,.{min(digits, 6)}f}"


def _short(values: Floats, digits: int = 5) -> list[float | None]:
    """Numbers with as many digits as a reader needs; None for a gap."""
    return [float(f"{v:.{digits}g}") if math.isfinite(v) else None for v in values.tolist()]
