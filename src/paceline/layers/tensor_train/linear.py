"""A linear layer whose weight is a tensor train: y = x Wᵀ + b, without W.

    W[(i1 … id), (j1 … jd)] = G1[i1, j1] · G2[i2, j2] · … · Gd[id, jd],   Gk[i, j] a matrix (r_{k−1}, r_k)

Two cores are the default: for one rank they need fewer operations than more cores, and compress less.

Reference: Novikov, Podoprikhin, Osokin and Vetrov, Tensorizing neural networks, 2015.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.core.errors import ConfigError
from paceline.layers.tensor_train import train
from paceline.layers.tensor_train.order import plan
from paceline.layers.tensor_train.product import product
from paceline.layers.tensor_train.shapes import shape_of


class TTLinear(train.Train):
    """An `nn.Linear` in `num_cores` cores. Whether it is the faster one is another question: see `tensor_train.cost`.

    Args:
        in_features, out_features, bias, device, dtype: as in nn.Linear.
        rank: between the cores; one number for all, or one for each of the `num_cores − 1` bonds.
        num_cores: 2 to 6.

    >>> layer = TTLinear(4096, 4096, rank=8)
    >>> layer
    TTLinear(in_features=4096, out_features=4096, bias=True, modes=64x64 by 64x64, ranks=8)
    >>> layer(torch.randn(2, 3, 4096)).shape, sum(p.numel() for p in layer.parameters())
    (torch.Size([2, 3, 4096]), 69632)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        rank: int | Sequence[int],
        num_cores: int = 2,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(shape_of(out_features, in_features, rank, num_cores), device, dtype)
        self.in_features = in_features
        self.out_features = out_features
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    @classmethod
    def of(
        cls,
        linear: nn.Linear,
        *,
        rank: int | Sequence[int] | None = None,
        error: float | None = None,
        num_cores: int = 2,
    ) -> TTLinear:
        """A trained layer by TT-SVD, to a rank, or to ‖W − W_tt‖ ≤ error · ‖W‖ with as small ranks as it allows.

        >>> linear = nn.Linear(6, 4)
        >>> near = TTLinear.of(linear, error=0.0)
        >>> torch.allclose(near.weight, linear.weight, atol=1e-5)
        True
        """
        weight = linear.weight.detach()
        shape, cores = train.of_weight(weight, rank, error, num_cores)
        made = cls(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            rank=shape.ranks[1:-1],
            num_cores=num_cores,
            device=weight.device,
            dtype=weight.dtype,
        )
        train.place(made.cores, cores, trained=linear.weight.requires_grad)
        if linear.bias is not None and made.bias is not None:
            train.place([made.bias], [linear.bias.detach()], trained=linear.bias.requires_grad)
        return made.train(linear.training)

    def reset_parameters(self) -> None:
        """Weights with the variance of nn.Linear's, 1 / (3 in_features), and its biases."""
        bound = 1 / math.sqrt(self.in_features)
        train.fill(self.cores, self.shape, bound**2 / 3)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    @property
    def weight(self) -> Tensor:
        """W, computed anew at each access."""
        return train.weight_of(self.cores, self.out_features, self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1:] != (self.in_features,):
            raise ConfigError(f"TTLinear wants {self.in_features} features in the last place, got {tuple(x.shape)}")
        cores: list[Tensor] = [*self.cores]
        bias: Tensor | None = self.bias
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, cores, bias = x.to(dtype), [c.to(dtype) for c in cores], None if bias is None else bias.to(dtype)
        flat = x.reshape(-1, self.in_features)
        if not flat.shape[0]:
            return F.linear(x, self.weight.to(x.dtype), bias)
        if self.in_features < self.shape.columns:
            flat = F.pad(flat, (0, self.shape.columns - self.in_features))
        y = product(flat, cores, plan(self.shape, flat.shape[0], flat.device.type))[:, : self.out_features]
        y = y if bias is None else y + bias
        return y.reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        said = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{said}, {train.words(self.shape)}"
