"""Workers of unlike speed: one server and four workers with emulated compute (sleep) and real pushes.

  async_share_of_sum   speeds 1, 1, 1/4, 1/10: steps/s of all workers together in async / the sum of what each makes
                       when it is alone with the server
  sync_share_of_sum    the same in sync, where everyone goes at the pace of the slowest
  async_share_of_sleep, sync_share_of_sleep
                       the same / the sum of what each would make if a push took no time
  bounded_over_sync    each worker is 5 times slower for a random tenth of the time: steps/s with
                       bounded(staleness=8) / in sync
  bounded_over_sync_by_step
                       the same where a random tenth of each worker's steps is 5 times slower
  async_over_sync, async_over_sync_by_step
                       the same for async
  *_free               what these would be if a push took no time; see `_delays` for why the first cannot exceed 1.27
  time_to_accuracy_async_steady, _bounded_transient, _bounded_by_step
                       Fashion-MNIST, in virtual time (`_straggler_accuracy`): sync's time to the target accuracy / ours
  accuracy_gap_points_async_steady, ...
                       points that ours ends behind sync after as many samples, with the interval of 95 %
  less_over_ddp, less_over_tell
                       all-reduce of four members, one three times slower (`_straggler_allreduce`): samples/s with
                       --stragglers less / those of DDP, and those with equal shares

A model of 1.2M parameters; a step of a worker at full speed sleeps 40 ms. All modes see the same delays, drawn from the
seed, the worker and the time.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from bench import _delays, _straggler_accuracy, _straggler_allreduce
from bench._delays import SPEEDS
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
SHAPES = [(1000, 1000), (1000,), (200, 1000)]
SGD = {"lr": 1e-6}
BOUNDED = "bounded(staleness=8)"
MODES = {"steady": ["async", "sync"], "by_time": ["async", BOUNDED, "sync"], "by_step": ["async", BOUNDED, "sync"]}


def main() -> None:
    if "--worker" in sys.argv:
        serve(FUNCTIONS)
        return
    options = arguments(__doc__, _options)
    report = Report("bench.straggler")
    if "allreduce" in options.parts:
        _straggler_allreduce.add_figures(report, quick=options.quick)
    if options.parts == ["allreduce"]:
        report.finish(options.json)
        return
    with Team.of(WORKERS + 1, "bench.straggler", limit_s=120.0) as team:
        if "rates" in options.parts:
            _add_rates(report, team, quick=options.quick)
        push_s = 1 / _rate(team, "async", "none", 1.0 if options.quick else 5.0, seed=0, only=1)
        team.call("finish")
    if "accuracy" in options.parts:
        report.note(f"a push and its pull of 1.2M parameters take {1e3 * push_s:.2f} ms alone, and so in virtual time")
        _straggler_accuracy.add_figures(report, options, push=push_s / COMPUTE_S)
    report.finish(options.json)


def _options(parser: argparse.ArgumentParser) -> None:
    parts = ["rates", "accuracy", "allreduce"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    _straggler_accuracy.add_options(parser)


def _add_rates(report: Report, team: Team, *, quick: bool) -> None:
    seconds, repeats = (1.5, 1) if quick else (12.0, 5)
    rates: dict[tuple[str, str], list[float]] = {}
    for repeat in range(repeats):
        for delays, gates in MODES.items():
            for gate in gates if repeat % 2 == 0 else reversed(gates):
                rates.setdefault((delays, gate), []).append(_rate(team, gate, delays, seconds, seed=repeat))
        alone = {
            speed: _rate(team, "async", "steady", seconds, seed=repeat, only=SPEEDS.index(speed) + 1)
            for speed in set(SPEEDS)
        }
        rates.setdefault(("steady", "each alone"), []).append(sum(alone[speed] for speed in SPEEDS))
    for gate in ("async", "sync"):
        goal = ">= 0.95" if gate == "async" else ""
        pairs = zip(rates["steady", gate], rates["steady", "each alone"])
        _add(report, f"{gate}_share_of_sum", [a / b for a, b in pairs], goal)
        _add(report, f"{gate}_share_of_sleep", [rate * COMPUTE_S / sum(SPEEDS) for rate in rates["steady", gate]], "")
    for delays, end in (("by_time", ""), ("by_step", "_by_step")):
        free = _delays.free_rate(delays, 0)
        for name, gate, lead, goal in (("bounded", BOUNDED, 8, ">= 1.5"), ("async", "async", float("inf"), "")):
            pairs = zip(rates[delays, gate], rates[delays, "sync"])
            _add(report, f"{name}_over_sync{end}", [a / b for a, b in pairs], goal)
            most = _delays.free_rate(delays, lead) / free
            report.add(Figure(name=f"{name}_over_sync{end}_free", value=most))
    for (delays, gate), found in rates.items():
        report.note(f"{delays} {gate}: {sorted(found)[len(found) // 2]:.1f} steps/s of all workers")


def _add(report: Report, name: str, ratios: list[float], goal: str) -> None:
    low, high = middle(ratios)
    value = sorted(ratios)[len(ratios) // 2]
    report.add(Figure(name=name, value=value, spread=f"{short(low)} .. {short(high)}", goal=goal))


def _rate(team: Team, gate: str, delays: str, seconds: float, *, seed: int, only: int = 0) -> float:
    """Steps per second of all workers together; or of one of them, while the others do nothing."""
    team.call("set_up", gate=gate)
    steps = team.call("work", delays=delays, seconds=seconds, seed=seed, only=only)
    return sum(steps) / seconds


# ---- in the processes

_held: dict[str, Any] = {}
_numbers = itertools.count()  # of servers: each has connections of its own


def set_up(gate: str) -> None:
    number = next(_numbers)
    if RANK == 0:
        if "service" in _held:
            _held["service"].wait(10.0)
            _held["service"].close()
        _held["service"] = Service(limit_s=60.0)
        for rank in range(1, WORKERS + 1):
            _held["service"].attach(connect(wires(), rank, number))
        return
    _held["client"] = Client(RANK, [connect(wires(), 0, number)], limit_s=60.0)
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
    delay = _delays.delay(delays, seed)
    began, steps = time.monotonic(), 0
    while (now := time.monotonic() - began) < seconds:
        time.sleep(COMPUTE_S * delay(RANK - 1, now / COMPUTE_S))
        table.push(gradients, [SGD])
        steps += 1
    _held["client"].close()  # those who are still under way do not wait for this one
    return steps


def finish() -> None:
    if RANK == 0:
        _held["service"].wait(10.0)
        _held["service"].close()
    wires().close()


FUNCTIONS: dict[str, Callable[..., Any]] = {"set_up": set_up, "work": work, "finish": finish}


if __name__ == "__main__":
    main()
