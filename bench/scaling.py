"""Samples per second for 1 ... 16 members with one thread each, ours beside DDP over gloo, drawn as a curve.

For each model (mlp, cnn, gpt) and number of members n, both in the same processes, blocks interleaved:
  MODEL_ours_N, MODEL_ddp_N        samples per second of all members together
  MODEL_efficiency_N               ours: samples/s of n members / (n * samples/s of plain PyTorch alone)
  MODEL_efficiency_ddp_N           DDP's
The table shows the efficiencies; the JSON holds all. `--svg FILE` writes the plot. Members beyond the number
of cores are left out (they would measure the kernel's scheduler), unless `--oversubscribe` is given.
"""

from __future__ import annotations

import argparse
import os
import statistics
from typing import Any

from bench.harness import Figure, Report, arguments, interleave, middle, short
from bench.models import TASKS
from bench.plot import Curve, draw
from bench.team import Team


def main() -> None:
    options = arguments(__doc__, _options)
    if options.worker:
        return _worker()
    report = Report("bench.scaling")
    cores = len(os.sched_getaffinity(0))
    sizes = options.members or ([1, 2, 4] if options.quick else [1, 2, 4, 6, 8, 12, 16])
    left_out = [n for n in sizes if n > cores and not options.oversubscribe]
    sizes = [n for n in sizes if n not in left_out]
    if left_out:
        report.note(f"left out {left_out} members: only {cores} cores here")
    curves = []
    for model in options.models or (["mlp"] if options.quick else ["mlp", "cnn", "gpt"]):
        rates = {n: _rates(model, n, options.quick) for n in [1, *(n for n in sizes if n > 1)]}
        alone = statistics.median(rates[1]["plain"])
        for side, label in ("ours", ""), ("ddp", "ddp_"):
            points = []
            for n, found in rates.items():
                if side not in found:
                    continue
                rate = statistics.median(found[side])
                points.append((n, rate / alone))
                low, high = middle([r / alone / n for r in found[side]])
                report.add(
                    Figure(
                        name=f"{model}_efficiency_{label}{n}",
                        value=rate / alone / n,
                        ours=f"{short(rate)}/s",
                        peer=f"{n} x {short(alone)}/s",
                        spread=f"{short(low)} .. {short(high)}",
                    )
                )
                report.extra[f"{model}_{side}_{n}"] = rate
            curves.append(Curve(label=f"{model}, {'Paceline' if side == 'ours' else 'DDP, gloo'}", points=points))
    if options.svg:
        draw(options.svg, curves, title="speed-up over one process", x="members", y="times faster", ideal=True)
        report.note(f"plot written to {options.svg}")
    return report.finish(options.json)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--members", type=int, nargs="+", metavar="N", help="numbers of members to measure")
    parser.add_argument("--models", nargs="+", choices=["mlp", "cnn", "gpt"], help="which models")
    parser.add_argument("--svg", metavar="FILE", help="write the plot")
    parser.add_argument("--oversubscribe", action="store_true", help="also measure more members than cores")


def _rates(model: str, members: int, quick: bool) -> dict[str, list[float]]:
    """Samples per second of all members together, per side, for every repeat."""
    repeats, block_s, limit_s = (5, 0.5, 6.0) if quick else (15, 1.0, 40.0)
    sides = ["ours", "plain"] if members == 1 else ["ours", "ddp"]
    with Team.of(members, "bench.scaling", threads=1, limit_s=180) as team:
        for side in sides:
            team.call("make", name=side, task=model, side=side)

        def block(side: str) -> Any:
            return lambda k: team.slowest("block", name=side, steps=k)

        times = interleave({s: block(s) for s in sides}, repeats=repeats, block_s=block_s, limit_s=limit_s)
        team.call("finish")
    samples = members * TASKS[model].batch_size
    return {side: [samples / t for t in series] for side, series in times.items()}


def _worker() -> None:
    import torch

    from bench import workers
    from bench.team import serve

    torch.set_num_threads(1)
    if workers.SIZE > 1:
        workers.gloo()
    serve(workers.FUNCTIONS)


if __name__ == "__main__":
    main()
