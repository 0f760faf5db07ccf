"""Transfer on digits: a CNN that knows 0 to 4 learns 5 to 9 from few labels, in four ways.

  transfer_WAY_N     test accuracy in percent with N labels a class, in the mean of the seeds; peer: from scratch
                     extraction   all but the head frozen
                     tuning       everything trained, rates halved from layer to layer downwards
                     lora         adapters of rank 8 on the hidden linear layer, and the head; convolutions stay frozen
  cached_speedup     time of an epoch of the head with the frozen part computed anew / with its features from disk

One thread. scikit-learn's digits: of 5 to 9, up to 100 a class are trained on, 30 a class choose the rate, the others
(about 49 a class) are the test. Every way, scratch too, is given the same steps and the same rates, of which the one
that is best on the 30 is taken, for each seed and N by itself.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from bench.harness import Figure, Report, arguments, compare, interleave
from paceline import transfer

LABELS = (5, 20, 100)
RATES = (1e-3, 3e-3, 1e-2)
BATCH = 32
HELD = 30  # a class, to choose the rate by
WAYS = ("scratch", "extraction", "tuning", "lora")


class Part(NamedTuple):
    x: Tensor
    y: Tensor


class Task(NamedTuple):
    train: Part  # in an order that goes through the classes in turns
    held: Part
    test: Part


def main() -> None:
    options = arguments(__doc__)
    torch.set_num_threads(1)
    report = Report("bench.transfer")
    seeds = 1 if options.quick else 3
    steps = 60 if options.quick else 150
    found: dict[tuple[str, int], list[float]] = {}
    base = nn.Sequential()
    for seed in range(seeds):
        base = _base(seed, steps)
        task = _task(range(5, 10), seed)
        for num in LABELS:
            for way in WAYS:
                found.setdefault((way, num), []).append(_outcome(way, base, task, num, steps, seed))
            told = ", ".join(f"{way} {found[way, num][-1]:.1f} %" for way in WAYS)
            print(f"seed {seed}, {num} labels a class: {told}", flush=True)
    for num in LABELS:
        scratch = statistics.mean(found["scratch", num])
        for way in WAYS[1:]:
            mine = found[way, num]
            mean, spread = statistics.mean(mine), f"{min(mine):.1f} .. {max(mine):.1f}"
            told = {"ours": f"{mean:.1f} %", "peer": f"{scratch:.1f} %", "spread": spread}
            report.add(Figure(name=f"transfer_{way}_{num}", value=mean, **told))
        report.extra[f"transfer_scratch_{num}"] = scratch
    report.add(_cached(base, _task(range(5, 10), 0).train, repeats=3 if options.quick else 9))
    report.note("transfer_…: the ratio's column has the accuracy itself, and the spread is that of the seeds")
    report.finish(options.json)


# ---- data and model


def _task(classes: range, seed: int) -> Task:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 8 - 1, dtype=torch.float32).reshape(-1, 1, 8, 8), torch.tensor(labels)
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for one in classes:
        at = (y == one).nonzero().flatten()
        rows.append(at[torch.randperm(len(at), generator=generator)])
    y = y - classes.start
    most = max(LABELS)
    parts = [
        torch.stack([at[:most] for at in rows], 1).flatten(),
        torch.cat([at[most : most + HELD] for at in rows]),
        torch.cat([at[most + HELD :] for at in rows]),
    ]
    return Task(*(Part(x[at], y[at]) for at in parts))


def _model(classes: int = 5) -> nn.Sequential:
    convolutions = [nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1)]
    trunk = nn.Sequential(*convolutions, nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    return nn.Sequential(trunk, nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, classes))


def _base(seed: int, steps: int) -> nn.Sequential:
    torch.manual_seed(seed)
    model = _model()
    task = _task(range(5), seed)
    _train(model, torch.optim.Adam(model.parameters(), lr=3e-3), task.train, 2 * steps)
    print(f"seed {seed}: knows 0 to 4 with {_accuracy(model, task.test):.1f} %", flush=True)
    return model


# ---- the ways


def _outcome(way: str, base: nn.Sequential, task: Task, num: int, steps: int, seed: int) -> float:
    few = Part(task.train.x[: 5 * num], task.train.y[: 5 * num])
    tried = []
    for lr in RATES:
        torch.manual_seed(100 + seed)
        model = _model() if way == "scratch" else copy.deepcopy(base)
        _train(model, torch.optim.Adam(_groups(way, model, lr)), few, steps)
        tried.append((_accuracy(model, task.held), _accuracy(model, task.test)))
    return max(tried, key=lambda both: both[0])[1]


def _groups(way: str, model: nn.Sequential, lr: float) -> list[dict[str, object]]:
    if way != "scratch":
        transfer.head(model, classes=5)
    if way == "extraction":
        transfer.freeze(model, "0", "1")
    if way == "lora":
        transfer.lora(model, "1", rank=8)
        transfer.unfreeze(model, "3")
    return transfer.groups(model, lr=lr, decay=0.5 if way == "tuning" else 1.0)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, part: Part, steps: int) -> None:
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model.train()
    for _ in range(steps):
        at = torch.randint(len(part.y), (BATCH,))
        optimizer.zero_grad()
        F.cross_entropy(model(part.x[at]), part.y[at]).backward()
        optimizer.step()
        schedule.step()


def _accuracy(model: nn.Module, part: Part) -> float:
    with torch.no_grad():
        return 100 * float((model.eval()(part.x).argmax(1) == part.y).double().mean())


# ---- features


def _cached(base: nn.Sequential, part: Part, *, repeats: int) -> Figure:
    model = copy.deepcopy(base)
    transfer.head(model, classes=5)
    transfer.freeze(model, "0", "1")
    model.train()
    _, top = transfer.cut(model, "2")
    with tempfile.TemporaryDirectory() as directory:
        kept = transfer.features(model, "2", TensorDataset(part.x, part.y), directory)
        sides = {
            "cached": _epochs(top, Part(kept.columns[0], kept.columns[1])),
            "anew": _epochs(model, part),
        }
        times = interleave(sides, repeats=repeats, block_s=0.3, limit_s=30)
    return compare("cached_speedup", times["cached"], times["anew"])


def _epochs(model: nn.Module, part: Part) -> Callable[[int], float]:
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3)

    def block(num: int) -> float:
        began = time.perf_counter()
        for _ in range(num):
            for at in torch.randperm(len(part.y)).split(BATCH):
                optimizer.zero_grad()
                F.cross_entropy(model(part.x[at]), part.y[at]).backward()
                optimizer.step()
        return time.perf_counter() - began

    return block


if __name__ == "__main__":
    main()
