"""Four members of unlike speeds, for `bench.local --unlike`: rounds that wait for the slowest, and asynchronous local
steps that wait for nobody. The CNN on Fashion-MNIST, in real time on shaped links.

Members compute at the speeds 1, 1, 1/2 and 1/4: a step is real, and then sleeps for the rest of its time. All sides
learn from as many batches; where nobody waits a member takes as many of them as it is fast.

  unlike_speedup_RATE   time with rounds / time with asynchronous local steps, for as many batches
  unlike_gap_points     points of test accuracy that asynchronous local steps end behind the rounds, with the interval
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from bench import _local_worker as worker
from bench._local_quality import Run, gap
from bench._local_tasks import TASKS
from bench.harness import Figure, Report, compare, short
from bench.team import Team

SPEEDS = (1.0, 1.0, 0.5, 0.25)
STEP_S = 0.05  # of the fastest
SIDES = {"diloco": False, "async local": True}  # whether a member takes as many batches as it is fast


def add_figures(
    report: Report, options: argparse.Namespace, rate: str, start: Callable[[], AbstractContextManager[Team]]
) -> None:
    """Train every side for real, seed by seed in turns."""
    task, total = TASKS["cnn"], options.steps or (60 if options.quick else TASKS["cnn"].steps)
    taken: dict[str, list[float]] = {name: [] for name in SIDES}
    runs: dict[str, list[Run]] = {name: [] for name in SIDES}
    with start() as team:
        for seed in range(1 if options.quick else options.seeds):
            for name in list(SIDES) if seed % 2 == 0 else reversed(list(SIDES)):
                steps = shares(total) if SIDES[name] else [total] * len(SPEEDS)
                paces = [STEP_S / speed for speed in SPEEDS]
                more = {"task": "cnn", "lr": task.lr, "seed": seed, "totals": steps, "paces": paces}
                team.call("begin_paced", side=worker.side(name), **more)
                began = time.perf_counter()
                found = sum(team.call("train_paced"))
                taken[name].append(time.perf_counter() - began)
                team.call("end")
                runs[name].append(Run([(total, found)]))
                print(
                    f"unlike at {rate}, {name}, seed {seed}: {100 * found:.2f} % in {taken[name][-1]:.0f} s", flush=True
                )
    figure = compare(f"unlike_speedup_{rate}", taken["async local"], taken["diloco"])
    report.add(figure)
    mean, half = gap(runs["diloco"], runs["async local"], rising=True)
    finals = {name: f"{name} {100 * statistics.mean(r.final for r in each):.2f} %" for name, each in runs.items()}
    report.add(
        Figure(
            name=f"unlike_gap_points_{rate}",
            value=100 * mean,
            ours=finals["async local"],
            peer=finals["diloco"],
            spread=f"{short(100 * (mean - half))} .. {short(100 * (mean + half))}",
        )
    )


def shares(total: int) -> list[int]:
    """Of as many batches as four members take in so many steps: by their speed.

    >>> shares(1000)
    [1455, 1455, 727, 363]
    """
    batches = total * len(SPEEDS)
    found = [round(batches * speed / sum(SPEEDS)) for speed in SPEEDS]
    found[-1] += batches - sum(found)
    return found
