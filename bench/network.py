"""Four hosts on a slow network, one member each: our step with codecs against DDP's over gloo with its hooks.

  speedup_10mbit, _100mbit, _1gbit   plain DDP's time / ours with the best codec
  over_best_hook_100mbit             the better of DDP's fp16 and PowerSGD hooks' time / ours with the best codec
  share_of_infinite_100mbit          time of the same step without any exchange / ours with the best codec
  auto_over_best_*                   time with codec="auto", after it has chosen / with the best codec that was named
  whole_run_speedup_100mbit          the same as speedup_100mbit without emulation: real compute on shared cores, to the
                                     target accuracy (--whole)
  *_gpt                              the same for the character GPT; those without are the CNN's

Needs root: the hosts are network namespaces on a bridge, their links shaped by token buckets (`testing.hosts`). Four
members share this machine's cores, so compute is a calibrated sleep, and the bytes are real (`_network_worker`).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import msgspec

from bench import _network_accuracy as accuracy
from bench import _network_worker as worker
from bench.harness import Figure, Report, arguments, compare, middle, short
from bench.team import Team, serve
from paceline.launch.plan import HUGE_PAGES
from paceline.testing.hosts import Hosts

SIZE = 4
SETTLING = 24  # steps in which auto chooses
RATES = ("10mbit", "100mbit", "1gbit", "unshaped")
CODECS = (
    "cast(bf16)",
    "quantize(8)",
    "quantize(8), back=quantize(8)",
    "quantize(4), back=quantize(4)",
    "sign",
    "sign, back=sign",
    "topk(0.01, values=int8)",
    "topk(0.01, values=int8), back=topk(0.02, values=int8)",
    "dgc(0.01, values=int8)",
    "lowrank(2)",
    "auto",
)


def ours(words: str) -> dict[str, str]:
    """Our side with a codec, and perhaps another on the way back."""
    codec, _, back = words.partition(", back=")
    return {"kind": "ours", "codec": codec} | ({"back": back} if back else {})


SIDES: dict[str, dict[str, str]] = {
    "alone": {"kind": "alone"},
    "ddp": {"kind": "ddp"},
    "ddp fp16": {"kind": "ddp", "hook": "fp16"},
    "ddp powersgd": {"kind": "ddp", "hook": "powersgd"},
    "none": {"kind": "ours"},
    **{codec: ours(codec) for codec in CODECS},
}
QUICK = ["alone", "ddp", "ddp fp16", "ddp powersgd", "none", "sign, back=sign", "topk(0.01, values=int8)"]
GOALS = {
    "speedup_100mbit": ">= 10",
    "speedup_1gbit": ">= 2",
    "over_best_hook_100mbit": ">= 1",
    "accuracy_gap_points": "<= 0.3",
}

Step = dict[str, float]  # seconds, sent_bytes, encode_s, ...: of one step


def main() -> None:
    options = arguments(__doc__, _options)
    if options.worker:
        return _worker()
    os.environ["BENCH_NICE"] = str(options.nice)
    if reason := Hosts.missing():
        raise SystemExit(f"bench.network: {reason}")
    report = Report("bench.network")
    repeats, block_s = (2, 0.4) if options.quick else (5, 1.5)
    tasks = options.tasks or (["cnn"] if options.quick else ["cnn", "gpt"])
    rates = options.rates or (["100mbit"] if options.quick else list(RATES))
    names = options.sides or (QUICK if options.quick else list(SIDES))
    sides = {name: SIDES.get(name) or ours(name) for name in names}
    outcomes = _outcomes(report, sides, options.outcomes) if options.outcomes else {}
    if not outcomes:
        report.note("the speedups are of the time of a STEP, not to a target accuracy (--outcomes): a codec that needs")
        report.note("more steps looks better here than it is")
    if outcomes and "gpt" in tasks:
        report.note("the GPT is not trained to a target: the figures that end in _gpt are of the time of a STEP")
    for task in tasks:
        compute = worker.calibrate(worker.TASKS[task])
        text = f"{short(1e3 * compute.step_s)} ms (forward {short(1e3 * compute.forward_s)})"
        print(f"{task}: compute of a step, alone with one thread: {text}; slept, spread over the backward", flush=True)
        report.extra[f"compute_ms_{task}"] = 1e3 * compute.step_s
        for rate in rates:
            with Hosts(SIZE) as hosts, on_hosts(hosts) as team:
                steps = measure(team, hosts, task, compute, rate, sides, repeats, block_s)
            show(task, rate, steps)
            report.extra |= {
                f"step_ms {task} {rate} {n}": 1e3 * statistics.median(seconds(s)) for n, s in steps.items()
            }
            for figure in figures(task, rate, steps, outcomes if task == "cnn" else {}):
                report.add(figure)
    _add_gap(report, outcomes)
    if options.whole:
        _add_whole(report, outcomes)
    load = os.getloadavg()[0]
    report.note(f"{SIZE} hosts x 1 thread on these cores, load average {load:.1f}, nice {options.nice}")
    report.note("ours is encrypted between hosts, gloo is not; DDP and its fp16 hook as they come; PowerSGD: rank 2,")
    report.note("start_powerSGD_iter=2, one bucket (over gloo several fail), error feedback and warm start on")
    return report.finish(options.json)


def _worker() -> None:
    import torch

    torch.set_num_threads(1)
    os.nice(int(os.environ.get("BENCH_NICE", "0")))
    serve(worker.FUNCTIONS | accuracy.FUNCTIONS)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tasks", nargs="+", choices=list(worker.TASKS))
    parser.add_argument("--rates", nargs="+", metavar="RATE", help="such as 100mbit, or unshaped")
    parser.add_argument("--sides", nargs="+", metavar="SIDE", help=f"codecs, or of {', '.join(SIDES)}")
    parser.add_argument("--nice", type=int, default=0, help="of all sides alike; below 0 where others use the machine")
    parser.add_argument("--outcomes", metavar="FILE", help="of bench.to_target, for the time to the target accuracy")
    parser.add_argument("--whole", action="store_true", help="a whole run without emulation besides, at 100 Mbit/s")


def on_hosts(hosts: Hosts) -> Team:
    """One worker on each host, not yet connected."""
    places = [(["ip", "netns", "exec", space], f"h{i}", hosts.ips[i]) for i, space in enumerate(hosts._spaces)]
    return _team(places, "eth0")


def on_this_host(env: dict[str, str] | None = None) -> Team:
    return _team([([], "one", "127.0.0.1")] * SIZE, "lo", env)


def _team(places: list[tuple[list[str], str, str]], interface: str, env: dict[str, str] | None = None) -> Team:
    commands = []
    for rank, (prefix, host, ip) in enumerate(places):
        own = {"BENCH_RANK": str(rank), "BENCH_SIZE": str(SIZE), "BENCH_HOST": host, "BENCH_ADDRESS": ip}
        common = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": interface, **HUGE_PAGES}
        commands.append(([*prefix, sys.executable, "-m", "bench.network", "--worker"], own | common | (env or {})))
    return Team(SIZE, commands, limit_s=600.0)


def connect(team: Team) -> None:
    team.call("connect", described=team.call("describe"))


def measure(
    team: Team,
    hosts: Hosts,
    task: str,
    compute: worker.Compute,
    rate: str,
    sides: dict[str, dict[str, str]],
    repeats: int,
    block_s: float,
) -> dict[str, list[Step]]:
    """Blocks of all sides in turns. What comes before the first step (and PowerSGD's start) is done at full speed; our
    rings measure the link in their first step, and so find it as it will be."""
    connect(team)
    for name, side in sides.items():
        team.call("make", name=name, task=task, side=side, compute=msgspec.to_builtins(compute))
        if side["kind"] != "ours":
            _block(team, name, 3)
    for host in range(SIZE):
        hosts.set_rate(host, None if rate == "unshaped" else rate)
    counts: dict[str, int] = {}
    for name in sides:
        _block(team, name, SETTLING if name == "auto" else 1)
        first = _block(team, name, 1)
        counts[name] = max(1, min(30, round(block_s / first["seconds"])))
    steps: dict[str, list[Step]] = {name: [] for name in sides}
    for repeat in range(repeats):
        for name in list(sides) if repeat % 2 == 0 else reversed(list(sides)):
            steps[name].append(_block(team, name, counts[name]))
    return steps


def _block(team: Team, name: str, count: int) -> Step:
    """What a step took: seconds on the slowest member, the rest in the mean of the members."""
    answers: list[dict[str, float]] = team.call("block", name=name, steps=count)
    means = {key: sum(a[key] for a in answers) / len(answers) / count for key in answers[0]}
    return means | {"seconds": max(a["seconds"] for a in answers) / count}


def figures(task: str, rate: str, steps: dict[str, list[Step]], outcomes: dict[str, accuracy.Outcome]) -> list[Figure]:
    """Those that the sides that were measured allow: of the time to the target where its steps are known."""
    end = rate if task == "cnn" else f"{rate}_{task}"
    known = {name: outcomes[name].to_target for name in steps if name in outcomes}
    counts = {name: n for name, n in known.items() if n < accuracy.NEVER} if known else dict.fromkeys(steps, 1.0)
    times = {name: [s * counts[name] for s in seconds(steps[name])] for name in steps if name in counts}
    ours, hook = best_of(times, "ours"), best_of(times, "hook")
    found = []
    for name, peer in ("speedup", "ddp"), ("over_best_hook", hook):
        if ours and peer in times:
            figure = compare(f"{name}_{end}", times[ours], times[peer])
            found.append(
                _labelled(figure, f"{ours} {_told(steps, counts, ours)}", f"{peer} {_told(steps, counts, peer)}")
            )
    if ours and "auto" in steps:
        figure = compare(f"auto_over_best_{end}", seconds(steps[ours]), seconds(steps["auto"]))
        found.append(_labelled(figure, f"auto {figure.peer}", f"{ours} {figure.ours}"))
    ours = ours or best_of({name: seconds(taken) for name, taken in steps.items()}, "ours")
    if ours and "alone" in steps:
        figure = compare(f"share_of_infinite_{end}", seconds(steps[ours]), seconds(steps["alone"]))
        found.append(_labelled(figure, f"{ours} {figure.ours}", f"alone {figure.peer}"))
    return found


def _told(steps: dict[str, list[Step]], counts: dict[str, float], name: str) -> str:
    step = f"{short(1e3 * statistics.median(seconds(steps[name])))} ms"
    return step if counts[name] == 1.0 else f"{counts[name]:.0f} x {step}"


def _labelled(figure: Figure, ours: str, peer: str) -> Figure:
    goal = "<= 1.05" if figure.name.startswith("auto_over_best") else GOALS.get(figure.name, "")
    return Figure(name=figure.name, value=figure.value, ours=ours, peer=peer, spread=figure.spread, goal=goal)


def best_of(times: dict[str, list[float]], kind: str) -> str:
    """The fastest of our sides that name their codec, or of DDP's hooks; "" where none was measured."""
    hooks = {name for name in times if name.startswith("ddp ")}
    among = hooks if kind == "hook" else set(times) - hooks - {"alone", "ddp", "auto"}
    return min(sorted(among), key=lambda name: statistics.median(times[name]), default="")


def seconds(steps: list[Step]) -> list[float]:
    return [step["seconds"] for step in steps]


def show(task: str, rate: str, steps: dict[str, list[Step]]) -> None:
    """The table of one model at one rate."""
    header = ["side", "ms/step", "middle half", "busy ms", "kB sent/step", "encode ms", "wire ms", "decode ms"]
    rows: list[list[Any]] = []
    for name, taken in steps.items():
        low, high = middle(seconds(taken))
        means = {key: sum(s[key] for s in taken) / len(taken) for key in taken[0]}
        costs = [short(1e3 * means[key]) if key in means else "-" for key in ("encode_s", "wire_s", "decode_s")]
        spread = f"{short(1e3 * low)} .. {short(1e3 * high)}"
        rows.append(
            [
                name,
                short(1e3 * statistics.median(seconds(taken))),
                spread,
                short(1e3 * means["busy_s"]),
                short(means["sent_bytes"] / 1e3),
                *costs,
            ]
        )
    print(f"\n{task} at {rate}, step time")
    widths = [max(len(str(row[i])) for row in [header, *rows]) for i in range(len(header))]
    for row in [header, *rows]:
        print("  ".join(str(cell).ljust(width) for cell, width in zip(row, widths)).rstrip(), flush=True)


def _outcomes(report: Report, sides: dict[str, dict[str, str]], file: str) -> dict[str, accuracy.Outcome]:
    """What `bench.to_target` found, having checked that a few steps do there what they do between hosts."""
    found = msgspec.json.decode(Path(file).read_bytes(), type=dict[str, accuracy.Outcome])
    for name in sides:
        if name in found and found[name].to_target == accuracy.NEVER:
            report.note(f"{name} did not reach {accuracy.TARGET:.0%}: it has no time to the target")
    if reason := accuracy.missing():
        report.note(f"not checked that runs between hosts do as those of {file}: {reason}")
        return found
    with on_this_host() as team, Hosts(SIZE) as hosts, on_hosts(hosts) as far:
        connect(team)
        connect(far)
        for name in [name for name in sides if name in found]:
            told = accuracy.compare_weights(team, far, sides[name])
            print(f"{name}: weights after 3 real steps on one host and on four: {told}", flush=True)
    return found


def _add_gap(report: Report, outcomes: dict[str, accuracy.Outcome]) -> None:
    """Of the codec that was best at 100 Mbit/s."""
    best = next((f.ours for f in report.figures if f.name == "speedup_100mbit"), "")
    ours = next((name for name in sorted(outcomes, key=len, reverse=True) if best.startswith(name)), "")
    if not ours or "ddp" not in outcomes:
        return
    mean, half = accuracy.gap(outcomes["ddp"], outcomes[ours])
    spread = f"{short(mean - half)} .. {short(mean + half)}"
    report.add(_labelled(Figure(name="accuracy_gap_points", value=mean, spread=spread), ours, "ddp"))


def _add_whole(report: Report, outcomes: dict[str, accuracy.Outcome]) -> None:
    """Train on four hosts at 100 Mbit/s with real compute until the target is reached, by DDP and by ours."""
    best = next((f.ours for f in report.figures if f.name == "speedup_100mbit"), "topk(0.01, values=int8)")
    names = [n for n in sorted([*SIDES, *outcomes], key=len, reverse=True) if best.startswith(n)]
    taken: dict[str, float] = {}
    with Hosts(SIZE) as hosts, on_hosts(hosts) as team:
        connect(team)
        for host in range(SIZE):
            hosts.set_rate(host, "100mbit")
        for name in [names[0] if names else best, "auto", "ddp"]:
            lr = outcomes[name].lr if name in outcomes else 0.05
            steps, seconds_taken = accuracy.to_target(team, SIDES.get(name) or ours(name), lr, epochs=4.0)
            print(
                f"whole run at 100 Mbit/s, {name}: lr {lr}, {steps} steps, {seconds_taken:.1f} s of training",
                flush=True,
            )
            taken[name] = seconds_taken
    first = next(iter(taken))
    report.add(
        Figure(
            name="whole_run_speedup_100mbit",
            value=taken["ddp"] / taken[first],
            ours=f"{first} {taken[first]:.1f} s, auto {taken['auto']:.1f} s",
            peer=f"ddp {taken['ddp']:.1f} s",
        )
    )


if __name__ == "__main__":
    main()
