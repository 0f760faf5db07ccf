"""Members, the scheduler, links, disks and clocks fail at random, members are asked to come and to go, and everything
that was trained is counted afterwards.

  faults_injected   those that hit, over all runs; from a seed, compressed in time. All-reduce runs on one machine, and
                    over hosts (network namespaces, where this machine can have them) whose links fail too
  lost_steps, doubled_steps, lost_samples, doubled_samples, unlike_weights
                    what the ledgers of elastic all-reduce and of sync say (`paceline.testing.ledger`)
  hangs             runs that did not end within a generous limit
  failures          runs that ended with an error, or left a process behind
  accuracy_behind_points
                    test accuracy on digits: mean of fault-free runs less mean of broken ones, in points
  *_async           the same for async, with two servers; there and in sync lost workers are started again.
                    sync(backups=1) lets one go, and drops pushes by design, so that only its end and its weights are
                    judged
  goodput           one fault a minute: committed steps x fault-free time of a step / wall time, after the first step
  detect_s          from the kill until the last survivor has heard of the new view
  recover_s         from the kill until the last survivor has committed a step in it; median over the faults
  goodput_torchrun, goodput_torchft, recover_s_torchrun, ...
                    the same scenario with torchrun's restarts and with torchft
  *_per_reforming   --parts soak: what a surviving process has more of after each re-forming (memory, descriptors,
                    threads, sockets), and what lies more in /dev/shm

Whatever fails is printed with its plan as code and its seed; its files stay in .bench/chaos.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from bench import _chaos_goodput, _chaos_hosts, _chaos_plans, _chaos_soak
from bench._chaos_runs import Result, Setup, carry_out, epochs_for
from bench.harness import Figure, Report, arguments
from paceline.testing.plan import FaultPlan

_COUNTS = ("lost_steps", "doubled_steps", "lost_samples", "doubled_samples", "unlike_weights")
_PER_RUN = 25  # faults of an elastic run
_SILENCE_S = 1.0
_KINDS = {"allreduce": ["allreduce"], "sync": ["sync", "sync(backups=1)"], "async": ["async"], "hosts": ["hosts"]}
_ENDS = {"sync(backups=1)": "_backups", "async": "_async"}


def main() -> None:
    options = arguments(__doc__, _options)
    report = Report("bench.chaos")
    if "faults" in options.parts:
        _faults(report, options)
    if "goodput" in options.parts:
        _chaos_goodput.add_figures(report, options)
    if "soak" in options.parts:
        _chaos_soak.add_figures(report, options)
    report.finish(options.json)


def _options(parser: argparse.ArgumentParser) -> None:
    parts = ["faults", "goodput", "soak"]
    parser.add_argument("--faults", type=int, help="how many to inject in all (1000; with --quick 3)")
    parser.add_argument("--seed", type=int, default=1, help="of the first run; each further one has the next")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts[:2])
    parser.add_argument("--strategies", nargs="+", choices=list(_KINDS), default=list(_KINDS))
    parser.add_argument("--minutes", type=float, help="of goodput (10) and of soak (30)")
    parser.add_argument("--seconds", type=float, default=540.0, help="after which no further run of faults is begun")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, where there are cores for them (1)")
    parser.add_argument("--torchft-python", metavar="PATH", help="of an environment that has torchft")


# ---- faults


def _faults(report: Report, options: argparse.Namespace) -> None:
    wanted = options.faults or (3 if options.quick else 1000)
    kinds = [kind for name in options.strategies for kind in _KINDS[name]]
    if "hosts" in kinds and (why := _chaos_hosts.missing()):
        kinds.remove("hosts")
        report.note(f"no runs over hosts: {why}")
    if options.quick:
        kinds = kinds[:1]
    results: dict[str, list[Result]] = {kind: [] for kind in kinds}
    began, seed = time.monotonic(), options.seed
    with ThreadPoolExecutor(options.jobs) as pool:
        running: dict[Future[Result], tuple[str, int]] = {}  # strategy, and faults that it may have
        while True:
            left = wanted - _hit(results) - sum(faults for _, faults in running.values())
            late = seed > options.seed and time.monotonic() - began > options.seconds
            if len(running) < options.jobs and left > 0 and not late:
                # Servers' runs have few faults each: two of all-reduce for each of theirs.
                kind = kinds[0] if len(kinds) == 1 or seed % 3 else kinds[1 + seed // 3 % (len(kinds) - 1)]
                setup, plan = _drawn(kind, seed, left, quick=options.quick)
                running[pool.submit(_chaos_hosts.carry_out if setup.num_hosts else carry_out, setup, plan)] = (
                    kind,
                    len(plan.faults),
                )
                seed += 1
                continue
            if not running:
                break
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                kind, _ = running.pop(done)
                results[kind].append(done.result())
                _tell(done.result())
    free = [] if options.quick else _fault_free(kinds, results)
    _add_counts(report, results)
    _add_accuracy(report, results, free)
    runs = ", ".join(f"{len(found)} of {kind}" for kind, found in results.items())
    report.note(f"seeds {options.seed} to {seed - 1}: runs: {runs}, in {time.monotonic() - began:.0f} s")
    replaced = sum(r.found.replaced_steps for found in results.values() for r in found if r.found)
    report.note(f"{replaced} steps died with all who had taken them, and were taken again: no loss")
    if "sync(backups=1)" in kinds:
        report.note(
            "sync(backups=1) drops the slowest push of each round by design: only its end and weights are judged"
        )


def _hit(results: dict[str, list[Result]]) -> int:
    return sum(len(r.hit) for found in results.values() for r in found)


def _drawn(kind: str, seed: int, left: int, *, quick: bool = False) -> tuple[Setup, FaultPlan]:
    """A run and its plan; the same for the same seed, but for the last run, which has fewer faults."""
    if kind == "allreduce":
        faults, members, gap = min(_PER_RUN, max(3, left)), 3 if quick else 4, 16
        least = 2
        plan = _chaos_plans.elastic(
            seed, faults=faults, least=least, members=members, first_step=15, gap=gap, silence_s=_SILENCE_S
        )
        steps = _chaos_plans.last_step(plan) + 3 * gap
        epochs, limit_s = epochs_for(steps, members), 90.0 + 12.0 * faults
        return Setup(
            name=f"allreduce-{seed}",
            strategy=kind,
            members=members,
            least=least,
            epochs=epochs,
            seed=seed,
            silence_s=_SILENCE_S,
            standbys=1 if quick else 2,
            limit_s=limit_s,
        ), plan
    if kind == "hosts":
        faults, hosts, gap = min(_PER_RUN, max(3, left)), 3, 16
        silence_s = 1.5 * _SILENCE_S
        plan = _chaos_plans.abroad(seed, faults=faults, hosts=hosts, first_step=15, gap=gap, silence_s=silence_s)
        return Setup(
            name=f"hosts-{seed}",
            strategy="allreduce",
            members=2 * hosts - 1,
            least=1,
            num_hosts=hosts,
            epochs=epochs_for(_chaos_plans.last_step(plan) + 3 * gap, 2 * hosts - 1),
            seed=seed,
            silence_s=silence_s,
            limit_s=90.0 + 15.0 * faults,
        ), plan
    replaced = "backups" not in kind  # with backups, kills as many as there are
    plan = _chaos_plans.served(
        seed,
        kills=3 if replaced else 1,
        shorts=3 if replaced else 4,
        longs=2 if replaced else 0,
        workers=4,
        first_step=40,
        gap=40,
        replaced=replaced,
        silence_s=_SILENCE_S,
    )
    return Setup(
        name=f"{kind.partition('(')[0]}-{seed}",
        strategy=kind,
        members=4,
        num_servers=2 if kind == "async" else 1,  # a push goes to both, and may be torn
        replaced=replaced,
        epochs=epochs_for(_chaos_plans.last_step(plan) + 60, 4),
        seed=seed,
        silence_s=_SILENCE_S,
        limit_s=240.0,
    ), plan


def _tell(result: Result) -> None:
    found = result.found
    bad = result.problems or (found is not None and not found.clean)
    lines = [f"{result.setup.name}: {len(result.hit)} of {len(result.plan.faults)} faults hit, {result.seconds:.0f} s"]
    if bad:
        setup = result.setup
        lines += [f"  FAILED: {setup.strategy}, {setup.epochs} epochs, seed {setup.seed}; files in {setup.dir}"]
        lines += [f"  {problem}" for problem in (*result.problems, *(found.problems if found else ()))]
        lines += [f"  {result.plan!r}"]
    print("\n".join(lines), file=sys.stderr, flush=True)


def _fault_free(kinds: list[str], results: dict[str, list[Result]]) -> list[float]:
    """Accuracies of runs in which nothing fails, of as many epochs as the broken ones of all-reduce have."""
    broken = results.get("allreduce") or []
    if not broken or "allreduce" not in kinds:
        return []
    epochs = round(statistics.median(r.setup.epochs for r in broken))
    found = []
    for seed in range(3):
        setup = Setup(name=f"free-{seed}", strategy="allreduce", members=4, least=2, epochs=epochs, seed=seed)
        found += carry_out(setup, FaultPlan()).accuracies[:1]
    return found


def _add_counts(report: Report, results: dict[str, list[Result]]) -> None:
    everything = [r for found in results.values() for r in found]
    injected = _hit(results)
    report.add(Figure(name="faults_injected", value=float(injected), ours=f"{injected} in {len(everything)} runs"))
    for end in dict.fromkeys(_ENDS.get(kind, "") for kind in results):
        of = [r for kind, found in results.items() if _ENDS.get(kind, "") == end for r in found]
        if not any(r.found for r in of):
            continue
        for name in _COUNTS:
            count = sum(getattr(r.found, name) for r in of if r.found)
            counted = sum(r.found.samples if "samples" in name else r.found.steps for r in of if r.found)
            report.add(Figure(name=name + end, value=float(count), ours=f"{count} of {counted:,}", goal="<= 0"))
    hangs = sum(r.outcome is None for r in everything)
    failures = sum(bool(r.problems) and r.outcome is not None for r in everything)
    for name, count in (("hangs", hangs), ("failures", failures)):
        report.add(Figure(name=name, value=float(count), ours=f"{count} of {len(everything)} runs", goal="<= 0"))


def _add_accuracy(report: Report, results: dict[str, list[Result]], free: list[float]) -> None:
    broken = [r.accuracies[0] for r in results.get("allreduce", []) if r.accuracies]
    if not free or not broken:
        return
    behind = 100 * (statistics.fmean(free) - statistics.fmean(broken))
    spread = 100 * (max(free) - min(free))
    report.add(
        Figure(
            name="accuracy_behind_points",
            value=behind,
            ours=f"{100 * statistics.fmean(broken):.1f} %",
            peer=f"{100 * statistics.fmean(free):.1f} %",
            spread=f"{100 * min(free):.1f} .. {100 * max(free):.1f}",
            goal=f"<= {max(spread, 0.5):.1f}",
        )
    )


if __name__ == "__main__":
    main()
