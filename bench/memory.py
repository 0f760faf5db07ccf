"""Peak memory per member while a GPT of 30M parameters is trained with AdamW, against the peers at each stage of ZeRO.

  memory_over_best_peer_zero1   zero(stage=1) / the least of DDP with ZeroRedundancyOptimizer and DeepSpeed's stage 1
  memory_over_best_peer_zero2   zero(stage=2) / the least of DeepSpeed's stage 2 and FSDP2 that keeps parameters whole
  memory_over_best_peer_zero3   --mesh shard=2 / the least of FSDP2 and DeepSpeed's stage 3
  memory_over_best_peer         the largest of the three
  memory_over_ddp_gpt           allreduce / the least of DDP and DDP(gradient_as_bucket_view=True)
  ..._malloc                    the same as these processes are started by their users: ours as by `paceline run`, whose
                                malloc asks for huge pages, peers with malloc's defaults

Two processes, one thread each, batch 4 x 128. The peak is the most that a member has held above what it had before,
mean of both members; what is shared counts once (`_memory_marks.py`). malloc keeps what is freed between larger pieces,
and what that costs wavers by tens of MB from run to run; so the figures above are measured with blocks of more than
64 kB taken from the system one by one, on all sides alike, where peaks repeat within a few MB. Sides take turns;
medians. What is offloaded to host memory means nothing here, where all memory is the host's.

With --device cuda, on one GPU and in one process (`_memory_cuda.py`): the largest GPT that trains, whole and with parts
in host memory, and tokens/s against FSDP2 with CPUOffloadPolicy.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from contextlib import ExitStack
from typing import Any

from bench._memory_marks import Charged, Mark, Sampled, best
from bench.harness import Figure, Report, arguments, short
from bench.team import Team

STAGES = {
    "_zero1": ("ours zero(stage=1)", ("DDP ZeroRedundancyOptimizer", "DeepSpeed 1")),
    "_zero2": ("ours zero(stage=2)", ("DeepSpeed 2", "FSDP2 kept whole")),
    "_zero3": ("ours shard=2", ("FSDP2", "DeepSpeed 3")),
}
WHOLE = ("ours allreduce", ("DDP", "DDP views"))
_EXACT = {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=65536"}
_STEPS = 5


def main() -> None:
    options = arguments(__doc__, _options)
    if options.worker:
        return _worker()
    report = Report("bench.memory")
    if options.device == "cuda":
        from bench import _memory_cuda

        _memory_cuda.measure(report, quick=options.quick)
        return report.finish(options.json)
    sides = [name for ours, peers in [*STAGES.values(), WHOLE] for name in (ours, *peers)]
    if not options.deepspeed_python:
        sides = [name for name in sides if "DeepSpeed" not in name]
        report.note("no DeepSpeed: install bench/peers/deepspeed.txt somewhere and name it with --deepspeed-python")
    repeats, size = (1, "gpt30m") if options.quick else (3, "gpt30m")
    way, read = best(), 0
    for suffix in ("",) if options.quick else ("", "_malloc"):
        peaks: dict[str, list[float]] = {name: [] for name in sides}
        for repeat in range(repeats):
            for name in sides if repeat % 2 == 0 else reversed(sides):
                peak, files = _peak(name, size, options.deepspeed_python, way, as_launched=bool(suffix))
                peaks[name].append(peak)
                read = max(read, files)
        _add(report, peaks, suffix)
    report.note(f"counted: {way.counted}; of it pages of files, at most {read / 1e6:.2f} MB")
    load = os.getloadavg()
    report.note(f"load of the machine in the last 1, 5, 15 minutes: {load[0]:.1f}, {load[1]:.1f}, {load[2]:.1f}")
    return report.finish(options.json)


def _options(parser: argparse.ArgumentParser) -> None:
    default = os.environ.get("BENCH_DEEPSPEED_PYTHON", "")
    parser.add_argument("--deepspeed-python", metavar="PATH", default=default, help="of an environment with DeepSpeed")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")


def _peak(
    side: str, size: str, deepspeed: str, way: type[Charged | Sampled], *, as_launched: bool
) -> tuple[float, int]:
    """The mean of the members' peaks, in bytes; and the most that pages of files can have added to it."""
    from paceline.launch.plan import HUGE_PAGES

    ours = side.startswith("ours")
    malloc = (HUGE_PAGES if ours else {"GLIBC_TUNABLES": ""}) if as_launched else _EXACT
    if side.startswith("DeepSpeed"):
        common = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "BENCH_SIZE": "2"}
        command = [deepspeed, "-m", "bench.peers.deepspeed_zero"]
        team = Team(2, [(command, {**common, **malloc, "BENCH_RANK": str(rank)}) for rank in range(2)], 240.0)
    else:
        team = Team.of(2, "bench.memory", ours=ours, limit_s=240.0, env=malloc)
    peaks: dict[str, list[int]] = {}  # above what was there before; a number for each member
    with ExitStack() as stack, team:
        marks: list[Mark] = []
        for pid in team.pids:
            marks.append(way(pid))
            stack.callback(marks[-1].close)
        team.call("before", side=side)
        before, files = [mark.now() for mark in marks], [mark.files() for mark in marks]

        def stage(part: str, name: str, **arguments: Any) -> list[Any]:
            for mark in marks:
                mark.restart()
            answers = team.call(name, **arguments)
            peaks[part] = [mark.peak() - had for mark, had in zip(marks, before)]
            return answers

        stage("making", "making", size=size)
        stage("first step", "train", first=0, last=1)
        losses = stage("later steps", "train", first=1, last=_STEPS)
        between = [mark.now() - had for mark, had in zip(marks, before)]
        read = max(mark.files() - had for mark, had in zip(marks, files))
        team.call("finish")
    means = {part: statistics.mean(found) / 1e6 for part, found in {**peaks, "between steps": between}.items()}
    told = ", ".join(f"{part} {mean:.0f}" for part, mean in means.items())
    print(f"{side}: {told} MB; loss {statistics.mean(losses):.3f}", file=sys.stderr, flush=True)
    return statistics.mean(map(max, *peaks.values())), read


def _add(report: Report, peaks: dict[str, list[float]], suffix: str) -> None:
    worst = []
    for name, (ours, peers) in [*STAGES.items(), ("", WHOLE)]:
        there = [peer for peer in peers if peer in peaks]
        best = min(there, key=lambda peer: statistics.median(peaks[peer]))
        ratios = [a / b for a, b in zip(peaks[ours], peaks[best])]
        figure = Figure(
            name=(f"memory_over_best_peer{name}" if name else "memory_over_ddp_gpt") + suffix,
            value=statistics.median(peaks[ours]) / statistics.median(peaks[best]),
            ours=f"{short(statistics.median(peaks[ours]) / 1e6)} MB",
            peer=f"{short(statistics.median(peaks[best]) / 1e6)} MB ({best})",
            spread=f"{short(min(ratios))} .. {short(max(ratios))}",
            goal="<= 1" if name else "",
        )
        report.add(figure)
        worst += [figure.value] if name else []
    report.add(Figure(name=f"memory_over_best_peer{suffix}", value=max(worst), goal="<= 1"))
    told = ", ".join(f"{name} {statistics.median(found) / 1e6:.0f}" for name, found in peaks.items())
    report.note(f"peaks in MB{' as launched' if suffix else ''}: {told}")


def _worker() -> None:
    from bench import _memory_sides as sides
    from bench.team import serve

    serve(sides.functions(sides.SIDES))


if __name__ == "__main__":
    main()
