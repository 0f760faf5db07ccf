"""The cheapest order in which x meets the cores, for the batch at hand.

A step contracts x with one core, or with neighbours that were joined before; which cores are done is the state, and the
cheapest way from none to all is found among all of them. The time of a step is

    call + P · gemm + 2 P R C Q · flop + (what it reads and writes) · byte

and joining neighbours counts in the same way. Doing everything first is the dense weight, which is the cheapest way
where the batch is larger than what the cores save.

The constants here are those of one core of an ordinary server, and fixed, so that all members of a run take the same
order; only their ratios matter. What a layer costs against a dense one is asked of the machine itself (`cost.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from paceline.layers.tensor_train.shapes import Shape

BLOCK_ELEMENTS = {"cpu": 1 << 19}  # between two steps: 2 MB of float32, about one core's cache
_BLOCK_ELEMENTS = 1 << 26  # on other devices, where calls cost more than what a cache saves
_LARGE = 1 << 22  # elements of a joined core, above which its memory comes fresh from the kernel each time
_FRESH = 6.0  # how much longer an element of it takes


class Rates(NamedTuple):
    """Seconds: of a call, of each product within a batched one, of an operation, of an element moved."""

    call: float = 5e-6
    gemm: float = 2e-7
    flop: float = 1.1e-11
    element: float = 2e-10


class Step(NamedTuple):
    """Cores first … last at once: z (batch · before, summed, after) → (batch · before, made, after)."""

    first: int
    last: int
    open_left: bool  # the rank on the left is open already, so it is summed over
    open_right: bool
    before: int
    summed: int
    made: int
    after: int


class Plan(NamedTuple):
    shape: Shape
    steps: tuple[Step, ...]
    block: int  # rows at a time
    dense: bool  # all cores are joined first


@lru_cache(maxsize=4096)
def plan(shape: Shape, batch: int, device: str = "cpu") -> Plan:
    """The cheapest plan for so many rows, on a kind of device.

    >>> from paceline.layers.tensor_train.shapes import shape_of
    >>> [(step.first, step.last) for step in plan(shape_of(1024, 4096, 8), 1).steps]
    [(0, 0), (1, 1)]
    >>> plan(shape_of(64, 64, 8), 4096).dense
    True
    """
    return min(plans(shape, batch, device), key=lambda found: seconds(found, batch, Rates()))


def plans(shape: Shape, batch: int, device: str = "cpu") -> Iterator[Plan]:
    """All of them."""
    room = BLOCK_ELEMENTS.get(device, _BLOCK_ELEMENTS)
    for order in _orders(len(shape.outs), 0):
        steps = _steps(shape, order)
        dense = len(steps) == 1
        widest = max(step.before * max(step.summed, step.made) * step.after for step in steps)
        block = batch if dense else max(1, room // widest)
        yield Plan(shape, steps, block, dense)


def seconds(plan: Plan, batch: int, rates: Rates) -> float:
    """What the forward pass takes, from the model above."""
    total = sum(_joining(plan.shape, step.first, step.last, rates) for step in plan.steps)
    for rows, times in _blocks(batch, plan.block):
        total += times * sum(_time(rates, rows * s.before, s.made, s.summed, s.after) for s in plan.steps)
    return total


def _blocks(batch: int, block: int) -> list[tuple[int, int]]:
    """How many rows, and how many times."""
    if batch <= block:
        return [(batch, 1)]
    return [(block, batch // block), *([(batch % block, 1)] if batch % block else [])]


def _time(rates: Rates, p: int, r: int, c: int, q: int) -> float:
    gemms = 1 if 1 in (p, q) else p
    moved = p * c * q + p * r * q + r * c
    return rates.call + gemms * rates.gemm + 2 * p * r * c * q * rates.flop + moved * rates.element


def _joining(shape: Shape, first: int, last: int, rates: Rates) -> float:
    """Joining neighbours, and laying the result out as a matrix."""
    left, m, n, _ = shape.cores[first]
    total = 0.0
    for k in range(first + 1, last + 1):
        r, p, q, right = shape.cores[k]
        total += _time(rates, 1, left * m * n, r, p * q * right)
        m, n = m * p, n * q
        total += rates.call + _copying(left * m * n * right, rates)
    return total + rates.call + _copying(left * m * n * shape.ranks[last + 1], rates)


def _copying(elements: int, rates: Rates) -> float:
    return 2 * elements * rates.element * (_FRESH if elements >= _LARGE else 1.0)


def _orders(num: int, done: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Every sequence of runs of neighbours that covers all cores."""
    if done == (1 << num) - 1:
        yield ()
    for first in range(num):
        run = 0
        for last in range(first, num):
            if done >> last & 1:
                break
            run |= 1 << last
            for rest in _orders(num, done | run):
                yield ((first, last), *rest)


def _steps(shape: Shape, order: tuple[tuple[int, int], ...]) -> tuple[Step, ...]:
    num = len(shape.outs)
    done = [False] * num
    steps = []
    for first, last in order:
        left = first > 0 and done[first - 1]
        right = last < num - 1 and done[last + 1]
        inner, outer = math.prod(shape.ins[first : last + 1]), math.prod(shape.outs[first : last + 1])
        a, b = shape.ranks[first], shape.ranks[last + 1]
        steps.append(
            Step(
                first=first,
                last=last,
                open_left=left,
                open_right=right,
                before=_size(shape, done, 0, first),
                summed=inner * (a if left else 1) * (b if right else 1),
                made=outer * (1 if left else a) * (1 if right else b),
                after=_size(shape, done, last + 1, num),
            )
        )
        done[first : last + 1] = [True] * (last + 1 - first)
    return tuple(steps)


def _size(shape: Shape, done: list[bool], start: int, end: int) -> int:
    """Of the modes from start to end, and the open ranks between them."""
    modes = math.prod(shape.outs[k] if done[k] else shape.ins[k] for k in range(start, end))
    return modes * math.prod(shape.ranks[k] for k in range(start + 1, end) if done[k - 1] != done[k])
