"""What the members of `bench.local` learn: characters of English by GPTs of two sizes, and Fashion-MNIST by a CNN.

The text is the file or folder BENCH_TEXT, else Debian's dict-gcide, else the sources of Python's standard library,
which are real text and everywhere; its last twentieth is held out. The images are those of `_network_accuracy`.

In the table of averages members may have unlike data (`unlike`: images in the order of their labels, a quarter for each
member), or the last one is fed noise (`noise`: labels by chance).
"""

from __future__ import annotations

import gzip
import math
import os
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench import _network_accuracy as fashion
from bench.models import Batch, character_gpt, fashion_cnn, small_cnn, wide_gpt

DEVICE = fashion.DEVICE
CONTEXT, VOCABULARY = 64, 128
HELD_OUT = 512  # sequences
_GCIDE = Path("/usr/share/dictd/gcide.dict.dz")


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model, its data, and what is measured on the data that was held out, which adds up over the members."""

    make: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module, float], torch.optim.Optimizer]
    draw: Callable[[int, int, int, int, str], Batch]  # (seed, step, rank, size, case)
    measure: Callable[[nn.Module, int, int], float]  # (model, rank, size): this member's share of the mean
    batch: int  # samples of a member
    lr: float
    steps: int
    rising: bool  # what is measured: accuracy; else loss, in nats
    whole: bool = False  # DDP's side is trained by one process with the batches of all: its gradient is the same mean
    device: str = DEVICE

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        x, y = batch
        out = model(x)
        return F.cross_entropy(out.flatten(0, -2), y.flatten())

    def share(self, done: int, total: int) -> float:
        """Of the rate: it rises over the first twentieth and falls to zero by a cosine."""
        rise = max(1, total // 20)
        return min(1.0, (done + 1) / rise) * 0.5 * (1 + math.cos(math.pi * done / total))


# ---- text


@cache
def text() -> tuple[Tensor, str]:
    """Characters as numbers, and where they are from."""
    named = os.environ.get("BENCH_TEXT", "")
    at = Path(named) if named else _GCIDE
    if named and at.is_dir():
        raw, told = b"".join(p.read_bytes() for p in sorted(at.rglob("*.txt"))), str(at)
    elif at.exists():
        raw, told = at.read_bytes(), at.name
        raw = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    elif named:
        raise SystemExit(f"bench.local: no {at}")
    else:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        raw, told = b"".join(p.read_bytes() for p in files), "the sources of Python's standard library"
    ascii = raw.decode("utf-8", "ignore").encode("ascii", "ignore")
    return torch.frombuffer(bytearray(ascii), dtype=torch.uint8), f"{told}, {len(ascii) / 1e6:.1f} MB"


def _sequences(at: Tensor) -> Batch:
    found = text()[0][at[:, None] + torch.arange(CONTEXT + 1)].long().to(DEVICE)
    return found[:, :-1], found[:, 1:]


def _draw_text(batch: int) -> Callable[[int, int, int, int, str], Batch]:
    def draw(seed: int, step: int, rank: int, size: int, case: str) -> Batch:
        generator = torch.Generator().manual_seed((seed * 100_003 + step) * size + rank)
        most = len(text()[0]) * 19 // 20 - CONTEXT - 1
        return _sequences(torch.randint(most, (batch,), generator=generator))

    return draw


@torch.no_grad()
def _text_loss(model: nn.Module, rank: int, size: int) -> float:
    length = len(text()[0])
    first = length * 19 // 20
    starts = torch.linspace(first, length - CONTEXT - 2, HELD_OUT).long()[rank::size]
    total = 0.0
    for at in starts.split(64):
        x, y = _sequences(at)
        total += float(F.cross_entropy(model(x).flatten(0, -2), y.flatten())) * len(at)
    return total / HELD_OUT


def _adamw(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=0.1)


# ---- images


def _draw_images(batch: int) -> Callable[[int, int, int, int, str], Batch]:
    def draw(seed: int, step: int, rank: int, size: int, case: str) -> Batch:
        labels = fashion._data("train")[1]
        count, together = len(labels), batch * size
        epoch, turn = divmod(step, count // together)
        if case == "unlike":
            mine = _by_label()[rank * count // size : (rank + 1) * count // size]
            order = mine[fashion._order(len(mine), 1000 * seed + epoch)]
            return fashion._batch("train", order[turn * batch : (turn + 1) * batch])
        first = turn * together + rank * batch
        x, y = fashion._batch("train", fashion._order(count, 1000 * seed + epoch)[first : first + batch])
        if case == "noise" and rank == size - 1:
            generator = torch.Generator().manual_seed(1000 * seed + step)
            y = torch.randint(10, (len(y),), generator=generator).to(y.device)
        return x, y

    return draw


@cache
def _by_label() -> Tensor:
    return fashion._data("train")[1].cpu().sort(stable=True).indices


@torch.no_grad()
def _accuracy(model: nn.Module, rank: int, size: int) -> float:
    labels = fashion._data("t10k")[1]
    found = 0
    for at in torch.arange(rank, len(labels), size).split(250):
        x, y = fashion._batch("t10k", at)
        found += int((model(x).argmax(1) == y).sum())
    return found / len(labels)


def _sgd(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


TASKS = {
    "gpt": Task(
        make=character_gpt,
        optimizer=_adamw,
        draw=_draw_text(64),
        measure=_text_loss,
        batch=64,
        lr=2e-3,
        steps=12000,
        rising=False,
    ),
    "wide": Task(  # through gloo, a step of DDP's with all these gradients on a GPU takes longer than its compute
        make=wide_gpt,
        optimizer=_adamw,
        draw=_draw_text(64),
        measure=_text_loss,
        batch=64,
        lr=1e-3,
        steps=6000,
        rising=False,
        whole=True,
    ),
    "cnn": Task(
        make=fashion_cnn,
        optimizer=_sgd,
        draw=_draw_images(32),
        measure=_accuracy,
        batch=32,
        lr=0.05,
        steps=1000,
        rising=True,
    ),
    "small": Task(  # of the averaging table
        make=small_cnn,
        optimizer=_sgd,
        draw=_draw_images(32),
        measure=_accuracy,
        batch=32,
        lr=0.05,
        steps=600,
        rising=True,
    ),
}
