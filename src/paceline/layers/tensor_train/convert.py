"""Replace the trained layers of a model by tensor trains, where it pays, and say what was done and why.

    found = to_tensor_train(model, rank=8, batch=32)
    print(found)
    # ... fine-tune: what the SVD dropped is mostly won back in a few epochs

Layers that would lose are left as they are; where all would, nothing is done and an error says so.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from paceline.core.errors import ConfigError, nearest
from paceline.layers.tensor_train.cost import Verdict, verdict
from paceline.layers.tensor_train.embedding import TTEmbedding
from paceline.layers.tensor_train.linear import TTLinear
from paceline.layers.tensor_train.shapes import shape_of
from paceline.layers.tensor_train.svd import relative_error

GAINS = ("time", "size")


class Layer(NamedTuple):
    """One line of the table."""

    name: str
    size: str  # such as 512x784
    ranks: tuple[int, ...]  # () where nothing was computed
    error: float  # ‖W − W_tt‖ / ‖W‖
    replaced: bool
    why: str


class Conversion(NamedTuple):
    """What became of every linear layer and embedding of a model."""

    layers: tuple[Layer, ...]
    parameters_before: int
    parameters_after: int

    @property
    def smaller(self) -> float:
        """How many times fewer parameters the model has."""
        return self.parameters_before / self.parameters_after

    def __str__(self) -> str:
        rows = [("layer", "size", "ranks", "error", "", "why")]
        for layer in self.layers:
            ranks = ",".join(map(str, layer.ranks)) or "-"
            error = f"{layer.error:.3f}" if layer.ranks else "-"
            rows.append((layer.name, layer.size, ranks, error, "replaced" if layer.replaced else "kept", layer.why))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        return "\n".join([*lines, f"{self.parameters_before} parameters → {self.parameters_after}"])


def to_tensor_train(
    model: nn.Module,
    *,
    rank: int | None = None,
    error: float | None = None,
    batch: int | None = None,
    only: str | Sequence[str] = "*",
    gain: str = "time",
    training: bool = False,
    num_cores: int = 2,
) -> Conversion:
    """Replace layers of the model, in place, by tensor trains from their weights (TT-SVD).

    Make the optimizer afterwards: the parameters are other ones.

    Args:
        rank: of all bonds, at most.
        error: ‖W − W_tt‖ / ‖W‖, at most, with as small ranks as it allows; one of both is needed.
        batch: rows that a layer sees at once (samples, or samples times tokens); needed for `gain="time"`.
        only: names of layers, or patterns of them such as `"encoder.*"`.
        gain: `"time"` replaces a layer only where it becomes faster as well as smaller; `"size"` wherever smaller.
        training: whether time is that of forward and backward, or of forward alone.
        num_cores: of each train.

    Raises:
        ConfigError: nothing can be gained; the model is as it was.

    >>> model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    >>> found = to_tensor_train(model, rank=4, gain="size")
    >>> [(layer.name, layer.size, layer.ranks, layer.replaced) for layer in found.layers]
    [('0', '256x64', (4,), True), ('2', '10x256', (4,), True)]
    """
    if gain not in GAINS:
        raise ConfigError(f"gain={gain!r}: {nearest(gain, GAINS)}")
    if rank is None and error is None:
        raise ConfigError("say how closely: rank=8, or error=0.1 (of each weight's norm), or both")
    if gain == "time" and batch is None:
        raise ConfigError('batch= is needed, since it decides what is faster; where only size counts, say gain="size"')
    patterns = [only] if isinstance(only, str) else list(only)
    names = {name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Embedding)}
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ConfigError(f"only={pattern!r} matches no linear layer and no embedding: {nearest(pattern, names)}")
    before = _count(model)
    layers, new = [], {}
    for name, module in model.named_modules():
        if name in names and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            trial = _Trial(rank, error, num_cores, batch if gain == "time" else None, training)
            layer, made = trial.of(name, module, _why_not(model, name, module))
            layers.append(layer)
            if made is not None:
                new[name] = made
    if not new:
        table = Conversion(tuple(layers), before, before)
        raise ConfigError(f"no layer gains from a tensor train, so none was replaced:\n{table}")
    for name, made in new.items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, made)
    return Conversion(tuple(layers), before, _count(model))


class _Trial(NamedTuple):
    rank: int | None
    error: float | None
    num_cores: int
    batch: int | None  # None: time does not count
    training: bool

    def of(self, name: str, module: nn.Module, why_not: str) -> tuple[Layer, TTLinear | TTEmbedding | None]:
        assert isinstance(module, nn.Linear | nn.Embedding)
        rows, columns = module.weight.shape
        size = f"{rows}x{columns}"
        why_not = why_not or self._beforehand(module, rows, columns)
        if why_not:
            return Layer(name, size, (), 0.0, False, why_not), None
        options = {"rank": self.rank, "error": self.error, "num_cores": self.num_cores}
        made = TTLinear.of(module, **options) if isinstance(module, nn.Linear) else TTEmbedding.of(module, **options)  # type: ignore[arg-type]
        ranks = made.shape.ranks[1:-1]
        away = relative_error(module.weight, [*made.cores])
        smaller = rows * columns / made.shape.num_elements
        pays, why = smaller > 1, f"{smaller:.3g}x smaller" if smaller > 1 else "it would not be smaller"
        if pays and self.batch is not None:
            told = self._verdict(module, ranks)
            pays, why = told.pays, f"batch {self.batch}: {told}"
        return Layer(name, size, ranks, away, pays, why), made if pays else None

    def _beforehand(self, module: nn.Module, rows: int, columns: int) -> str:
        """Why not, where that is known without an SVD."""
        if isinstance(module, nn.Embedding) and self.batch is not None:
            return 'a lookup copies a row, which nothing beats; gain="size" replaces it'
        if self.rank is None or self.error is not None:
            return ""
        shape = shape_of(rows, columns, self.rank, self.num_cores)
        if shape.num_elements >= rows * columns:
            return f"at rank {self.rank} it would not be smaller"
        if self.batch is not None and not (told := self._verdict(module, shape.ranks[1:-1])).pays:
            return f"batch {self.batch}, rank {self.rank}: {told}"
        return ""

    def _verdict(self, module: nn.Module, ranks: tuple[int, ...]) -> Verdict:
        assert isinstance(module, nn.Linear)
        assert self.batch is not None
        return verdict(
            module.in_features,
            module.out_features,
            rank=ranks,
            batch=self.batch,
            num_cores=self.num_cores,
            training=self.training,
            device=module.weight.device,
            dtype=module.weight.dtype,
        )


def _why_not(model: nn.Module, name: str, module: nn.Module) -> str:
    """Why this layer cannot be replaced at all; "" where it can."""
    if not name:
        return "it is the model itself: use TTLinear.of or TTEmbedding.of"
    if type(module) not in (nn.Linear, nn.Embedding):
        return f"{type(module).__name__} is more than a plain layer"
    if "weight" not in module._parameters:
        return "its weight is computed from something else"
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
        return "it has hooks, which would be lost"
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.scale_grad_by_freq or module.sparse):
        return "max_norm, scale_grad_by_freq and sparse need a table"
    owners = [n for n, m in model.named_modules(remove_duplicate=False) if m._parameters.get("weight") is module.weight]
    if len(owners) > 1:
        return f"it shares its weight with {next(n for n in owners if n != name)}"
    return ""


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
