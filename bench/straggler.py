"""Workers of unlike speed: one server and four workers with emulated compute (sleep) and real pushes.

  async_share_of_sum   speeds 1, 1, 1/4, 1/10: steps/s of all workers together in async / the sum of what each makes
                       when it is alone with the server
  sync_share_of_sum    the same in sync, where everyone goes at the pace of the slowest
  async_share_of_sleep, sync_share_of_sleep
                       the same / the sum of what each would make if a push took no time
  bounded_over_sync    each worker is 5 times slower for a random tenth of the time: steps/s with
                       bounded(staleness=8) / in sync
  async_over_sync      the same for async

A model of 1.2M parameters; a step of a worker at full speed sleeps 40 ms. All modes see the same delays, drawn from the
seed, the worker and the time.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from bench.harness import Figure, Report, arguments, middle, short
from bench.team import Team, serve
from bench.workers import wires
from paceline.server import messages
from paceline.server.client import Client
from paceline.server.connection import connect
from paceline.server.placement import Tensor
from paceline.server.service import Service

RANK = int(os.environ.get("BENCH_RANK", "0"))  # 0 is the server
WORKERS = 4
COMPUTE_S = 0.04
SPEEDS = (1.0, 1.0, 1 / 4, 1 / 10)
SLOW, SHARE, WINDOW_S = 5.0, 0.1, 0.5  # so many times slower, for this share of windows of this length
SHAPES = [(1000, 1000), (1000,), (200, 1000)]
SGD = {"lr": 1e-6}


def main() -> None:
    if "--worker" in sys.argv:
        serve(FUNCTIONS)
        return
    options = arguments(__doc__)
    seconds, repeats = (3.0, 1) if options.quick else (15.0, 5)
    report = Report("bench.straggler")
    rates: dict[tuple[str, str], list[float]] = {}
    for repeat in range(repeats):
        for delays, gates in (("steady", ["async", "sync"]), ("transient", ["async", "bounded(staleness=8)", "sync"])):
            for gate in gates if repeat % 2 == 0 else reversed(gates):
                rates.setdefault((delays, gate), []).append(_rate(gate, delays, seconds, seed=repeat))
        alone = {s: _rate("async", "steady", seconds, repeat, only=SPEEDS.index(s) + 1) for s in set(SPEEDS)}
        rates.setdefault(("steady", "each alone"), []).append(sum(alone[speed] for speed in SPEEDS))
    for gate in ("async", "sync"):
        goal = ">= 0.95" if gate == "async" else ""
        pairs = zip(rates["steady", gate], rates["steady", "each alone"])
        _add(report, f"{gate}_share_of_sum", [a / b for a, b in pairs], goal)
        _add(report, f"{gate}_share_of_sleep", [rate * COMPUTE_S / sum(SPEEDS) for rate in rates["steady", gate]], "")
    for name, gate, goal in (("bounded", "bounded(staleness=8)", ">= 1.5"), ("async", "async", "")):
        pairs = zip(rates["transient", gate], rates["transient", "sync"])
        _add(report, f"{name}_over_sync", [a / b for a, b in pairs], goal)
    for (delays, gate), found in rates.items():
        report.note(f"{delays} {gate}: {sorted(found)[len(found) // 2]:.1f} steps/s of all workers")
    report.finish(options.json)


def _add(report: Report, name: str, ratios: list[float], goal: str) -> None:
    low, high = middle(ratios)
    value = sorted(ratios)[len(ratios) // 2]
    report.add(Figure(name=name, value=value, spread=f"{short(low)} .. {short(high)}", goal=goal))


def _rate(gate: str, delays: str, seconds: float, seed: int, only: int = 0) -> float:
    """Steps per second of all workers together; or of one of them, while the others do nothing."""
    with Team.of(WORKERS + 1, "bench.straggler", limit_s=120.0) as team:
        team.call("set_up", gate=gate)
        steps = team.call("work", delays=delays, seconds=seconds, seed=seed, only=only)
        team.call("finish")
    return sum(steps) / seconds


# ---- in the processes

_held: dict[str, Any] = {}


def set_up(gate: str) -> None:
    if RANK == 0:
        _held["service"] = Service(limit_s=60.0)
        for rank in range(1, WORKERS + 1):
            _held["service"].attach(connect(wires(), rank, 0))
        return
    _held["client"] = Client(RANK, [connect(wires(), 0, 0)], limit_s=60.0)
    tensors = [Tensor(f"p{i}", shape, "float32", 0) for i, shape in enumerate(SHAPES)]
    rule = messages.Rule(optimizer="SGD", groups=[SGD], gate=gate)
    _held["table"] = _held["client"].open([(t, torch.zeros(t.shape)) for t in tensors], rule)


def work(delays: str, seconds: float, seed: int, only: int) -> int:
    """Train until the time is over; how many steps."""
    if RANK == 0:
        return 0
    if only not in (0, RANK):
        _held["client"].close()
        return 0
    table, gradients = _held["table"], [torch.ones(shape) * 1e-3 for shape in SHAPES]
    table.pull()
    began, steps = time.monotonic(), 0
    while (now := time.monotonic() - began) < seconds:
        time.sleep(COMPUTE_S * _slowness(delays, seed, now))
        table.push(gradients, [SGD])
        steps += 1
    _held["client"].close()  # those who are still under way do not wait for this one
    return steps


def _slowness(delays: str, seed: int, now: float) -> float:
    if delays == "steady":
        return 1 / SPEEDS[RANK - 1]
    return SLOW if random.Random(f"{seed} {RANK} {now // WINDOW_S}").random() < SHARE else 1.0


def finish() -> None:
    if RANK == 0:
        _held["service"].wait(10.0)
        _held["service"].close()
    wires().close()


FUNCTIONS: dict[str, Callable[..., Any]] = {"set_up": set_up, "work": work, "finish": finish}


if __name__ == "__main__":
    main()
