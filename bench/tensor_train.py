"""Tensor-train layers against nn.Linear and tensorly: time, size, the rule's decisions, and accuracy after conversion.

  tt_rule_right             share of the cells (side, batch, rank, pass) in which the rule names the faster of TTLinear
                            and nn.Linear; `_forward` and `_training` apart
  tt_speedup_batchB_rankR   side 4096, forward: nn.Linear's time / ours; `_training_` for forward and backward
  tt_over_tensorly_batchB_rankR
                            the same: tensorly's time / ours; tt_over_tensorly: the geometric mean over all cells
  tt_smaller_rank8          side 4096: weights of nn.Linear / ours
  tt_compression            an MLP on Fashion-MNIST (else digits): parameters before / after
  tt_points_lost            points of test accuracy that it is behind after fine-tuning, in the mean of the seeds

One thread. A cell is right where the rule's choice is the one with the lower median; cells whose medians are within
5 % of each other count like all others. The rule is calibrated once, before the cells, on other shapes and batches as
well as on some of these. tensorly lives in an environment of its own (`peers/`), and is left out where it is not named.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import os
import statistics
import time
from typing import NamedTuple

import torch
from torch import nn

from bench import _tensor_train_accuracy as training
from bench.harness import Figure, Report, arguments, compare, interleave, middle, short
from bench.team import Team
from paceline.layers import TTLinear, verdict

PARTS = ("time", "accuracy")
SIDES = (1024, 4096)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
RANKS = (4, 8, 16, 32, 64)
SHOWN = ((1, 8), (64, 8), (256, 8), (1, 64), (256, 64))


class Cell(NamedTuple):
    side: int
    batch: int
    rank: int
    training: bool

    @property
    def name(self) -> str:
        return f"{'training_' if self.training else ''}batch{self.batch}_rank{self.rank}"


class Times(NamedTuple):
    ours: list[float]
    dense: list[float]
    tensorly: list[float]  # empty where it is left out
    predicted: bool  # that ours is the faster one

    @property
    def right(self) -> bool:
        return self.predicted == (statistics.median(self.ours) < statistics.median(self.dense))

    @property
    def close(self) -> bool:
        return 0.95 < statistics.median(self.ours) / statistics.median(self.dense) < 1 / 0.95


def main() -> None:
    options = arguments(__doc__, _options)
    torch.set_num_threads(1)
    report = Report("bench.tensor_train")
    if "time" in options.parts:
        began = time.perf_counter()
        for both in (False, True):
            verdict(1024, 1024, rank=8, batch=1, training=both)
        report.note(f"calibration took {time.perf_counter() - began:.1f} s for forward and training together")
        cells = _measure(options)
        _add_rule(report, cells)
        _add_times(report, cells)
    if "accuracy" in options.parts:
        _add_accuracy(report, quick=options.quick)
    if not options.tensorly_python:
        report.note("no tensorly: install bench/peers/tensorly.txt somewhere and name it with --tensorly-python")
    load = os.getloadavg()
    report.note(f"load of the machine in the last 1, 5, 15 minutes: {load[0]:.1f}, {load[1]:.1f}, {load[2]:.1f}")
    report.finish(options.json)


def _options(parser: argparse.ArgumentParser) -> None:
    default = os.environ.get("BENCH_TENSORLY_PYTHON", "")
    parser.add_argument("--tensorly-python", metavar="PATH", default=default, help="of an environment with tensorly")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="which figures; default: all")


# ---- time


def _measure(options: argparse.Namespace) -> dict[Cell, Times]:
    batches = (1, 16, 256) if options.quick else BATCHES
    ranks = (8, 64) if options.quick else RANKS
    cells: dict[Cell, Times] = {}
    with contextlib.ExitStack() as stack:
        peer = None
        if python := options.tensorly_python:
            env = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
            peer = stack.enter_context(Team(1, [([python, "-m", "bench.peers.tensorly_layers"], env)], limit_s=300.0))
        for both in (False, True):
            for side in SIDES:
                for batch in batches:
                    row = _row(side, batch, ranks, both, peer, quick=options.quick)
                    cells |= row
                    told = ", ".join(f"{c.rank}: {_ms(t.ours)}" for c, t in row.items())
                    dense = _ms(next(iter(row.values())).dense)
                    print(f"{'both' if both else 'forward'} {side} batch {batch}: dense {dense}; {told}", flush=True)
    return cells


def _row(
    side: int, batch: int, ranks: tuple[int, ...], both: bool, peer: Team | None, *, quick: bool
) -> dict[Cell, Times]:
    """All ranks at one size and batch, in turns with one dense layer."""
    x = torch.randn(batch, side, requires_grad=both)
    blocks = {"dense": functools.partial(_block, nn.Linear(side, side, bias=False), x)}
    for rank in ranks:
        layer = TTLinear(side, side, bias=False, rank=rank)
        blocks[f"ours {rank}"] = functools.partial(_block, layer, x)
        if peer:
            peer.call("set_up", modes=list(layer.shape.ins), rank=rank, batch=batch, training=both)
            blocks[f"tensorly {rank}"] = functools.partial(_peer_block, peer, rank)
    times = interleave(blocks, repeats=3 if quick else 7, block_s=0.01 if quick else 0.02, limit_s=1 if quick else 6)
    found = {}
    for rank in ranks:
        told = verdict(side, side, rank=rank, batch=batch, training=both)
        cell = Cell(side, batch, rank, both)
        tensorly = times.get(f"tensorly {rank}", [])
        found[cell] = Times(times[f"ours {rank}"], times["dense"], tensorly, told.train_s < told.dense_s)
    return found


def _block(layer: nn.Module, x: torch.Tensor, steps: int) -> float:
    began = time.perf_counter()
    for _ in range(steps):
        if x.requires_grad:
            y = layer(x)
            torch.autograd.grad(y, [x, *layer.parameters()], y.detach())
        else:
            with torch.no_grad():
                layer(x)
    return time.perf_counter() - began


def _peer_block(peer: Team, rank: int, steps: int) -> float:
    return peer.slowest("block", way="", rank=rank, steps=steps)


def _ms(times: list[float]) -> str:
    return f"{short(1e3 * statistics.median(times))} ms"


# ---- figures


def _add_rule(report: Report, cells: dict[Cell, Times]) -> None:
    parts = {
        "": list(cells),
        "_forward": [c for c in cells if not c.training],
        "_training": [c for c in cells if c.training],
    }
    for name, chosen in parts.items():
        right = sum(cells[c].right for c in chosen)
        told = f"{right} of {len(chosen)} cells"
        report.add(
            Figure(name=f"tt_rule_right{name}", value=right / len(chosen), ours=told, goal="" if name else ">= 0.9")
        )
    close = [c for c, t in cells.items() if t.close]
    wrong = [c for c, t in cells.items() if not t.right]
    faster = sum(statistics.median(t.ours) < statistics.median(t.dense) for t in cells.values())
    report.note(f"TTLinear is the faster one in {faster} of {len(cells)} cells; within 5 % in {len(close)}")
    if wrong:
        said = ", ".join(f"{c.side} {c.name}{' (within 5 %)' if cells[c].close else ''}" for c in wrong)
        report.note(f"the rule was wrong in: {said}")


def _add_times(report: Report, cells: dict[Cell, Times]) -> None:
    for both in (False, True):
        for batch, rank in SHOWN:
            cell = Cell(max(SIDES), batch, rank, both)
            if cell in cells:
                ours, dense, tensorly, _ = cells[cell]
                report.add(compare(f"tt_speedup_{cell.name}", ours, dense))
                if tensorly:
                    report.add(compare(f"tt_over_tensorly_{cell.name}", ours, tensorly))
    ratios = [statistics.median(t.tensorly) / statistics.median(t.ours) for t in cells.values() if t.tensorly]
    if ratios:
        mean = math.exp(statistics.mean(map(math.log, ratios)))
        low, high = middle(ratios)
        spread = f"{short(low)} .. {short(high)}"
        report.add(Figure(name="tt_over_tensorly", value=mean, ours=f"least {short(min(ratios))}", spread=spread))
    side = max(SIDES)
    weights = sum(p.numel() for p in TTLinear(side, side, bias=False, rank=8).parameters())
    report.add(Figure(name="tt_smaller_rank8", value=side**2 / weights, ours=f"{weights}", peer=f"{side**2}"))
    for cell, (ours, dense, tensorly, _) in cells.items():
        name = f"{cell.side}_{cell.name}_ms"
        report.extra[f"tt_{name}"] = 1e3 * statistics.median(ours)
        report.extra[f"dense_{name}"] = 1e3 * statistics.median(dense)
        if tensorly:
            report.extra[f"tensorly_{name}"] = 1e3 * statistics.median(tensorly)


def _add_accuracy(report: Report, *, quick: bool) -> None:
    found = training.data()
    epochs = 1 if quick and found.name != "digits" else 6
    outcomes = training.outcomes(found, 1 if quick else 3, epochs=epochs)
    dense, converted, tuned, smaller = (statistics.mean(values) for values in zip(*outcomes))
    lost = [one.dense - one.tuned for one in outcomes]
    report.add(Figure(name="tt_compression", value=smaller, goal=">= 10"))
    told = {"ours": f"{tuned:.2f} %", "peer": f"{dense:.2f} %", "spread": f"{min(lost):.2f} .. {max(lost):.2f}"}
    report.add(Figure(name="tt_points_lost", value=statistics.mean(lost), goal="<= 0.5", **told))
    report.note(f"MLP on {found.name}, {epochs} epochs and as many more; as converted it has {converted:.2f} %")


if __name__ == "__main__":
    main()
