"""Time to accuracy with stragglers, for `bench.straggler`: Fashion-MNIST by four workers, in virtual time.

Gradients, shard, gates and optimizer are real, only time is emulated (`_simulation`): compute by the delays of
`_delays`, a push and its pull by what they took on this machine just before. So the machine's cores do not matter, and
all modes see the same delays.

SGD, as many samples for all; the rate rises over the first tenth and falls by a cosine. Every mode is given as many
trials with the first seed: momentum and rate, and what has an age to correct may have a correction in a third of them,
where sync has further pairs. Then the other seeds run with the trial that reached the target first, of those that
ended within half a point of the best. Asynchrony is a momentum of its own, so it wants less of it.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics

from bench import _network_accuracy as fashion
from bench._simulation import Outcome, Plan, run_all
from bench.harness import Figure, Report, short

TARGET = 0.87
Trial = tuple[float, float, str]  # momentum, rate, correction
TRIALS: tuple[Trial, ...] = tuple(
    (momentum, rate, "")
    for momentum, rate in (
        (0.9, 0.01), (0.9, 0.05), (0.9, 0.1), (0.9, 0.2), (0.5, 0.05), (0.5, 0.1), (0.0, 0.05), (0.0, 0.1), (0.0, 0.2),
    )
)  # fmt: skip
CORRECTED: tuple[Trial, ...] = tuple((0.0, rate, "dana(0.9)") for rate in (0.02, 0.05, 0.1, 0.2))
MORE: tuple[Trial, ...] = ((0.9, 0.02, ""), (0.9, 0.15, ""), (0.95, 0.05, ""), (0.5, 0.2, ""))  # for sync
_NEAR = 0.005  # of the best accuracy
CASES = {  # of a figure: delays, ours
    "async_steady": ("steady", "async"),
    "bounded_transient": ("by_time", "bounded(staleness=8)"),
    "bounded_by_step": ("by_step", "bounded(staleness=8)"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu", help="cpu or cuda, of the accuracy")
    parser.add_argument("--data", metavar="DIR", help="with the four idx files; else Debian's package")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time, each in a process of one thread")
    parser.add_argument("--batch", type=int, default=64, help="of each worker")
    parser.add_argument("--epochs", type=float, default=4.0)
    parser.add_argument("--seeds", type=int, default=3)


def add_figures(report: Report, options: argparse.Namespace, push: float) -> None:
    """Train, and add the figures of all cases; `push` is the time of one, in steps at full speed."""
    os.environ |= {"BENCH_DATA": options.data} if options.data else {}
    if reason := fashion.missing():
        report.note(f"no time to accuracy: {reason}")
        return
    target = TARGET
    if options.quick:
        target, options.seeds, options.epochs = 0.3, 1, 0.1
    modes = [(delays, gate) for delays, ours in CASES.values() for gate in ("sync", ours)]

    def trials(mode: tuple[str, str]) -> tuple[Trial, ...]:
        if options.quick:
            return ((0.5, 0.1, ""),)
        return TRIALS + (MORE if mode[1] == "sync" else CORRECTED)

    def plan(mode: tuple[str, str], trial: Trial, seed: int) -> Plan:
        return Plan(
            workers=4,
            gate=mode[1],
            delays=mode[0],
            momentum=trial[0],
            lr=trial[1],
            correct=trial[2],
            batch=options.batch,
            epochs=options.epochs,
            push=push,
            target=target,
            seed=seed,
            device=options.device,
        )

    # Sync trains alike whatever the delays, only its times differ: one case is enough to try it.
    tuned = [mode for mode in modes if mode[1] != "sync"] + [modes[0]]
    outcomes = iter(run_all([plan(mode, trial, 0) for mode in tuned for trial in trials(mode)], options.jobs, _say))
    tried = {mode: {trial: next(outcomes) for trial in trials(mode)} for mode in tuned}
    best = {mode: _best(tried.get(mode, tried[modes[0]])) for mode in modes}
    runs = [plan(mode, best[mode], seed) for mode in modes for seed in range(options.seeds)]
    outcomes = iter(run_all(runs, options.jobs, _say))
    found = {mode: [next(outcomes) for _ in range(options.seeds)] for mode in modes}
    for name, (delays, gate) in CASES.items():
        _add(report, name, found[delays, "sync"], found[delays, gate])
        rates = f"{_said(best[delays, 'sync'])} of sync, {_said(best[delays, gate])} of {gate}"
        ages = f"age {statistics.mean(o.mean_age for o in found[delays, gate]):.1f} in the mean"
        diverged = ", ".join(_said(trial) for trial, outcome in tried[delays, gate].items() if outcome.failed)
        report.note(f"{name}: {rates}, {ages}; diverged: {diverged or 'none'}")
    report.note(
        f"target {100 * target:g} %, batch {options.batch} of each worker, {options.epochs} epochs, "
        f"{len(trials(modes[0]))} trials of each"
    )


def _best(tried: dict[Trial, Outcome]) -> Trial:
    """The first at the target, of those that end near the best."""
    enough = max(outcome.accuracy for outcome in tried.values()) - _NEAR
    near = {trial: outcome for trial, outcome in tried.items() if outcome.accuracy >= enough}
    return min(near, key=lambda trial: (near[trial].to_target, -near[trial].accuracy))


def _said(trial: Trial) -> str:
    momentum, rate, correction = trial
    return f"momentum {momentum}, rate {rate}" + (f", {correction}" if correction else "")


def _add(report: Report, name: str, sync: list[Outcome], ours: list[Outcome]) -> None:
    ratios = [s.to_target / o.to_target if math.isfinite(s.to_target) else math.nan for s, o in zip(sync, ours)]
    figure = Figure(
        name=f"time_to_accuracy_{name}",
        value=statistics.median(ratios),
        ours=_times(ours),
        peer=_times(sync),
        spread=f"{short(min(ratios))} .. {short(max(ratios))}",
        goal=">= 2",
    )
    report.add(figure)
    behind, ahead = (fashion.Outcome(final=[o.accuracy for o in runs]) for runs in (ours, sync))
    mean, half = fashion.gap(ahead, behind)
    figure = Figure(
        name=f"accuracy_gap_points_{name}",
        value=mean,
        ours=_accuracies(ours),
        peer=_accuracies(sync),
        spread=f"{short(mean - half)} .. {short(mean + half)}",
        goal="<= 0.5",
    )
    report.add(figure)


def _times(runs: list[Outcome]) -> str:
    return " ".join("never" if run.to_target == math.inf else f"{run.to_target:.0f}" for run in runs) + " steps"


def _accuracies(runs: list[Outcome]) -> str:
    return " ".join("failed" if run.failed else f"{100 * run.accuracy:.2f}" for run in runs) + " %"


def _say(plan: Plan, outcome: Outcome) -> None:
    told = outcome.failed or f"{100 * outcome.accuracy:.2f} %, target after {outcome.to_target:.0f}"
    trial = _said((plan.momentum, plan.lr, plan.correct))
    print(f"{plan.delays}, {plan.gate}, {trial}, seed {plan.seed}: {told}", flush=True)
