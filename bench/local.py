"""Four hosts that train apart over slow links: DDP, DDP with PostLocalSGD, and our local steps.

  speedup_10mbit, _100mbit, _1gbit   DDP's time to the target / that of the fastest of ours
  bytes_ratio, bytes_ratio_sparse    bytes that left a host with DDP / with diloco, with sparse diloco, step for step
  loss_gap_nats, _sparse             held-out loss at the end with diloco, with sparse diloco, less that with DDP
  compute_share, _sparse             time of the steps without any exchange / of the fastest of ours, of sparse diloco,
                                     at the slowest rate
  *_cnn, *_wide                      the same for the Fashion-MNIST CNN, whose gap is in points of accuracy, and for a
                                     GPT of 25M; those without are the character GPT's of 3M

The target is what DDP has at its end, less what may be lost: 0.02 nats, 0.3 points. What sides learn is from real
training by processes of this host (`_local_quality`); `--outcomes FILE` keeps it, for another machine or another go.
The table of averages is from there too. Steps are timed on network namespaces with shaped links, which needs root:
bytes, codecs and optimizers are real, compute is a sleep as long as this machine takes for it (`_local_worker`). Every
block timed is a whole round. Sides that do not reach the target have no speedup.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from bench import _local_averages as averages
from bench import _local_tasks as tasks
from bench import _local_torchft as peer
from bench import _local_unlike as unlike
from bench import _local_worker as worker
from bench import _network_accuracy as fashion
from bench import _network_worker as network
from bench._local_quality import Job, Outcomes, Run, Runs, gap, run_all, train
from bench.harness import Figure, Report, arguments, compare, middle, short
from bench.plot import Curve, draw
from bench.team import Team, TeamError, serve
from paceline.launch.plan import HUGE_PAGES
from paceline.testing.hosts import Hosts

SIZE = 4
RATES = ("10mbit", "100mbit", "1gbit")
QUICK = ("alone", "ddp", "diloco", "sparse diloco")
AT_SITES = ("alone", "ddp", "diloco", "sites")
PEERS = ("alone", "ddp", "ddp post-local", "torchft diloco")
ALLOWED = {"gpt": 0.02, "wide": 0.02, "cnn": 0.003}
GOALS = {
    "speedup_10mbit": ">= 20",
    "bytes_ratio": ">= 400",
    "bytes_ratio_sparse": ">= 2000",
    "loss_gap_nats": "<= 0.02",
    "loss_gap_nats_sparse": "<= 0.02",
    "compute_share": ">= 0.95",
}

Times = dict[str, list[dict[str, float]]]  # by side: seconds, busy_s, waited_s, sent_bytes of a step, block by block


def main() -> None:
    options = arguments(__doc__, _options)
    if options.worker:
        return _worker()
    usual = list(QUICK) if options.quick else list(worker.SIDES)
    names = options.sides or (list(AT_SITES) if options.sites else usual)
    chosen = options.tasks or (["cnn"] if options.quick else ["gpt", "cnn"])
    rates = options.rates or (["100mbit"] if options.quick else list(RATES))
    os.environ["BENCH_TEXT"], os.environ["BENCH_DEVICE"] = options.text, options.device
    if options.data:
        os.environ["BENCH_DATA"], fashion.FOLDER = options.data, Path(options.data)
    if reason := fashion.missing() if "cnn" in chosen or options.averages else "":
        raise SystemExit(f"bench.local: {reason}")
    if reason := peer.missing(options.torchft) if options.torchft else "":
        raise SystemExit(f"bench.local: {reason}")
    report = Report("bench.local")
    outcomes = Outcomes(Path(options.outcomes) if options.outcomes else None)
    learnt = _learnt(options, outcomes, chosen, [name for name in names if name != "alone"])
    if options.averages:
        averages.add_table(report, options, teams(options), partial(_start, options.limit_s), outcomes)
    if options.unlike and (reason := Hosts.missing()):
        report.note(f"unlike members are not timed: {reason}")
    elif options.unlike:
        for rate in rates:
            unlike.add_figures(report, options, rate, partial(_on_hosts, rate, options.limit_s))
    times: dict[tuple[str, str], Times] = {}
    if reason := "--no-times" if options.no_times else Hosts.missing():
        report.note(f"steps are not timed: {reason}")
    else:
        times = _timed(report, options, chosen, rates, names)
    for task in chosen:
        taken = {rate: times[task, rate] for rate in rates if (task, rate) in times}
        _add_figures(report, task, taken, learnt[task], sites=options.sites)
        if options.plot and not options.sites:
            _plot(Path(options.plot), task, {r: times[task, r] for r in rates if (task, r) in times}, learnt[task])
    if {"gpt", "wide"} & set(chosen):
        report.note(f"text: {tasks.text()[1]}; AdamW inside, for all sides alike")
    report.note(
        f"{SIZE} hosts such as this one, load average {os.getloadavg()[0]:.1f}; compute is slept, bytes are real"
    )
    report.note("ours is encrypted between hosts, gloo is not; PostLocalSGD averages every 50 steps, without warm-up")
    return report.finish(options.json)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tasks", nargs="+", choices=list(ALLOWED), help="gpt and cnn; wide wants a GPU")
    parser.add_argument("--rates", nargs="+", metavar="RATE", help="such as 100mbit")
    parser.add_argument(
        "--sides", nargs="+", metavar="SIDE", help=f"strategies in words, or of {', '.join(worker.SIDES)}"
    )
    parser.add_argument("--sites", action="store_true", help="time two sites of two members, in place of four hosts")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=0, help="of a training; else as the task has it")
    parser.add_argument("--device", default="cpu", help="cpu or cuda, of the training")
    parser.add_argument("--step-ms", type=float, metavar="MS", help="compute of a step; else what this machine takes")
    parser.add_argument("--teams", type=int, default=0, help="that train at once, four processes each; else as fits")
    parser.add_argument("--limit-s", type=float, default=600.0, help="of a call: on a CPU, a look at wide takes longer")
    parser.add_argument("--text", default="", metavar="PATH", help="a file, or a folder of .txt, for the GPT")
    parser.add_argument("--data", metavar="DIR", help="with the four idx files; else Debian's package")
    parser.add_argument(
        "--outcomes", metavar="FILE", help="keeps what the sides have learnt: runs that it has are not made again"
    )
    parser.add_argument("--averages", action="store_true", help="also the table of averages")
    parser.add_argument("--unlike", action="store_true", help="also four members of unlike speeds, in real time")
    parser.add_argument("--no-times", action="store_true", help="train only")
    parser.add_argument("--no-training", action="store_true", help="time only, beside what --outcomes has")
    parser.add_argument("--torchft", default="", metavar="PYTHON", help="one that has torchft: time its DiLoCo too")
    parser.add_argument("--plot", metavar="DIR", help="write plots into it")


def _worker() -> None:
    import torch

    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")  # on a GPU: TF32
    serve(worker.FUNCTIONS)


@contextmanager
def _on_hosts(rate: str, limit_s: float) -> Iterator[Team]:
    """Four members on hosts of their own, connected; from then on at this rate."""
    with Hosts(SIZE) as hosts, _team(_places(hosts), "eth0", limit_s) as team:
        team.call("connect", described=team.call("describe"))
        _shape(hosts, rate)
        yield team


def _places(hosts: Hosts) -> list[tuple[list[str], str, str]]:
    """Of the members, spread evenly over the hosts."""
    on = [rank * hosts.count // SIZE for rank in range(SIZE)]
    return [(["ip", "netns", "exec", hosts._spaces[i]], f"h{i}", hosts.ips[i]) for i in on]


def _start(limit_s: float) -> Team:
    """Four members on this host. They are said to be on hosts of their own, so that all encode as between hosts."""
    return _team([([], f"h{rank}", "127.0.0.1") for rank in range(SIZE)], "lo", limit_s)


def _team(places: list[tuple[list[str], str, str]], interface: str, limit_s: float) -> Team:
    commands = []
    for rank, (prefix, host, ip) in enumerate(places):
        own = {"BENCH_RANK": str(rank), "BENCH_SIZE": str(SIZE), "BENCH_HOST": host, "BENCH_ADDRESS": ip}
        own |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": interface, **HUGE_PAGES}
        commands.append(([*prefix, sys.executable, "-m", "bench.local", "--worker"], own))
    return Team(SIZE, commands, limit_s=limit_s)


# ---- what they learn


def _learnt(options: argparse.Namespace, outcomes: Outcomes, chosen: list[str], names: list[str]) -> dict[str, Runs]:
    seeds, jobs = (1 if options.quick else options.seeds), []
    for seed in range(seeds):
        for task in chosen:
            total = options.steps or (60 if options.quick else tasks.TASKS[task].steps)
            jobs += [Job(task, name, worker.side(name), seed, tasks.TASKS[task].lr, total) for name in names]
    peers = [_peers_job(seed, options) for seed in range(seeds)] if "cnn" in chosen and not options.quick else []
    if options.no_training:
        jobs = [job for job in jobs if job in outcomes]
    elif options.torchft:
        _train_torchft(options.torchft, [job for job in peers if job not in outcomes], outcomes)
    found = run_all(jobs, teams(options), partial(_start, options.limit_s), outcomes)
    found |= {job.key: outcomes[job] for job in peers if job in outcomes}
    runs: dict[str, Runs] = {task: {} for task in chosen}
    for (task, name, _, _), run in found.items():
        runs[task].setdefault(name, []).append(run)
    return runs


def _peers_job(seed: int, options: argparse.Namespace) -> Job:
    """torchft's, on the CPU, so that it learns images alone; whole rounds of it."""
    task = tasks.TASKS["cnn"]
    total = math.ceil((options.steps or task.steps) / peer.EVERY) * peer.EVERY
    side = {"kind": "torchft", "every": peer.EVERY, "look": peer.EVERY}
    return Job("cnn", "torchft diloco", side, seed, task.lr, total)


