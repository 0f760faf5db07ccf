"""A line plot as SVG, in plain Python."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

COLOURS = ["#1965b0", "#dc050c", "#4eb265", "#f7a800", "#882e72", "#777777", "#42150a", "#7bafde"]
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 760, 440, 60, 50, 40, 190


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A named line through points (x, y)."""

    label: str
    points: Sequence[tuple[float, float]]


def ticks(low: float, high: float) -> list[float]:
    """Four to nine round numbers, from at most `low` to at least `high`.

    >>> ticks(0.31, 2.2), ticks(1.0, 1.0)
    ([0.0, 0.5, 1.0, 1.5, 2.0, 2.5], [1.0, 1.2, 1.4, 1.6, 1.8, 2.0])
    """
    high = high if high > low else low + 1.0
    power = 10.0 ** math.floor(math.log10((high - low) / 4))
    step = next(power * times for times in (1, 2, 5, 10) if (high - low) / (power * times) <= 6)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(step * i, 10) for i in range(first, last + 1)]


def draw(file: str, curves: Sequence[Curve], *, title: str, x: str, y: str, ideal: bool = False) -> None:
    """Write the curves to `file`; `ideal` adds the line y = x, and marks both axes where there are points."""
    xs, ys = ([point[i] for curve in curves for point in curve.points] or [0.0, 1.0] for i in (0, 1))
    if ideal:
        marks_x = marks_y = sorted(set(xs))
        left, right, low, top = 0.0, max(xs), 0.0, max(*ys, *xs) * 1.05
    else:
        marks_x, marks_y = ticks(min(xs), max(xs)), ticks(min(ys), max(ys))
        left, right, low, top = marks_x[0], marks_x[-1], marks_y[0], marks_y[-1]

    def at(px: float, py: float) -> str:
        across = LEFT + (px - left) / (right - left) * (WIDTH - LEFT - RIGHT)
        return f"{across:.1f},{HEIGHT - BOTTOM - (py - low) / (top - low) * (HEIGHT - BOTTOM - TOP):.1f}"

    def text(px: float, py: float, words: str, anchor: str = "middle") -> str:
        return f'<text x="{px:.1f}" y="{py:.1f}" text-anchor="{anchor}">{escape(words)}</text>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        text(LEFT + (WIDTH - LEFT - RIGHT) / 2, 22, title),
        text(LEFT + (WIDTH - LEFT - RIGHT) / 2, HEIGHT - 12, x),
        f'<g transform="rotate(-90 16 {HEIGHT / 2})">{text(16, HEIGHT / 2, y)}</g>',
        f'<path d="M{at(left, top)} L{at(left, low)} L{at(right, low)}" fill="none" stroke="black"/>',
    ]
    for mark in marks_x:
        px, py = map(float, at(mark, low).split(","))
        parts.append(text(px, py + 18, f"{mark:g}"))
    for mark in marks_y:
        px, py = map(float, at(left, mark).split(","))
        if mark <= top:
            parts.append(text(px - 8, py + 4, f"{mark:g}", "end"))
            parts.append(f'<path d="M{at(left, mark)} L{at(right, mark)}" stroke="#dddddd"/>')
    if ideal:
        parts.append(f'<path d="M{at(0, 0)} L{at(right, right)}" stroke="#999999" stroke-dasharray="4 4"/>')
    for index, curve in enumerate(curves):
        colour = COLOURS[index % len(COLOURS)]
        path = " L".join(at(*point) for point in curve.points)
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for point in curve.points:
            px, py = at(*point).split(",")
            parts.append(f'<circle cx="{px}" cy="{py}" r="3" fill="{colour}"/>')
        height = TOP + 18 * index
        parts.append(f'<rect x="{WIDTH - RIGHT + 16}" y="{height}" width="18" height="3" fill="{colour}"/>')
        parts.append(text(WIDTH - RIGHT + 40, height + 6, curve.label, "start"))
    Path(file).write_text("\n".join([*parts, "</svg>", ""]))
