"""Figures as people read them: numbers, counts, bytes, durations, shares.

Progress, summary and report write the same figure the same way, because they all come here.
"""

from __future__ import annotations

import math
from typing import Any


def value(raw: Any) -> float:
    """A float out of an event; JSON has no nan or inf, so they may come as words, and anything else is nan.

    >>> value("inf"), value(3), value(None)
    (inf, 3.0, nan)
    """
    try:
        return float(raw)
    except (TypeError, ValueError):
        return math.nan


def number(raw: Any) -> str:
    """Four digits that count, of a width that does not jump from step to step.

    >>> number(0.12341), number(0.1), number(12.3456), number(123456), number(2e-7), number("nan")
    ('0.1234', '0.1000', '12.35', '123,456', '2.000e-07', 'nan')
    """
    x = value(raw)
    if not math.isfinite(x):
        return str(x)
    size = abs(x)
    if size == 0:
        return "0"
    if size >= 1e9 or size < 1e-3:
        return f"{x:.3e}"
    if size >= 1000:
        return f"{x:,.0f}"
    return f"{x:.{3 - math.floor(math.log10(size))}f}"


def count(raw: Any) -> str:
    """
    >>> count(5210.4), count(3.25), count(0)
    ('5,210', '3.2', '0')
    """
    x = value(raw)
    if not math.isfinite(x):
        return str(x)
    return f"{x:,.1f}" if 0 < abs(x) < 10 and x != round(x) else f"{x:,.0f}"


def size(num_bytes: Any) -> str:
    """
    >>> size(0), size(2_500), size(1_250_000_000)
    ('0 B', '2.5 kB', '1.2 GB')
    """
    x = value(num_bytes)
    if not math.isfinite(x):
        return "-"
    for unit in ("B", "kB", "MB", "GB"):
        if abs(x) < 999.5:
            return f"{x:.0f} {unit}" if unit == "B" or abs(x) >= 100 else f"{x:.1f} {unit}"
        x /= 1000
    return f"{x:,.1f} TB"


def duration(seconds: Any) -> str:
    """A clock, as in "left 0:12".

    >>> duration(12.4), duration(3725), duration(200_000)
    ('0:12', '1:02:05', '2d 7:33:20')
    """
    x = value(seconds)
    if not math.isfinite(x) or x < 0:
        return "-"
    minutes, s = divmod(round(x), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days}d {h}:{m:02}:{s:02}"
    return f"{h}:{m:02}:{s:02}" if h else f"{m}:{s:02}"


def percent(share: Any) -> str:
    """
    >>> percent(0.904), percent(float("nan"))
    ('90%', '-')
    """
    x = value(share)
    return f"{100 * x:.0f}%" if math.isfinite(x) else "-"


def members(num: int) -> str:
    """
    >>> members(1), members(4)
    ('1 member', '4 members')
    """
    return f"{num} member" if num == 1 else f"{num} members"


def clean(text: Any, most: int = 60) -> str:
    """Text from outside, without what would move the cursor or break the line.

    >>> clean("lo\\x1b[2Jss\\n")
    'lo?[2Jss '
    """
    kept = "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in str(text)[: most + 1])
    return kept if len(kept) <= most else kept[: most - 1] + "…"
