"""Long curves made short enough to draw, and the ticks of their axes. Pure numbers, no drawing.

A curve of more than a thousand points becomes buckets with their mean, least and greatest value, so that no
spike is lost and noise becomes a band around a line that can be read.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from paceline.train.history import Floats

MOST = 1000  # points of a curve that are drawn one by one
_BUCKETS = 400  # of a longer one


class Drawn(msgspec.Struct, frozen=True, kw_only=True):
    """A curve as it is drawn: nan is a gap; `low` and `high` are None where every point is there."""

    x: Floats
    y: Floats
    low: Floats | None = None
    high: Floats | None = None
    lost: Floats  # where values were not finite


def thin(x: Floats, y: Floats, most: int = MOST, buckets: int = _BUCKETS) -> Drawn:
    """At most `most` points, or `buckets` of them.

    >>> import numpy as np
    >>> drawn = thin(np.arange(6.0), np.array([1.0, 3.0, np.inf, np.inf, 5.0, 6.0]), most=5, buckets=3)
    >>> drawn.x, drawn.y, drawn.high.tolist()
    (array([0.5, 2.5, 4.5]), array([2. , nan, 5.5]), [3.0, nan, 6.0])
    """
    good = np.isfinite(y)
    lost = x[~good]
    if len(x) <= most:
        return Drawn(x=x, y=np.where(good, y, np.nan), lost=lost)
    begins = np.linspace(0, len(x), buckets, endpoint=False).astype(np.int64)
    sizes = np.diff(np.append(begins, len(x)))
    counts = np.add.reduceat(good.astype(np.int64), begins)
    some = counts > 0
    with np.errstate(over="ignore"):
        mean = np.add.reduceat(np.where(good, y, 0.0), begins) / np.maximum(counts, 1)
    low = np.minimum.reduceat(np.where(good, y, np.inf), begins)
    high = np.maximum.reduceat(np.where(good, y, -np.inf), begins)
    mean = np.clip(mean, low, high)  # a sum that overflowed is no mean
    gaps = [np.where(some, v, np.nan) for v in (mean, low, high)]
    return Drawn(x=np.add.reduceat(x, begins) / sizes, y=gaps[0], low=gaps[1], high=gaps[2], lost=lost)


def bins(seconds: Floats, amounts: Floats, most: int) -> tuple[Floats, Floats]:
    """Sums of the columns of `amounts` over equal spans of the time that `seconds` adds up to.

    Returns the middle of each span and the sums, without the spans in which nothing happened.

    >>> import numpy as np
    >>> bins(np.array([1.0, 1.0, 2.0]), np.array([[1.0], [2.0], [5.0]]), most=2)
    (array([1., 3.]), array([[3.],
           [5.]]))
    """
    amounts, seconds = amounts[seconds > 0], seconds[seconds > 0]
    whole = float(seconds.sum())
    if whole <= 0:
        return np.empty(0), np.empty((0, amounts.shape[1]))
    num = max(1, min(most, len(seconds)))
    ends = np.cumsum(seconds)
    index = np.minimum(((ends - seconds / 2) / whole * num).astype(np.int64), num - 1)
    sums: Floats = np.stack([np.bincount(index, weights=column, minlength=num) for column in amounts.T], axis=1)
    some = np.bincount(index, minlength=num) > 0
    return ((np.arange(num) + 0.5) * whole / num)[some], sums[some]


def span(values: Floats, zero: bool = False) -> tuple[float, float]:
    """The range of an axis: a little more than that of the values, and never empty.

    >>> import numpy as np
    >>> span(np.array([0.0, 10.0])), span(np.array([5.0]))
    ((0.0, 10.5), (4.5, 5.5))
    """
    good = values[np.isfinite(values)]
    if not len(good):
        return 0.0, 1.0
    low, high = float(good.min()), float(good.max())
    if zero:
        low = min(low, 0.0)
    if low == high:
        room = abs(low) * 0.1 or 0.5
        return low - room, high + room
    room = high / 20 - low / 20
    begin = low - room
    most = float(np.finfo(np.float64).max)
    return max(low if low >= 0 > begin else begin, -most), min(high + room, most)


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round numbers within a range.

    >>> ticks(0.0, 10.5)
    [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    """
    if not high > low or not math.isfinite(high - low):
        return [low]
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw * 0.75)
    first = math.ceil(low / step - 1e-9)
    return [
        round(i * step, 12 - math.floor(math.log10(step))) for i in range(first, math.floor(high / step + 1e-9) + 1)
    ]


def time_ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Seconds at which a clock shows something round.

    >>> time_ticks(0.0, 400.0)
    [0.0, 120.0, 240.0, 360.0]
    """
    raw = max((high - low) / about, 1e-9)
    if raw < 1:
        return [t for t in ticks(low, high, about) if t == round(t)]
    clock = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200)
    step = next((s for s in clock if s >= raw * 0.8), 86400 * math.ceil(raw / 86400))
    return [float(i * step) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def log_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Powers of ten within a range, or a few round numbers where there are none to choose from.

    >>> log_ticks(0.05, 20.0), log_ticks(2.0, 6.0)
    ([0.1, 1.0, 10.0], [2.0, 3.0, 4.0, 5.0, 6.0])
    """
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    if last - first < 1:
        return [t for t in ticks(low, high) if t > 0]
    every = -(-(last - first + 1) // most)
    return [10.0**power for power in range(first, last + 1, every)]
