"""Peak memory per member while a GPT of 30M parameters is trained with AdamW, against the peers at each stage of ZeRO.

  memory_over_best_peer_zero1   zero(stage=1) / the least of DDP with ZeroRedundancyOptimizer and DeepSpeed's stage 1
  memory_over_best_peer_zero2   zero(stage=2) / the least of DeepSpeed's stage 2 and FSDP2 that keeps parameters whole
  memory_over_best_peer_zero3   --mesh shard=2 / the least of FSDP2 and DeepSpeed's stage 3
  memory_over_best_peer         the largest of the three
  memory_over_ddp_gpt           allreduce / the least of DDP and DDP(gradient_as_bucket_view=True)
  ..._malloc                    the same as these processes are started by their users: ours as by `paceline run`, whose
                                malloc asks for huge pages, peers with malloc's defaults

Two processes, one thread each, batch 4 x 128. The peak is the kernel's high-water mark of resident pages, above what
the process had before, and what is shared counts once (`_memory_sides.py`). malloc keeps what is freed between larger
pieces, and what that costs wavers by tens of MB from run to run; so the figures above are measured with blocks of more
than 64 kB taken from the system one by one, on all sides alike, where peaks repeat within 1 MB. Sides take turns;
medians. What is offloaded to host memory means nothing here, where all memory is the host's.

With --device cuda, on one GPU and in one process (`_memory_cuda.py`): the largest GPT that trains, whole and with parts
in host memory, and tokens/s against FSDP2 with CPUOffloadPolicy.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys

from bench.harness import Figure, Report, arguments, short
from bench.team import Team

STAGES = {
    "_zero1": ("ours zero(stage=1)", ("DDP ZeroRedundancyOptimizer", "DeepSpeed 1")),
    "_zero2": ("ours zero(stage=2)", ("DeepSpeed 2", "FSDP2 kept whole")),
    "_zero3": ("ours shard=2", ("FSDP2", "DeepSpeed 3")),
}
WHOLE = ("ours allreduce", ("DDP", "DDP views"))
_EXACT = {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=65536"}
_PARTS = ("making", "first step", "later steps")


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
    for suffix in ("",) if options.quick else ("", "_malloc"):
        peaks: dict[str, list[float]] = {name: [] for name in sides}
        for repeat in range(repeats):
            for name in sides if repeat % 2 == 0 else reversed(sides):
                peaks[name].append(_peak(name, size, options.deepspeed_python, as_launched=bool(suffix)))
        _add(report, peaks, suffix)
    load = os.getloadavg()
    report.note(f"load of the machine in the last 1, 5, 15 minutes: {load[0]:.1f}, {load[1]:.1f}, {load[2]:.1f}")
    return report.finish(options.json)


def _options(parser: argparse.ArgumentParser) -> None:
    default = os.environ.get("BENCH_DEEPSPEED_PYTHON", "")
    parser.add_argument("--deepspeed-python", metavar="PATH", default=default, help="of an environment with DeepSpeed")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")


def _peak(side: str, size: str, deepspeed: str, *, as_launched: bool) -> float:
    """The mean of the members' peaks, in bytes."""
    from paceline.launch.plan import HUGE_PAGES

    ours = side.startswith("ours")
    malloc = (HUGE_PAGES if ours else {"GLIBC_TUNABLES": ""}) if as_launched else _EXACT
    if side.startswith("DeepSpeed"):
        common = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "BENCH_SIZE": "2"}
        command = [deepspeed, "-m", "bench.peers.deepspeed_zero"]
        team = Team(2, [(command, {**common, **malloc, "BENCH_RANK": str(rank)}) for rank in range(2)], 240.0)
    else:
        team = Team.of(2, "bench.memory", ours=ours, limit_s=240.0, env=malloc)
    with team:
        found = team.call("measure", side=side, size=size, steps=5)
        team.call("finish")
    told = ", ".join(f"{part} {one[part] / 1e6:.0f}" for one in found[:1] for part in (*_PARTS, "between steps"))
    print(f"{side}: {told} MB; loss {statistics.mean(one['loss'] for one in found):.3f}", file=sys.stderr, flush=True)
    return statistics.mean(max(one[part] for part in _PARTS) for one in found)


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