def _train_torchft(python: str, jobs: list[Job], outcomes: Outcomes) -> None:
    for job in jobs:
        try:
            with peer.start(peer.on_this_host(SIZE), python, "lo") as team:
                outcomes.add(job, train(team, job))
            print(f"{job.words}: {outcomes[job].final:.4f} at the end", flush=True)
        except TeamError as error:
            print(f"a run failed: {error}", file=sys.stderr, flush=True)


def teams(options: argparse.Namespace) -> int:
    return options.teams or max(1, len(os.sched_getaffinity(0)) // SIZE)


# ---- how long it takes


def _timed(
    report: Report, options: argparse.Namespace, chosen: list[str], rates: list[str], names: list[str]
) -> dict[tuple[str, str], Times]:
    """All rates of a task at once where there are cores enough: members sleep most of the time."""
    times: dict[tuple[str, str], Times] = {}
    enough = len(os.sched_getaffinity(0)) >= SIZE * len(rates)
    for task in chosen:
        named = replace(network.TASKS[task], batch_size=tasks.TASKS[task].batch)
        compute = network.calibrate(named, threads=len(os.sched_getaffinity(0)), repeats=3 if options.step_ms else 15)
        if options.step_ms:
            compute = compute.scaled(options.step_ms / 1e3)
        print(f"{task}: compute of a step: {short(1e3 * compute.step_s)} ms; slept", flush=True)
        report.extra[f"compute_ms_{task}"] = 1e3 * compute.step_s
        with ThreadPoolExecutor(len(rates) if enough else 1) as pool:
            runs = {rate: pool.submit(_measure, task, compute, rate, names, options) for rate in rates}
        times |= {(task, rate): run.result() for rate, run in runs.items()}
        for rate in rates:
            _show(task, rate, times[task, rate])
    return times


def _measure(task: str, compute: network.Compute, rate: str, names: list[str], options: argparse.Namespace) -> Times:
    """Rounds of all sides in turns; only one has connections at a time, since those that are idle say so now and then.
    What comes before the first step is done at full speed; then a round without compute, in which our rings measure the
    link."""
    repeats, sides = 1 if options.quick else 2, {name: worker.side(name) for name in names}
    times: Times = {name: [] for name in sides}
    with Hosts(2 if options.sites else SIZE) as hosts:
        with _team(_places(hosts), "eth0", options.limit_s) as team:
            team.call("connect", described=team.call("describe"))
            for repeat in range(repeats):
                for name in list(sides) if repeat % 2 == 0 else reversed(list(sides)):
                    side = sides[name]
                    _shape(hosts, None)
                    team.call("make", name=name, task=task, side=side, compute=msgspec.to_builtins(compute))
                    if side["kind"] != "ours":
                        team.call("block", name=name, steps=3 if name == "ddp" else side["every"], hurry=True)
                    _shape(hosts, rate)
                    if side["kind"] == "ours":
                        team.call("block", name=name, steps=side["every"], hurry=True)
                    times[name].append(_block(team, name, side["every"]))
                    team.call("drop", name=name)
        if options.torchft and not options.sites:
            _shape(hosts, None)
            try:
                with peer.start(peer.on_hosts(hosts), options.torchft, "eth0") as team:
                    team.call("make", task=task, step_s=compute.step_s)
                    team.call("block", steps=peer.EVERY, hurry=True)
                    _shape(hosts, rate)
                    times["torchft diloco"] = [_block(team, "", peer.EVERY) for _ in range(repeats)]
            except TeamError as error:  # what the others took is kept
                print(f"torchft at {rate} is left out: {error}", file=sys.stderr, flush=True)
    return times


def _shape(hosts: Hosts, rate: str | None) -> None:
    for host in range(hosts.count):
        hosts.set_rate(host, rate)


def _block(team: Team, name: str, count: int) -> dict[str, float]:
    """Of a step: seconds on the slowest member, the rest in the mean of the members."""
    answers = team.call("block", steps=count, **({"name": name} if name else {}))
    means = {key: sum(a[key] for a in answers) / len(answers) / count for key in answers[0]}
    return means | {"seconds": max(a["seconds"] for a in answers) / count}


def _show(task: str, rate: str, times: Times) -> None:
    alone = times.get("alone")
    rows = [["side", "ms/step", "range", "busy ms", "waited ms", "kB sent/step", "computing"]]
    for name, taken in times.items():
        low, high = middle(seconds(taken))
        share = short(statistics.median(seconds(alone)) / statistics.median(seconds(taken))) if alone else "-"
        means = {key: statistics.mean(t[key] for t in taken) for key in taken[0]}
        ms = short(1e3 * statistics.median(seconds(taken)))
        spread = f"{short(1e3 * low)} .. {short(1e3 * high)}"
        waited = short(1e3 * means["waited_s"]) if means.get("waited_s") else "-"
        sent = short(means["sent_bytes"] / 1e3)
        rows.append([name, ms, spread, short(1e3 * means["busy_s"]), waited, sent, share])
    print(f"\n{task} at {rate}, of a step")
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip(), flush=True)


