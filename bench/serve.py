"""paceline serve against plain FastAPI, LitServe and mosec: one model, one body, one load, in one run.

    python -m bench.serve --peers-python PATH      (bench/peers/serve.txt; the load comes from wrk, Debian's package)

The model is LeNet-5 on 28x28 images, one image per request, on the processors that this process may use. Every server
is started once and stopped (SIGSTOP) while another one is measured; blocks are taken in turns, forwards and backwards.
Each peer has batches on where it has them, and one thread per worker.

`p99_over_best`: p99 at 8 connections, ours / the best peer's of the same round. `throughput_over_best`: requests per
second at 64, ours / the best peer's. `..._raw`: the same with the image as safetensors instead of JSON. With a new
version every second: `failed_during_swaps`, `p99_swap_over_still`, and `freshness_file_s`, from the writing of a file
to the first answer that it made. With a run that is followed: `freshness_s`, from the apply of a push on its server to
the first answer; see `_serve_fresh`.

    python -m bench.serve --device cuda [--form compile]        (instead of all that; needs no wrk)

A forward pass of GPT-2 small's size on a GPU behind the server, against a bare loop: `gpt_share_N`; see `_serve_cuda`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from bench import _serve_sides as sides
from bench._serve_cuda import against_a_bare_loop
from bench._serve_fresh import follow_a_run
from bench._serve_sides import Load, Side
from bench.harness import Figure, Report, arguments, middle, short

CONNECTIONS = (1, 8, 64)
PARTS = ("json", "raw", "swaps", "fresh")


def main() -> None:
    given = arguments(__doc__, _options)
    if not given.device and given.parts != ["fresh"] and not shutil.which("wrk"):
        sys.exit("bench.serve needs wrk for the load: apt-get install wrk")
    report = Report("bench.serve")
    cores = len(os.sched_getaffinity(0))
    report.note(f"load average at the start {os.getloadavg()[0]:.1f}, {cores} cores, the load on the same")
    rounds, seconds = (3, 2.0) if given.quick else (given.rounds, 5.0)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        if given.device:
            against_a_bare_loop(report, directory, given.device, given.form, rounds, seconds)
        else:
            _parts(report, directory, given, rounds, seconds)
    report.note(f"load average at the end {os.getloadavg()[0]:.1f}")
    report.finish(given.json)


def _parts(report: Report, directory: Path, given: argparse.Namespace, rounds: int, seconds: float) -> None:
    sides.write_bodies(directory)
    for kind in ("json", "raw"):
        if kind in given.parts:
            _against_peers(report, kind, given.peers_python, directory, rounds, seconds)
    if "swaps" in given.parts:
        _swaps(report, directory, rounds, seconds)
    if "fresh" in given.parts:
        follow_a_run(report, directory, versions=20 if given.quick else 100)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--peers-python", metavar="PATH", help="of an environment with bench/peers/serve.txt")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="blocks of each side and load (5)")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS, help="peers with either body, new versions")
    parser.add_argument("--device", metavar="NAME", help="a GPT there against a bare loop: cuda, or cpu to try it")
    parser.add_argument("--form", default="eager", choices=["eager", "compile"], help="of the GPT (eager)")


def _against_peers(report: Report, kind: str, python: str | None, directory: Path, rounds: int, seconds: float) -> None:
    everyone: list[Side] = [sides.ours(directory, kind)]
    if python:
        everyone += sides.peers(python, kind)
    loads: dict[tuple[str, int], list[Load]] = {(s.name, c): [] for s in everyone for c in CONNECTIONS}
    try:
        for side in everyone:
            side.start(directory)
            side.load(8, 1.0)  # warm
            side.pause()
        for number in range(rounds):
            for side in everyone if number % 2 == 0 else reversed(everyone):
                side.resume()
                for connections in CONNECTIONS:
                    loads[side.name, connections].append(side.load(connections, seconds))
                side.pause()
    finally:
        for side in everyone:
            side.stop()
    _table(kind, [side.name for side in everyone], loads)
    for (name, connections), found in loads.items():
        report.extra[f"{name}_{kind}_{connections}_p50_ms"] = statistics.median(load.p50_ms for load in found)
        report.extra[f"{name}_{kind}_{connections}_p99_ms"] = statistics.median(load.p99_ms for load in found)
        report.extra[f"{name}_{kind}_{connections}_per_s"] = statistics.median(load.per_s for load in found)
    if len(everyone) > 1:
        names = [side.name for side in everyone[1:]]
        more = "" if kind == "json" else f"_{kind}"
        p99 = {name: [load.p99_ms for load in loads[name, 8]] for name in ("ours", *names)}
        best = min(names, key=lambda name: statistics.median(p99[name]))
        report.add(_ratio(f"p99_over_best{more}", p99["ours"], p99[best], "ms", best, "<= 1"))
        per_s = {name: [load.per_s for load in loads[name, 64]] for name in ("ours", *names)}
        best = max(names, key=lambda name: statistics.median(per_s[name]))
        report.add(_ratio(f"throughput_over_best{more}", per_s["ours"], per_s[best], "/s", best, ">= 1.5"))
        cpu = {name: [load.cpu_us for load in loads[name, 64]] for name in ("ours", *names)}
        best = min(names, key=lambda name: statistics.median(cpu[name]))
        report.add(_ratio(f"cpu_over_best{more}", cpu["ours"], cpu[best], "us", best, ""))


def _ratio(name: str, ours: list[float], peer: list[float], unit: str, who: str, goal: str) -> Figure:
    ratios = [a / b for a, b in zip(ours, peer)]
    low, high = middle(ratios)
    return Figure(
        name=name,
        value=statistics.median(ratios),
        ours=f"{short(statistics.median(ours))} {unit}",
        peer=f"{who} {short(statistics.median(peer))} {unit}",
        spread=f"{short(low)} .. {short(high)}",
        goal=goal,
    )


def _table(kind: str, names: list[str], loads: dict[tuple[str, int], list[Load]]) -> None:
    print(
        f"\n{kind}: medians of p50 ms / p99 ms / requests per s / processor us per request (range of the middle half)"
    )
    for name in names:
        cells = []
        for connections in CONNECTIONS:
            found = loads[name, connections]
            p50, p99, per_s, cpu = (
                statistics.median(getattr(load, field) for load in found)
                for field in ("p50_ms", "p99_ms", "per_s", "cpu_us")
            )
            low, high = middle([load.per_s for load in found])
            failed = sum(load.failed for load in found)
            cells.append(
                f"{short(p50)} / {short(p99)} / {short(per_s)} / {short(cpu)} ({short(low)} .. {short(high)})"
                + f" FAILED {failed}" * bool(failed)
            )
        print(f"  {name:10}" + "".join(f"{c:>4}: {cell:48}" for c, cell in zip(CONNECTIONS, cells)), flush=True)


def _swaps(report: Report, directory: Path, rounds: int, seconds: float) -> None:
    side = sides.ours(directory, "json")
    still: list[float] = []
    swapping: list[float] = []
    fresh: list[float] = []
    failed = versions = 0
    try:
        side.start(directory)
        side.load(8, 1.0)
        for _ in range(max(rounds, 3)):
            still.append(side.load(8, seconds).p99_ms)
            with sides.new_versions(directory, every_s=1.0) as written:
                load = side.load(8, max(seconds, 4.0))
            versions += len(written)
            swapping.append(load.p99_ms)
            failed += load.failed
            fresh += [sides.freshness(side, directory) for _ in range(3)]
    finally:
        side.stop()
    report.add(Figure(name="failed_during_swaps", value=failed, ours=f"{versions} versions", goal="<= 0"))
    report.add(_ratio("p99_swap_over_still", swapping, still, "ms", "still", "<= 1.2"))
    low, high = middle(fresh)
    spread = f"{short(low)} .. {short(high)}"
    report.add(Figure(name="freshness_file_s", value=statistics.median(fresh), spread=spread, goal="<= 1"))


if __name__ == "__main__":
    main()
