"""The table of averages for `bench.local --averages`: what a mean, a mean by loss, and averages that survive a bad
member make of members with like data, with unlike data, and with one that is fed noise. Fashion-MNIST by a CNN of
106,000 parameters, a round every 20 steps, plain averaging; accuracy at the end.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

from bench._local_quality import Job, Outcomes, Run, gap, run_all
from bench._local_tasks import TASKS
from bench.harness import Figure, Report, short
from bench.team import Team

AVERAGES = ("mean", "loss(temperature=1)", "loss(temperature=0.1)", "median")  # of four, trimmed(1) is the median
_NONE = Run([(0, 0.0)])
CASES = {"": "alike", "unlike": "unlike data", "noise": "one fed noise"}


def add_table(
    report: Report, options: argparse.Namespace, num_teams: int, start: Callable[[], Team], outcomes: Outcomes
) -> None:
    """Train, print the table, and add how many points the mean by loss is ahead of the plain mean."""
    task, seeds = TASKS["small"], 1 if options.quick else options.seeds
    total = options.steps or (60 if options.quick else task.steps)
    jobs = [
        Job(
            "small",
            name,
            {"kind": "ours", "every": 20, "strategy": f"local(every=20, average={name})"},
            seed,
            task.lr,
            total,
            case,
        )
        for case in CASES
        for name in AVERAGES
        for seed in range(seeds)
    ]
    found = run_all(jobs, num_teams, start, outcomes)
    runs = {
        (case, name): [
            found["small", name, seed, case] for seed in range(seeds) if ("small", name, seed, case) in found
        ]
        for case in CASES
        for name in AVERAGES
    }
    print(f"\naccuracy at the end in percent, mean of {seeds} seeds (lowest .. highest)")
    rows = [["average", *CASES.values()]]
    for name in AVERAGES:
        finals = [[100 * run.final for run in runs[case, name]] for case in CASES]
        rows.append(
            [name, *(f"{statistics.mean(f):.2f} ({min(f):.2f} .. {max(f):.2f})" if f else "failed" for f in finals)]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip(), flush=True)
    for case, told in CASES.items():
        for name in AVERAGES:
            report.extra[f"accuracy {told} {name}"] = statistics.mean(run.final for run in runs[case, name] or [_NONE])
        weighed, plain = runs[case, AVERAGES[1]], runs[case, "mean"]
        if weighed and len(weighed) == len(plain):
            mean, half = gap(weighed, plain, rising=True)
            spread = f"{short(100 * (mean - half))} .. {short(100 * (mean + half))}"
            name = f"points_by_loss_{told.replace(' ', '_')}"
            report.add(Figure(name=name, value=100 * mean, ours=AVERAGES[1], peer="mean", spread=spread))