def seconds(taken: list[dict[str, float]]) -> list[float]:
    return [each["seconds"] for each in taken]


# ---- figures


def _add_figures(report: Report, task: str, times: dict[str, Times], learnt: Runs, *, sites: bool = False) -> None:
    end = ("_sites" if sites else "") + ("" if task == "gpt" else f"_{task}")
    rising = tasks.TASKS[task].rising
    counts = _steps_to_target(report, task, learnt)
    for rate, taken in times.items():
        ours = _fastest(taken, counts)
        if ours and "ddp" in taken and "ddp" in counts:
            weigh = {n: [s * counts[n] for s in seconds(taken[n])] for n in (ours, "ddp")}
            figure = compare(f"speedup_{rate}{end}", weigh[ours], weigh["ddp"], goal=GOALS.get(f"speedup_{rate}", ""))
            words = {n: f"{n} {counts[n]:.0f} x {short(1e3 * statistics.median(seconds(taken[n])))} ms" for n in weigh}
            report.add(replace(figure, ours=words[ours], peer=words["ddp"]))
        for name in taken:
            report.extra[f"step_speedup {task} {rate} {name}"] = _step_speedup(taken, name)
            report.extra[f"step_ms {task} {rate} {name}"] = 1e3 * statistics.median(seconds(taken[name]))
            report.extra[f"step_bytes {task} {name}"] = statistics.mean(t["sent_bytes"] for t in taken[name])
    slowest = max(times, key=lambda rate: sum(max(seconds(taken)) for taken in times[rate].values()), default="")
    if slowest:
        taken, ours = times[slowest], _fastest(times[slowest], counts)
        for side, name in (ours, "compute_share"), ("sparse diloco", "compute_share_sparse"):
            if side in taken and "alone" in taken:
                figure = compare(f"{name}{end}", seconds(taken[side]), seconds(taken["alone"]))
                report.add(replace(figure, ours=f"{side} at {slowest}, {figure.ours}", goal=GOALS["compute_share"]))
        ratios = [("diloco", "bytes_ratio"), ("sparse diloco", "bytes_ratio_sparse")]
        for side, name in [("sites", "bytes_ratio")] if sites else ratios:
            if side in taken and "ddp" in taken:
                sent = {n: statistics.mean(t["sent_bytes"] for t in taken[n]) for n in (side, "ddp")}
                words = {n: f"{n} {short(value / 1e3)} kB/step" for n, value in sent.items()}
                value = sent["ddp"] / max(sent[side], 1.0)
                report.add(
                    Figure(name=f"{name}{end}", value=value, ours=words[side], peer=words["ddp"], goal=GOALS[name])
                )
    plain = learnt.get("ddp", [])
    for side, runs in learnt.items():
        report.extra[f"final {task} {side}"] = statistics.mean(run.final for run in runs)
        if side == "ddp" or not plain or len(runs) != len(plain):
            continue
        mean, half = gap(plain, runs, rising)
        times_100 = 100 if rising else 1
        unit, task_end = ("accuracy_gap_points", "") if rising else ("loss_gap_nats", end)
        name = {"diloco": unit, "sparse diloco": f"{unit}_sparse"}.get(side, "")
        figure = Figure(
            name=f"{name}{task_end}" if name else f"{unit}{task_end} {side}",
            value=times_100 * mean,
            ours=f"{side} {statistics.mean(r.final for r in runs):.4f}",
            peer=f"ddp {statistics.mean(r.final for r in plain):.4f}",
            spread=f"{short(times_100 * (mean - half))} .. {short(times_100 * (mean + half))}",
            goal=GOALS.get(name, ""),
        )
        report.add(figure)


