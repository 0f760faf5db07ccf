"""How long the compute of a step takes on workers of unlike speed: for `bench.straggler` and `bench._simulation`.

A delay is a function of the worker and of the time at which a step begins; it is drawn from the seed, so that all modes
see the same ones. Times are multiples of a step at full speed.

    none        a step takes no time
    steady      speeds 1, 1, 1/4, 1/10
    by_time     each worker is 5 times slower during a random tenth of the time: windows of five steps, each slow with
                chance 1/10; a step that a window's end divides is slow in part
    by_step     each step is 5 times slower with chance 1/10, whenever it begins
    varied      workers' mean times are drawn once, the time of each step around them (gamma, as Ali et al., 2000)

In by_time all workers are fast together for a share 0.9^n of the time at least, and a fifth of the pace is left to sync
in the rest: nothing that does not wait can be more than 0.92 / (0.9^4 + 0.2 (1 - 0.9^4)) = 1.27 times as fast with four
workers, if a push takes no time. In by_step, the mean of the slowest of four over the mean of one, it is 1.70. A slow
window puts the others 4 steps ahead: a bound of 8 covers two in a row.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from functools import cache

SPEEDS = (1.0, 1.0, 1 / 4, 1 / 10)
SLOW, SHARE = 5.0, 0.1  # so many times slower, for this share of windows or steps
WINDOW = 5.0  # steps at full speed: a slow window holds one slow step

Delay = Callable[[int, float], float]  # worker from 0, begin -> how long the step takes


def delay(kind: str, seed: int) -> Delay:
    """The delays of all workers."""
    if kind == "none":
        return lambda worker, now: 0.0
    return {"steady": steady, "by_time": by_time, "by_step": by_step, "varied": varied}[kind](seed)


def steady(seed: int) -> Delay:
    return lambda worker, now: 1 / SPEEDS[worker]


def by_time(seed: int) -> Delay:
    @cache
    def slowness(worker: int, window: int) -> float:
        return SLOW if random.Random(f"{seed} {worker} {window}").random() < SHARE else 1.0

    def step(worker: int, now: float) -> float:
        left, at, window = 1.0, now, int(now // WINDOW)
        while True:
            pace, end = slowness(worker, window), (window + 1) * WINDOW
            if at + left * pace <= end:
                return at + left * pace - now
            left -= max(0.0, end - at) / pace
            at, window = end, window + 1

    return step


def by_step(seed: int) -> Delay:
    draws: dict[int, random.Random] = {}

    def step(worker: int, now: float) -> float:
        draw = draws.setdefault(worker, random.Random(f"{seed} {worker}"))
        return SLOW if draw.random() < SHARE else 1.0

    return step


def varied(seed: int) -> Delay:
    draws: dict[int, random.Random] = {}
    means: dict[int, float] = {}

    def step(worker: int, now: float) -> float:
        draw = draws.setdefault(worker, random.Random(f"{seed} {worker}"))
        mean = means.setdefault(worker, draw.gammavariate(16.0, 1 / 16))  # from worker to worker by a quarter
        return mean * draw.gammavariate(16.0, 1 / 16)  # from step to step by a quarter

    return step


def free_rate(kind: str, lead: float, seed: int = 0, workers: int = 4, length: float = 5000.0) -> float:
    """Steps of all workers in a step's time at full speed where a push takes no time, each at most `lead` ahead.

    >>> free_rate("steady", 0, length=1000), free_rate("steady", float("inf"), length=1000)
    (0.4, 2.35)
    """
    step, clocks = delay(kind, seed), [0] * workers
    if lead == 0:  # sync: all begin together
        now = 0.0
        while now < length:
            now += max(step(worker, now) for worker in range(workers))
            clocks = [clock + 1 for clock in clocks]
        return sum(clocks) / now
    due = [(step(worker, 0.0), worker) for worker in range(workers)]
    heapq.heapify(due)
    waiting: set[int] = set()
    while due[0][0] <= length:
        now, worker = heapq.heappop(due)
        clocks[worker] += 1
        waiting.add(worker)
        for each in sorted(waiting):
            if clocks[each] - min(clocks) <= lead:
                waiting.discard(each)
                heapq.heappush(due, (now + step(each, now), each))
    return sum(clocks) / length
