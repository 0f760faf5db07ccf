"""What both layers share: cores as parameters, made at random with the right variance or from a trained weight."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from paceline.core.errors import ConfigError
from paceline.layers.tensor_train.shapes import Shape, shape_of
from paceline.layers.tensor_train.svd import compose, decompose


class Train(nn.Module):
    """A module with cores, which are its parameters `core0`, `core1`, …"""

    def __init__(self, shape: Shape, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.shape = shape
        self._names = tuple(f"core{k}" for k in range(len(shape.outs)))
        for name, size in zip(self._names, shape.cores):
            self.register_parameter(name, nn.Parameter(torch.empty(size, device=device, dtype=dtype)))

    @property
    def cores(self) -> list[nn.Parameter]:
        return [getattr(self, name) for name in self._names]


@torch.no_grad()
def fill(cores: Sequence[Tensor], shape: Shape, variance: float) -> None:
    """Normal entries, such that each element of the weight has this variance.

    An element is a sum over ∏ ranks of products of d entries, so Var W = ∏ ranks · (Var G)^d.
    """
    deviation = (variance / math.prod(shape.ranks)) ** (0.5 / len(shape.outs))
    for core in cores:
        core.normal_(0.0, deviation)


def of_weight(
    weight: Tensor, rank: int | Sequence[int] | None, error: float | None, num_cores: int
) -> tuple[Shape, list[Tensor]]:
    """Shape and cores of a trained weight, to a rank or to an error, or to whichever binds first."""
    if rank is None and error is None:
        raise ConfigError("say how closely: rank=8, or error=0.1 (of the weight's norm), or both")
    rows, columns = weight.shape
    shape = shape_of(rows, columns, rows * columns if rank is None else rank, num_cores)
    cores = decompose(weight, shape, error)
    return Shape(shape.outs, shape.ins, (1, *(core.shape[3] for core in cores))), cores


@torch.no_grad()
def place(own: Sequence[Tensor], found: Sequence[Tensor], *, trained: bool) -> None:
    for parameter, core in zip(own, found):
        parameter.copy_(core)
        parameter.requires_grad_(trained)


def weight_of(cores: Sequence[Tensor], rows: int, columns: int) -> Tensor:
    return compose(list(cores))[:rows, :columns]


def words(shape: Shape) -> str:
    """For `extra_repr`.

    >>> words(shape_of(4096, 1024, 8))
    'modes=64x64 by 32x32, ranks=8'
    """
    outs, ins, ranks = ("x".join(map(str, numbers)) for numbers in (shape.outs, shape.ins, shape.ranks[1:-1]))
    return f"modes={outs} by {ins}, ranks={ranks}"
