"""One large product spread over the members of a group: each holds a part of the rank in the middle.

A train is a sum over the rank of any of its bonds, so with the bond in the middle cut into as many parts as there are
members, each computes its part of every output from the same input, and one all-reduce adds the parts up:

    x Wᵀ = Σ_members x W_memberᵀ

The cores beside that bond, which with two cores are all of them, are held in parts; the others, by everyone. Backward,
the gradients of x and of the cores that everyone holds are added up in the same way, so that all of a member's
gradients are those of the whole.

All members call it with the same x, in the same order, and step with a plain optimizer: the parts are not replicas, so
`run.optimizer`, which averages gradients over the same members, must not have them. The group is anything with `rank`,
`size` and an all-reduce in place, such as `run.group`.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.core.errors import ConfigError
from paceline.layers.tensor_train import train
from paceline.layers.tensor_train.linear import TTLinear
from paceline.layers.tensor_train.order import plan
from paceline.layers.tensor_train.product import product
from paceline.layers.tensor_train.shapes import Shape


class Members(Protocol):
    """Those who share a layer."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def all_reduce(self, tensor: Tensor) -> Tensor: ...


class SpreadTTLinear(train.Train):
    """This member's part of a TTLinear that all members have at hand; afterwards the whole is needed no more.

    >>> class Alone:
    ...     rank, size = 0, 1
    ...
    ...     def all_reduce(self, tensor):
    ...         return tensor
    >>> whole = TTLinear(64, 64, rank=8)
    >>> part = SpreadTTLinear(whole, Alone())
    >>> x = torch.randn(3, 64)
    >>> torch.allclose(part(x), whole(x), atol=1e-6)
    True
    """

    def __init__(self, whole: TTLinear, group: Any) -> None:
        members: Members = group
        bond = len(whole.shape.outs) // 2  # between core bond − 1 and core bond
        rank = whole.shape.ranks[bond]
        if rank < members.size:
            raise ConfigError(f"rank {rank} cannot be cut into {members.size} parts: one of at least that is needed")
        start, end = (rank * k // members.size for k in (members.rank, members.rank + 1))
        ranks = [*whole.shape.ranks]
        ranks[bond] = end - start
        first = whole.cores[0]
        super().__init__(Shape(whole.shape.outs, whole.shape.ins, tuple(ranks)), first.device, first.dtype)
        self.in_features = whole.in_features
        self.out_features = whole.out_features
        self._group = members
        self._parted = (bond - 1, bond)
        cores = [core.detach() for core in whole.cores]
        cores[bond - 1] = cores[bond - 1][..., start:end]
        cores[bond] = cores[bond][start:end]
        train.place(self.cores, cores, trained=first.requires_grad)
        self.bias = None if whole.bias is None else nn.Parameter(whole.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, self.in_features)
        flat = F.pad(flat, (0, self.shape.columns - self.in_features))
        flat = _Given.apply(flat, self._group)  # type: ignore[no-untyped-call]
        cores = [
            core if k in self._parted else _Given.apply(core, self._group)  # type: ignore[no-untyped-call]
            for k, core in enumerate(self.cores)
        ]
        part = product(flat, cores, plan(self.shape, flat.shape[0], flat.device.type))[:, : self.out_features]
        y: Tensor = _Summed.apply(part, self._group)  # type: ignore[no-untyped-call]
        y = y if self.bias is None else y + self.bias
        return y.reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        said = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{said}, {train.words(self.shape)}, part {self._group.rank + 1} of {self._group.size}"


class _Given(torch.autograd.Function):
    """What all members have alike: itself forward, the sum of everyone's gradients backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Members) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.group.all_reduce(grad.clone(memory_format=torch.contiguous_format)), None


class _Summed(torch.autograd.Function):
    """Everyone's parts: their sum forward, the gradient of the sum, which all have alike, backward."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Members) -> Tensor:
        return group.all_reduce(part.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
