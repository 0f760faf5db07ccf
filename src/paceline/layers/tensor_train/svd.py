"""TT-SVD: the cores of a matrix, to given ranks or to a relative error.

The matrix is read as a tensor with the modes (m1 n1), …, (md nd) and cut by one SVD after another. What the cuts drop
adds up in squares, and no train of these ranks is closer than by a factor of √(d − 1):

    ‖W − W_tt‖² ≤ Σ_k ε_k²,   ε_k² = Σ of the squares of the singular values that cut k dropped

For a relative error ε each cut may therefore drop (ε ‖W‖)² / (d − 1). Large matrices are cut by a randomised SVD, whose
range is widened until the error holds; its dropped part is known exactly: ‖A‖² − ‖QᵀA‖².

References: Oseledets, Tensor-train decomposition, 2011; Novikov et al., Tensorizing neural networks, 2015; Halko,
Martinsson and Tropp, Finding structure with randomness, 2011.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paceline.core.errors import ConfigError
from paceline.layers.tensor_train.shapes import Shape

_EXACT_BELOW = 1024  # of the shorter side: a full SVD takes about a second there
_OVERSAMPLED = 16
_POWERS = 3
_SEED = 20110901  # members that convert the same weights on their own get the same cores


def decompose(matrix: Tensor, shape: Shape, error: float | None = None) -> list[Tensor]:
    """Cores of the matrix, in its own type: of the shape's ranks, or with `error` of as few as it allows up to those.

    >>> from paceline.layers.tensor_train.shapes import shape_of
    >>> w = torch.arange(24.0).reshape(4, 6)
    >>> [tuple(core.shape) for core in decompose(w, shape_of(4, 6, 3))]
    [(1, 2, 3, 3), (3, 2, 2, 1)]
    >>> [tuple(core.shape) for core in decompose(w, shape_of(4, 6, 3), error=1e-5)]
    [(1, 2, 3, 2), (2, 2, 2, 1)]
    """
    if error is not None and not 0 <= error < 1:
        raise ConfigError(f"error={error!r}: a share of the norm is needed, at least 0 and below 1, such as 0.1")
    if not matrix.isfinite().all():
        raise ConfigError("the weight has values that are not finite: it cannot be decomposed")
    rest = _as_tensor(matrix, shape)
    num = len(shape.outs)
    allowed = None if error is None else error**2 * rest.square().sum().item() / (num - 1)
    cores = []
    rank = 1
    for k in range(num - 1):
        rest = rest.reshape(rank * shape.outs[k] * shape.ins[k], -1)
        left, rest = _cut(rest, shape.ranks[k + 1], allowed)
        cores.append(left.reshape(rank, shape.outs[k], shape.ins[k], -1))
        rank = left.shape[1]
    cores.append(rest.reshape(rank, shape.outs[-1], shape.ins[-1], 1))
    _balance(cores)
    return [core.to(matrix.dtype).contiguous() for core in cores]


def compose(cores: list[Tensor]) -> Tensor:
    """The matrix of a train, with the rows and columns that were added to fill its modes.

    >>> compose([torch.ones(1, 2, 3, 4), torch.ones(4, 2, 2, 1)])[0]
    tensor([4., 4., 4., 4., 4., 4.])
    """
    whole = cores[0]
    for core in cores[1:]:
        whole = join(whole, core)
    return whole.reshape(whole.shape[1:3])


def join(left: Tensor, right: Tensor) -> Tensor:
    """Two neighbouring cores as one, whose modes are the products of theirs."""
    a, m, n, r = left.shape
    _, p, q, b = right.shape
    product = left.reshape(a * m * n, r) @ right.reshape(r, p * q * b)
    return product.view(a, m, n, p, q, b).transpose(2, 3).reshape(a, m * p, n * q, b)


def _as_tensor(matrix: Tensor, shape: Shape) -> Tensor:
    work = matrix.detach().to(torch.float64 if matrix.dtype == torch.float64 else torch.float32)
    rows, columns = work.shape
    work = torch.nn.functional.pad(work, (0, shape.columns - columns, 0, shape.rows - rows))
    num = len(shape.outs)
    work = work.reshape(*shape.outs, *shape.ins)
    return work.permute([axis for k in range(num) for axis in (k, num + k)])


def _cut(matrix: Tensor, rank: int, allowed: float | None) -> tuple[Tensor, Tensor]:
    """U and Σ Vᵀ with at most `rank` columns, and with as few as drop at most `allowed` of the squares."""
    width = rank if allowed is None else min(rank, 32)
    u, s, vh, unseen = _leading(matrix, width)
    while allowed is not None and unseen > allowed and width < rank:
        width = min(rank, 2 * width)
        u, s, vh, unseen = _leading(matrix, width)
    if allowed is not None:
        tails = unseen + s.double().square().flip(0).cumsum(0).flip(0)  # what is dropped when s[k:] go
        rank = min(rank, max(1, int((tails > allowed).sum())))
    return u[:, :rank], s[:rank, None] * vh[:rank]


def _leading(matrix: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor, float]:
    """At least `width` leading singular triplets, and the squares of what is not among them."""
    shorter = min(matrix.shape)
    if shorter <= _EXACT_BELOW or 2 * (width + _OVERSAMPLED) >= shorter:
        return *torch.linalg.svd(matrix, full_matrices=False), 0.0
    generator = torch.Generator().manual_seed(_SEED)
    start = torch.randn(matrix.shape[1], width + _OVERSAMPLED, generator=generator, dtype=matrix.dtype)
    q = torch.linalg.qr(matrix @ start.to(matrix.device)).Q
    for _ in range(_POWERS):
        q = torch.linalg.qr(matrix.T @ q).Q
        q = torch.linalg.qr(matrix @ q).Q
    u, s, vh = torch.linalg.svd(q.T @ matrix, full_matrices=False)
    unseen = matrix.double().square().sum() - s.double().square().sum()
    return q @ u, s, vh, max(0.0, unseen.item())


def _balance(cores: list[Tensor]) -> None:
    """Share the scale of each bond between its two cores, so that one learning rate suits both."""
    for k in range(len(cores) - 1):
        left = cores[k].square().sum((0, 1, 2)).sqrt()
        right = cores[k + 1].square().sum((1, 2, 3)).sqrt()
        scale = (right / left).sqrt()
        scale = torch.where((scale > 0) & scale.isfinite(), scale, torch.ones_like(scale))
        cores[k] = cores[k] * scale
        cores[k + 1] = cores[k + 1] / scale[:, None, None, None]


def relative_error(matrix: Tensor, cores: list[Tensor]) -> float:
    """‖W − W_tt‖ / ‖W‖."""
    rows, columns = matrix.shape
    wide = torch.float64 if matrix.dtype == torch.float64 else torch.float32
    near = compose([core.detach().to(wide) for core in cores])[:rows, :columns]
    norm = matrix.detach().to(wide).norm().item()
    away = (near - matrix.detach()).norm().item()
    return away / norm if norm else (0.0 if math.isclose(away, 0.0) else math.inf)
