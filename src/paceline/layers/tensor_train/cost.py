"""Whether a tensor train pays: what it takes on this machine against the dense layer, for a batch, a size and a rank.

Operations alone do not tell: a dense product of one row reads the weight once and computes next to nothing, one of four
rows may take twice that, and a small layer is all calls. So both sides are calibrated, once for a process, device, type
and number of threads (a second or two; with `training`, five):

- A tensor train takes `layer + (the model of order.py)`, whose five constants are fitted to a dozen layers of different
  sizes, ranks and batches by least squares of the relative error.
- A dense layer is looked up in a table of three sizes and five batches, between whose logarithms it is interpolated.

With `training` it is forward and backward; without, forward only. What a smaller layer saves beyond that (its share of
the optimizer's step and of what members exchange) is not counted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from paceline.core.errors import ConfigError
from paceline.layers.tensor_train.linear import TTLinear
from paceline.layers.tensor_train.order import Rates, plan, seconds
from paceline.layers.tensor_train.shapes import Shape, shape_of

_SIDES = (256, 1024, 4096)  # of the square layers that are timed
_BATCHES = (1, 4, 16, 64, 256)
_TRAINS = (  # side, rank, batch
    (256, 4, 1), (256, 64, 1), (256, 8, 32), (256, 32, 256),
    (1024, 8, 1), (1024, 64, 2), (1024, 4, 64), (1024, 16, 32), (1024, 32, 128),
    (4096, 16, 1), (4096, 8, 8), (4096, 64, 4), (4096, 4, 64),
)  # fmt: skip
_ROUNDS = 3
_ENOUGH_S = 0.01  # of timing one thing in a round


class Machine(NamedTuple):
    """What was measured on a device of this kind."""

    device: str
    layer_s: float
    rates: Rates
    dense_s: tuple[tuple[float, ...], ...]  # by side and batch

    def dense(self, in_features: int, out_features: int, batch: int) -> float:
        """Seconds of the dense layer."""
        sides = [math.log(side * side) for side in _SIDES]
        batches = [math.log(b) for b in _BATCHES]
        size, rows = math.log(in_features * out_features), math.log(batch)
        by_side = [_between(batches, [math.log(s) for s in times], rows) for times in self.dense_s]
        return math.exp(_between(sides, by_side, size))

    def train(self, shape: Shape, batch: int) -> float:
        """Seconds of the tensor train."""
        return self.layer_s + seconds(plan(shape, batch, self.device), batch, self.rates)


class Verdict(NamedTuple):
    """Seconds with a tensor train and with the dense weight; how many times fewer weights there are."""

    train_s: float
    dense_s: float
    smaller: float

    @property
    def pays(self) -> bool:
        return self.train_s < self.dense_s and self.smaller > 1

    def __str__(self) -> str:
        """
        >>> print(Verdict(0.0002, 0.003, 256.0))
        0.20 ms against 3.0 ms dense, 256x smaller: it pays
        >>> print(Verdict(0.09, 0.06, 8.0))
        90.0 ms against 60.0 ms dense, 8x smaller: it is slower
        """
        word = "it pays" if self.pays else "it is slower" if self.smaller > 1 else "it is not even smaller"
        return f"{_ms(self.train_s)} against {_ms(self.dense_s)} dense, {self.smaller:.3g}x smaller: {word}"


def verdict(
    in_features: int,
    out_features: int,
    *,
    rank: int | Sequence[int],
    batch: int,
    num_cores: int = 2,
    training: bool = False,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Verdict:
    """What a TTLinear of this rank would take for so many rows, and what the nn.Linear does.

    >>> verdict(4096, 4096, rank=8, batch=1).smaller, verdict(64, 64, rank=64, batch=256).pays
    (256.0, False)
    """
    if batch < 1:
        raise ConfigError(f"batch={batch}: the number of rows that the layer sees at once is needed, at least 1")
    shape = shape_of(out_features, in_features, rank, num_cores)
    machine = calibrate(device, dtype, training=training)
    smaller = in_features * out_features / shape.num_elements
    dense_s = machine.dense(in_features, out_features, batch)
    train_s = machine.train(shape, batch)
    if plan(shape, batch, machine.device).dense:  # the dense layer, and more
        train_s = max(train_s, dense_s)
    return Verdict(train_s, dense_s, smaller)


_known: dict[tuple[str, torch.dtype, int, bool], Machine] = {}


def calibrate(
    device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, *, training: bool = False
) -> Machine:
    """Measure this machine, or recall what was measured; with as many threads as torch has now."""
    device = torch.device(device)
    key = (str(device), dtype, torch.get_num_threads(), training)
    if key not in _known:
        _known[key] = _measure(device, dtype, training)
    return _known[key]


def _measure(device: torch.device, dtype: torch.dtype, training: bool) -> Machine:
    def work(layer: nn.Module, side: int, batch: int) -> _Work:
        return _Work(layer, torch.randn(batch, side, device=device, dtype=dtype).requires_grad_(training), training)

    works, rows = [], []
    for side in _SIDES:
        linear = nn.Linear(side, side, bias=False, device=device, dtype=dtype)
        works += [work(linear, side, batch) for batch in _BATCHES]
    for side, rank, batch in _TRAINS:
        layer = TTLinear(side, side, bias=False, rank=rank, device=device, dtype=dtype)
        works.append(work(layer, side, batch))
        found = plan(layer.shape, batch, device.type)
        rows.append([1.0, *(seconds(found, batch, unit) for unit in _units())])
    times = [math.inf] * len(works)
    for _ in range(_ROUNDS):  # so that what else the machine does for a while does not fall on one of them alone
        times = [min(known, _best(one, device)) for known, one in zip(times, works)]
    layer_s, *rates = _fit(rows, times[-len(rows) :])
    num = len(_BATCHES)
    dense = tuple(tuple(times[num * k : num * (k + 1)]) for k in range(len(_SIDES)))
    return Machine(device.type, layer_s, Rates(*rates), dense)


class _Work(NamedTuple):
    """One pass, or both."""

    layer: nn.Module
    x: Tensor
    training: bool

    def __call__(self) -> object:
        if not self.training:
            with torch.no_grad():
                return self.layer(self.x)
        y = self.layer(self.x)
        return torch.autograd.grad(y, [self.x, *self.layer.parameters()], y.detach())


def _best(work: _Work, device: torch.device) -> float:
    """Seconds of the quickest of several times: what else the machine does can only add to it.

    Long work never has the core to itself where others want it, and would look slower than short work. So what one
    thread computes is timed by the processor's seconds that it took.
    """
    clock = time.thread_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    best, spent = math.inf, 0.0
    while spent < _ENOUGH_S:
        _wait(device)
        began = clock()
        work()
        _wait(device)
        taken = clock() - began
        best, spent = min(best, taken), spent + taken
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _units() -> list[Rates]:
    """One constant at a time, so that the model tells how often each is met."""
    num = len(Rates._fields)
    return [Rates(*(1.0 if i == j else 0.0 for i in range(num))) for j in range(num)]


def _fit(rows: list[list[float]], times: list[float], sweeps: int = 500) -> list[float]:
    """x ≥ 0 with the least Σ ((row · x) / time − 1)², by coordinate descent.

    >>> [round(x, 3) for x in _fit([[1.0, 0.0], [1.0, 2.0], [1.0, 8.0]], [3.0, 4.0, 7.0])]
    [3.0, 0.5]
    """
    a = torch.tensor(rows, dtype=torch.float64) / torch.tensor(times, dtype=torch.float64)[:, None]
    norms = a.norm(dim=0).clamp(min=1e-300)
    a = a / norms  # constants differ by many powers of ten
    gram, target = a.T @ a, a.sum(0)
    x = torch.zeros(a.shape[1], dtype=torch.float64)
    for _ in range(sweeps):
        for j in range(len(x)):
            x[j] = max(0.0, float((target[j] - gram[j] @ x) / gram[j, j] + x[j]))
    return [float(found) for found in x / norms]


def _between(known: list[float], values: list[float], x: float) -> float:
    """Along straight lines, which go on beyond the ends.

    >>> _between([0.0, 1.0, 3.0], [0.0, 2.0, 3.0], 2.0), _between([0.0, 1.0, 3.0], [0.0, 2.0, 3.0], 5.0)
    (2.5, 4.0)
    """
    k = min(max(sum(x > at for at in known), 1), len(known) - 1)
    share = (x - known[k - 1]) / (known[k] - known[k - 1])
    return values[k - 1] + share * (values[k] - values[k - 1])


def _ms(taken: float) -> str:
    digits = 2 if taken < 1e-3 else 1 if taken < 0.1 else 0
    return f"{1e3 * taken:.{digits}f} ms"
