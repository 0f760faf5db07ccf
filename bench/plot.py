"""A line plot as SVG, in plain Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

COLOURS = ["#1965b0", "#dc050c", "#4eb265", "#f7a800", "#882e72", "#777777"]
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 760, 440, 60, 50, 40, 190


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A named line through points (x, y), y of which is at least 0."""

    label: str
    points: Sequence[tuple[float, float]]


def draw(file: str, curves: Sequence[Curve], *, title: str, x: str, y: str, ideal: bool = False) -> None:
    """Write the curves to `file`; `ideal` adds the line y = x."""
    marks = sorted({px for curve in curves for px, _ in curve.points})
    right = max(marks, default=1.0)
    top = max([py for curve in curves for _, py in curve.points] + ([right] if ideal else [1.0])) * 1.05

    def at(px: float, py: float) -> str:
        across = LEFT + px / right * (WIDTH - LEFT - RIGHT)
        return f"{across:.1f},{HEIGHT - BOTTOM - py / top * (HEIGHT - BOTTOM - TOP):.1f}"

    def text(px: float, py: float, words: str, anchor: str = "middle") -> str:
        return f'<text x="{px:.1f}" y="{py:.1f}" text-anchor="{anchor}">{escape(words)}</text>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        text(LEFT + (WIDTH - LEFT - RIGHT) / 2, 22, title),
        text(LEFT + (WIDTH - LEFT - RIGHT) / 2, HEIGHT - 12, x),
        f'<g transform="rotate(-90 16 {HEIGHT / 2})">{text(16, HEIGHT / 2, y)}</g>',
        f'<path d="M{at(0, top)} L{at(0, 0)} L{at(right, 0)}" fill="none" stroke="black"/>',
    ]
    for mark in marks:
        px, py = map(float, at(mark, 0).split(","))
        parts.append(text(px, py + 18, f"{mark:g}"))
        px, py = map(float, at(0, mark).split(","))
        if mark <= top:
            parts.append(text(px - 8, py + 4, f"{mark:g}", "end"))
            parts.append(f'<path d="M{at(0, mark)} L{at(right, mark)}" stroke="#dddddd"/>')
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
