"""All-reduce with one slow member, for `bench.straggler`: four members, of which one takes three times as long for a
sample; samples/s with `--stragglers tell` and `less`, and of DDP with gloo.

Run as a script, it is one worker of these: `--side paceline` under `paceline run`, `--side ddp` under torchrun.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from bench.harness import Figure, Report, middle, short

MEMBERS, SLOW, TIMES = 4, 3, 3
BATCH, SAMPLE_S = 16, 1e-3
STEPS = (110, 100)  # to warm up, and that are measured: shares are looked at after 50 and after 100
QUICK = (60, 40)
_LIMIT_S = 120.0
SIDES = ("tell", "less", "ddp")


def add_figures(report: Report, *, quick: bool) -> None:
    """Measure the sides in turns."""
    rates: dict[str, list[float]] = {side: [] for side in SIDES}
    for repeat in range(1 if quick else 5):
        for side in SIDES if repeat % 2 == 0 else reversed(SIDES):
            rates[side].append(_rate(side, QUICK if quick else STEPS))
    for name, peer in (("less_over_ddp", "ddp"), ("less_over_tell", "tell")):
        ratios = [ours / theirs for ours, theirs in zip(rates["less"], rates[peer])]
        low, high = middle(ratios)
        report.add(
            Figure(
                name=name,
                value=sorted(ratios)[len(ratios) // 2],
                ours=f"{_median(rates['less']):.0f} samples/s",
                peer=f"{peer} {_median(rates[peer]):.0f}",
                spread=f"{short(low)} .. {short(high)}",
            )
        )
    equal = BATCH * MEMBERS / (BATCH * SAMPLE_S * TIMES)
    best = (MEMBERS - 1 + 1 / TIMES) / SAMPLE_S
    report.note(
        f"if only sleeps took time: {equal:.0f} samples/s with equal shares, {best:.0f} with those of the speeds"
    )


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _rate(side: str, steps: tuple[int, int]) -> float:
    """Samples per second of all members, after the warm-up."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        script = [str(Path(__file__)), "--side", "ddp" if side == "ddp" else "paceline", "--steps", *map(str, steps)]
        if side == "ddp":
            launch = ["torch.distributed.run", "--standalone", f"--nproc-per-node={MEMBERS}"]
        else:
            launch = ["paceline", "run", "-n", str(MEMBERS), "--threads", "1", "--stragglers", side]
            launch += ["--progress", "off", "--checkpoint-keep", "0", "--root", folder]
        root = str(Path(__file__).resolve().parents[1])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        done = subprocess.run(
            [sys.executable, "-m", *launch, *script],
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            check=False,
        )
    found = [line.rpartition("RATE ")[2] for line in done.stdout.splitlines() if "RATE " in line]
    if done.returncode or not found:
        raise RuntimeError(f"{side} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return float(found[0])


# ---- in the workers


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


def _data(samples: int) -> torch.utils.data.TensorDataset:
    dice = torch.Generator().manual_seed(0)
    return torch.utils.data.TensorDataset(
        torch.randn(samples, 64, generator=dice), torch.randint(10, (samples,), generator=dice)
    )


Steps = tuple[int, int]  # to warm up, and measured


def _train(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[list[torch.Tensor]], rank: int, steps: Steps
) -> None:
    """Each sample sleeps; the first member tells how fast all were."""
    began = 0.0
    for step, (x, y) in enumerate(batches):
        if step == steps[0]:
            began = time.monotonic()
        time.sleep(SAMPLE_S * len(x) * (TIMES if rank == SLOW else 1))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    if rank == 0:
        print(f"RATE {steps[1] * BATCH * MEMBERS / (time.monotonic() - began)}", flush=True)


def _ours(steps: Steps) -> None:
    import paceline

    run = paceline.join()
    model = _model()
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
    loader = run.loader(_data(sum(steps) * BATCH * MEMBERS), batch_size=BATCH)
    for _ in run.epochs(1):
        _train(model, optimizer, iter(loader), run.rank, steps)


def _ddp(steps: Steps) -> None:
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    model = nn.parallel.DistributedDataParallel(_model())
    data = _data(sum(steps) * BATCH * MEMBERS)
    sampler = torch.utils.data.DistributedSampler(data)
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH, sampler=sampler)
    _train(model, torch.optim.SGD(model.parameters(), lr=0.01), iter(loader), rank, steps)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--side", choices=["paceline", "ddp"], required=True)
    parser.add_argument("--steps", nargs=2, type=int, required=True)
    options = parser.parse_args()
    (_ours if options.side == "paceline" else _ddp)((options.steps[0], options.steps[1]))
