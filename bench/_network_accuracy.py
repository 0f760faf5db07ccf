"""Real training of the Fashion-MNIST CNN by four members, for `bench.to_target` and `bench.network`.

SGD with momentum 0.9; the rate rises over the first twentieth of the steps and falls to zero by a cosine. Every side is
given the same trials: one run at each rate of `LEARNING_RATES` with the first seed, then the other seeds at the best.
The data is Debian's package dataset-fashion-mnist, or the same four files in the folder BENCH_DATA.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.nn import functional as F

from bench import workers
from bench._network_worker import Exchange, fashion_cnn, sgd
from bench.team import Team

FOLDER = Path(os.environ.get("BENCH_DATA", "/usr/share/datasets/fashion-mnist"))
DEVICE = os.environ.get("BENCH_DEVICE", "cpu")
LEARNING_RATES = (0.02, 0.05, 0.1)
BATCH = 32  # per member
EVERY = 50  # steps between two looks at the test set
TARGET = 0.89
NEVER = 1e9  # steps
_T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}  # Student's t, two-sided, by the number of seeds


def missing() -> str:
    """Why there is no data; "" where there is."""
    return "" if FOLDER.is_dir() else f"no {FOLDER}: apt-get install dataset-fashion-mnist"


# ---- a member's side


@cache
def _data(part: str) -> tuple[Tensor, Tensor]:
    def read(kind: str, head: int) -> Tensor:
        raw = gzip.decompress((FOLDER / f"{part}-{kind}-ubyte.gz").read_bytes())
        return torch.frombuffer(bytearray(raw[head:]), dtype=torch.uint8)

    return read("images-idx3", 16).view(-1, 1, 28, 28).to(DEVICE), read("labels-idx1", 8).long().to(DEVICE)


def _batch(part: str, at: Tensor) -> tuple[Tensor, Tensor]:
    images, labels = _data(part)
    at = at.to(DEVICE)
    return images[at].float().div_(255).sub_(0.2860).div_(0.3530), labels[at]


class Training:
    """One model in training. A batch depends on the seed, the step and the member only."""

    def __init__(self, side: dict[str, str], lr: float, seed: int, total: int) -> None:
        torch.manual_seed(seed)
        self.model = fashion_cnn().to(DEVICE)
        self.optimizer = sgd(self.model, side, lr)
        self.exchange = Exchange(self.model, self.optimizer, side)
        self.lr, self.seed, self.total, self.done = lr, seed, total, 0

    def step(self) -> None:
        warm = max(1, self.total // 20)
        share = min(1.0, (self.done + 1) / warm) * 0.5 * (1 + math.cos(math.pi * self.done / self.total))
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * share
        x, y = _batch("train", self._drawn())
        self.optimizer.zero_grad()
        F.cross_entropy(self.exchange.forward(x), y).backward()
        self.exchange.finish(self.optimizer)
        self.optimizer.step()
        self.done += 1

    def _drawn(self) -> Tensor:
        count, together = len(_data("train")[1]), BATCH * workers.SIZE
        epoch, step = divmod(self.done, count // together)
        generator = torch.Generator().manual_seed(1000 * self.seed + epoch)
        first = step * together + workers.RANK * BATCH
        return _order(count, generator.initial_seed())[first : first + BATCH]


@cache
def _order(count: int, seed: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


_training: list[Training] = []


def begin(side: dict[str, str], lr: float, seed: int, total: int) -> None:
    _training[:] = [Training(side, lr, seed, total)]


def train(steps: int) -> dict[str, Any]:
    """Go on for so many steps: their seconds, a digest of the weights, and every thousandth of them."""
    began = time.perf_counter()
    for _ in range(steps):
        _training[0].step()
    seconds = time.perf_counter() - began
    raw = torch.cat([p.detach().view(-1) for p in _training[0].model.parameters()]).cpu()
    digest = hashlib.sha256(raw.numpy().tobytes()).hexdigest()
    return {"seconds": seconds, "digest": digest, "some": raw[::1000].tolist()}


def right() -> int:
    """How many of this member's share of the test images the model gets right."""
    indices = torch.arange(workers.RANK, len(_data("t10k")[1]), workers.SIZE)
    found = 0
    with torch.no_grad():
        for at in indices.split(250):
            x, y = _batch("t10k", at)
            found += int((_training[0].model(x).argmax(1) == y).sum())
    return found


