"""Transfer on Fashion-MNIST: a CNN that knows five kinds of clothes learns the other five from few labels.

  transfer_WAY_N     test accuracy in percent with N labels a class, in the mean of the seeds; peer: from scratch
                     extraction   frozen up to the cut that `suggest` finds with these labels, trained above it
                     tuning       everything trained, rates halved from layer to layer downwards
                     sharing      everything trained, together with the first five kinds: one body, two heads
                     lora         adapters of rank 8 on the hidden linear layer, and the head; convolutions stay frozen
  cached_speedup     time of an epoch above the cut with the frozen part computed anew / with its features from disk

One thread. Kinds 0 to 4 (all 30,000 training images) come first, 5 to 9 are learnt from N labels a class. Other
training images, 40 a class, choose the rate; the test is all 5,000 test images of these kinds. Every way, scratch too,
is given the same steps with the same number of new samples and the same rates, of which the one that is best on the 40
is taken, for each seed and N by itself. Sharing sees as many images of the first kinds in each step besides.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from bench import _network_accuracy as fashion
from bench.harness import Figure, Report, arguments, compare, interleave
from paceline import transfer

LABELS = (5, 20, 100)
RATES = (1e-3, 5e-3, 2e-2)
BATCH = 32
HELD = 40  # a class, to choose the rate by
WAYS = ("scratch", "extraction", "tuning", "sharing", "lora")
OLD, NEW = range(5), range(5, 10)


class Part(NamedTuple):
    x: Tensor
    y: Tensor


class Task(NamedTuple):
    train: Part  # in an order that goes through the classes in turns
    held: Part
    test: Part


class Before(NamedTuple):
    """What is there before the new kinds come."""

    model: nn.Sequential
    train: Part  # of the old kinds


def main() -> None:
    options = arguments(__doc__)
    if why := fashion.missing():
        raise SystemExit(why)
    torch.set_num_threads(1)
    report = Report("bench.transfer")
    seeds = 1 if options.quick else 3
    steps = 10 if options.quick else 80
    found: dict[tuple[str, int], list[float]] = {}
    cuts: list[tuple[str, ...]] = []
    old, new = _task(OLD, 0, most=6000, held=0), _task(NEW, 0, most=max(LABELS), held=HELD)
    for seed in range(seeds):
        before = _before(old, seed, 20 if options.quick else 300)
        new = _task(NEW, seed, most=max(LABELS), held=HELD)
        for num in LABELS:
            few = Part(new.train.x[: 5 * num], new.train.y[: 5 * num])
            cuts.append(transfer.suggest(before.model, TensorDataset(*few)).freeze)
            for way in WAYS:
                found.setdefault((way, num), []).append(_outcome(way, before, new, few, cuts[-1], steps, seed))
            told = ", ".join(f"{way} {found[way, num][-1]:.1f} %" for way in WAYS)
            print(f"seed {seed}, {num} labels a class, cut at {cuts[-1][-1]}: {told}", flush=True)
    for num in LABELS:
        scratch = statistics.mean(found["scratch", num])
        for way in WAYS[1:]:
            mine = found[way, num]
            mean, spread = statistics.mean(mine), f"{min(mine):.1f} .. {max(mine):.1f}"
            told = {"ours": f"{mean:.1f} %", "peer": f"{scratch:.1f} %", "spread": spread}
            report.add(Figure(name=f"transfer_{way}_{num}", value=mean, **told))
        report.extra[f"transfer_scratch_{num}"] = scratch
        alone = found["scratch", num]
        report.note(f"from scratch with {num} labels a class: {scratch:.1f} %, {min(alone):.1f} .. {max(alone):.1f}")
    report.add(_cached(before, new.train, repeats=3 if options.quick else 9))
    report.note("transfer_…: the ratio's column has the accuracy itself, and the spread is that of the seeds")
    report.finish(options.json)


# ---- data and model


def _task(classes: range, seed: int, *, most: int, held: int) -> Task:
    generator = torch.Generator().manual_seed(seed)
    x, y = fashion._data("train")
    rows = []
    for one in classes:
        at = (y.cpu() == one).nonzero().flatten()
        rows.append(at[torch.randperm(len(at), generator=generator)])
    parts = [
        Part(_images(x[at]), y[at].long() - classes.start)
        for at in (
            torch.stack([at[:most] for at in rows], 1).flatten(),
            torch.cat([at[most : most + held] for at in rows]),
        )
    ]
    x, y = fashion._data("t10k")
    mine = ((y >= classes.start) & (y < classes.stop)).nonzero().flatten()
    return Task(*parts, Part(_images(x[mine]), y[mine].long() - classes.start))


def _images(raw: Tensor) -> Tensor:
    return (raw.view(-1, 1, 28, 28).float() - 73.0) / 90.0 if raw.dtype == torch.uint8 else raw.view(-1, 1, 28, 28)


def _model(classes: int = 5) -> nn.Sequential:
    low = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
    high = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
    hidden = nn.Sequential(nn.Flatten(), nn.Linear(16 * 7 * 7, 64), nn.ReLU())
    return nn.Sequential(low, high, hidden, nn.Linear(64, classes))


def _before(old: Task, seed: int, steps: int) -> Before:
    torch.manual_seed(seed)
    model = _model()
    _train(model, torch.optim.Adam(model.parameters(), lr=3e-3), _batches(old.train), steps)
    print(f"seed {seed}: knows the first five kinds with {_accuracy(model, old.test):.1f} %", flush=True)
    return Before(model, old.train)


# ---- the ways


def _outcome(way: str, before: Before, new: Task, few: Part, cut: tuple[str, ...], steps: int, seed: int) -> float:
    tried = []
    for lr in RATES:
        torch.manual_seed(100 + seed)
        model = _model() if way == "scratch" else copy.deepcopy(before.model)
        if way == "sharing":
            _share(model, before, few, lr, steps)
        else:
            _train(model, torch.optim.Adam(_groups(way, model, cut, lr)), _batches(few), steps)
        tried.append((_accuracy(model, new.held), model))
    return _accuracy(max(tried, key=lambda both: both[0])[1], new.test)


def _groups(way: str, model: nn.Sequential, cut: tuple[str, ...], lr: float) -> list[dict[str, object]]:
    if way != "scratch":
        transfer.head(model, classes=5)
    if way == "extraction":
        transfer.freeze(model, *cut)
    if way == "lora":
        transfer.lora(model, "2.1", rank=8)
        transfer.unfreeze(model, "3")
    return transfer.groups(model, lr=lr, decay=0.5 if way == "tuning" else 1.0)


def _share(model: nn.Sequential, before: Before, few: Part, lr: float, steps: int) -> None:
    """Both tasks together; what is left in `model` is the body with the new head."""
    source = copy.deepcopy(model)
    transfer.head(model, classes=5)
    transfer.share(source, model, "0", "1", "2")
    both = nn.ModuleDict({"old": source, "new": model})
    optimizer = torch.optim.Adam(both.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    both.train()
    for _, (x, y), (u, v) in zip(range(steps), _batches(few), _batches(before.train)):
        optimizer.zero_grad()
        ((F.cross_entropy(model(x), y) + F.cross_entropy(source(u), v)) / 2).backward()
        optimizer.step()
        schedule.step()


def _batches(part: Part) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        at = torch.randint(len(part.y), (BATCH,))
        yield part.x[at], part.y[at]


def _train(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[tuple[Tensor, Tensor]], steps: int
) -> None:
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model.train()
    for _, (x, y) in zip(range(steps), batches):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        schedule.step()


def _accuracy(model: nn.Module, part: Part) -> float:
    model.eval()
    with torch.no_grad():
        right = [model(x).argmax(1) == y for x, y in zip(part.x.split(500), part.y.split(500))]
    return 100 * float(torch.cat(right).double().mean())


# ---- features


def _cached(before: Before, part: Part, *, repeats: int) -> Figure:
    """Both sides read a dataset through torch's loader."""
    model = copy.deepcopy(before.model)
    transfer.head(model, classes=5)
    transfer.freeze(model, "0", "1")
    model.train()
    _, top = transfer.cut(model, "1")
    data = TensorDataset(*part)
    with tempfile.TemporaryDirectory() as directory:
        kept = transfer.features(model, "1", data, directory)
        sides = {"cached": _epochs(top, kept), "anew": _epochs(model, data)}
        times = interleave(sides, repeats=repeats, block_s=0.3, limit_s=30)
    return compare("cached_speedup", times["cached"], times["anew"])


def _epochs(model: nn.Module, data: Dataset[tuple[Tensor, ...]]) -> Callable[[int], float]:
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)

    def block(num: int) -> float:
        began = time.perf_counter()
        for _ in range(num):
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        return time.perf_counter() - began

    return block


if __name__ == "__main__":
    main()