def _steps_to_target(report: Report, task: str, learnt: Runs) -> dict[str, float]:
    """Of sides that got there: in the median of the seeds."""
    rising, plain = tasks.TASKS[task].rising, learnt.get("ddp", [])
    if not plain:
        return {}
    target = statistics.mean(run.final for run in plain) + (-ALLOWED[task] if rising else ALLOWED[task])
    counts = {name: statistics.median(r.to_target(target, rising) for r in runs) for name, runs in learnt.items()}
    never = sorted(name for name, count in counts.items() if math.isinf(count))
    report.note(f"{task}: target {target:.4f}" + (f"; not reached by {', '.join(never)}" if never else ""))
    return {name: count for name, count in counts.items() if math.isfinite(count)}


def _step_speedup(taken: Times, name: str) -> float:
    """Of a step, whatever is learnt in it."""
    if "ddp" not in taken:
        return math.nan
    return statistics.median(seconds(taken["ddp"])) / statistics.median(seconds(taken[name]))


def _fastest(taken: Times, counts: dict[str, float]) -> str:
    """Of our sides that reach the target; "" where none does."""
    mine = [n for n in taken if n not in PEERS and n in counts]
    return min(mine, key=lambda n: counts[n] * statistics.median(seconds(taken[n])), default="")


def _plot(folder: Path, task: str, times: dict[str, Times], learnt: Runs) -> None:
    """What was learnt against bytes and against time, both as powers of ten: sides are orders of magnitude apart."""
    folder.mkdir(parents=True, exist_ok=True)
    y = "accuracy" if tasks.TASKS[task].rising else "held-out loss, nats"
    for rate, taken in times.items():
        for kind, unit, scale in ("sent_bytes", "kB sent by a host", 1e-3), ("seconds", "seconds", 1.0):
            curves = []
            for name in [n for n in taken if n in learnt]:
                each = scale * statistics.median(t[kind] for t in taken[name])
                if each > 0:
                    mean = [(n, statistics.mean(v)) for n, v in _mean_curve(learnt[name])]
                    curves.append(Curve(label=name, points=[(round(math.log10(n * each), 2), v) for n, v in mean]))
            file, title = folder / f"local-{task}-{rate}-{kind}.svg", f"{task} at {rate}"
            draw(str(file), curves, title=title, x=f"log10 of {unit}", y=y)


def _mean_curve(runs: list[Run]) -> list[tuple[int, list[float]]]:
    return [(point[0][0], [v for _, v in point]) for point in zip(*(run.curve for run in runs))]


if __name__ == "__main__":
    main()