def end() -> None:
    _training.pop().exchange.close()


FUNCTIONS: dict[str, Callable[..., Any]] = {"begin": begin, "train": train, "right": right, "end": end}


# ---- the benchmark's side


class Outcome(msgspec.Struct):
    """What a side reached with the learning rate that suited it best."""

    lr: float = 0.0
    steps: list[float] = msgspec.field(default_factory=list)  # to the target, by seed; NEVER
    final: list[float] = msgspec.field(default_factory=list)  # accuracy at the end, by seed

    @property
    def to_target(self) -> float:
        return statistics.median(self.steps)


def run_side(team: Team, side: dict[str, str], *, epochs: float, num_seeds: int, lrs: Sequence[float]) -> Outcome:
    total = round(epochs * 60_000 / (BATCH * team.size))
    trials = {lr: _whole(team, side, lr, 0, total) for lr in lrs}
    lr = max(trials, key=lambda lr: trials[lr][1])
    runs = [trials[lr], *(_whole(team, side, lr, seed, total) for seed in range(1, num_seeds))]
    return Outcome(lr, [steps for steps, _ in runs], [final for _, final in runs])


def _whole(team: Team, side: dict[str, str], lr: float, seed: int, total: int) -> tuple[float, float]:
    """Steps until the test accuracy reaches the target, and the accuracy at the end."""
    team.call("begin", side=side, lr=lr, seed=seed, total=total)
    reached, accuracy, done = NEVER, 0.0, 0
    while done < total:
        steps = min(EVERY, total - done)
        team.call("train", steps=steps)
        done += steps
        if reached == NEVER or done == total:
            accuracy = sum(team.call("right")) / 10_000
        if accuracy >= TARGET:
            reached = min(reached, done)
    team.call("end")
    when = "never" if reached == NEVER else f"after {reached:.0f} steps"
    print(f"{side}, lr {lr}, seed {seed}: {TARGET:.0%} {when}, at the end {100 * accuracy:.2f} %", flush=True)
    return reached, accuracy


def to_target(team: Team, side: dict[str, str], lr: float, *, epochs: float) -> tuple[int, float]:
    """Steps until the test accuracy reaches the target, and how long they took, without the testing."""
    total = round(epochs * 60_000 / (BATCH * team.size))
    team.call("begin", side=side, lr=lr, seed=0, total=total)
    done, seconds, accuracy = 0, 0.0, 0.0
    while done < total and accuracy < TARGET:
        steps = min(EVERY, total - done)
        seconds += max(answer["seconds"] for answer in team.call("train", steps=steps))
        done += steps
        accuracy = sum(team.call("right")) / 10_000
    team.call("end")
    return done, seconds if accuracy >= TARGET else math.inf


def compare_weights(here: Team, there: Team, side: dict[str, str], steps: int = 3) -> str:
    """Whether a few real steps lead all members of two teams to the same weights, in words."""
    answers = []
    for team in here, there:
        team.call("begin", side=side, lr=0.05, seed=0, total=1000)
        answers += team.call("train", steps=steps)
        team.call("end")
    if len({answer["digest"] for answer in answers}) == 1:
        return "the same bits"
    apart = max(abs(a - b) for answer in answers for a, b in zip(answer["some"], answers[0]["some"]))
    return f"not the same bits, of every thousandth weight the farthest apart by {apart:.1g}"


def gap(plain: Outcome, ours: Outcome) -> tuple[float, float]:
    """Points of accuracy that ours is behind, seed by seed: the mean, and half of its interval of 95 %."""
    differences = [100 * (a - b) for a, b in zip(plain.final, ours.final)]
    if len(differences) < 2:
        return differences[0], math.inf
    half = _T_95.get(len(differences), 2.6) * statistics.stdev(differences) / math.sqrt(len(differences))
    return statistics.mean(differences), half
