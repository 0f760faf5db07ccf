"""Low rank: a matrix of gradients travels as the product of two thin ones (PowerSGD [1]).

    M = gradient + residual                     each member's own
    P = M Q, summed over members                first round; Q is what the last step found
    P ← orthonormal columns
    Q_i = Mᵀ P on member i;  Q = Σ Q_i          second round
    gradient ← P Qᵀ;  residual ← M − P Q_iᵀ

Both rounds add, so they go around the ring. Of an a x b matrix (a + b) · rank numbers travel instead of a · b.
Parameters with one dimension, and those too small to gain, travel as they are, beside P. All members must find the same
columns and the same P Qᵀ, whatever their processors and threads: columns are made orthonormal by sums that are rounded
once (`math.fsum`), and P Qᵀ is a sum of products element by element.

[1] T. Vogels, S. P. Karimireddy, M. Jaggi: PowerSGD: Practical Low-Rank Gradient Compression, 2019.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from dataclasses import dataclass

import torch

from paceline.codecs.codec import largest_magnitude
from paceline.strategies.reducers.coder import Bucket, Coder, Piece, Watch
from paceline.transport.arena import Collective


@dataclass
class _Matrix:
    """One piece on its way."""

    piece: Piece
    m: torch.Tensor  # a x b
    q: torch.Tensor  # b x rank


class Product:
    """A bucket whose matrices travel as products."""

    def __init__(self, rank: int, coder: Coder, bucket: Bucket, feedback: bool) -> None:
        self._rank, self._coder, self._feedback = rank, coder, feedback
        self._pieces = [p for p in bucket.pieces if worth(p, rank)]
        self._plain, last = [], 0
        for start, stop in [*((p.at.start, p.at.stop) for p in self._pieces), (bucket.numel, bucket.numel)]:
            if start > last:
                self._plain.append(slice(last, start))
            last = stop
        self._bucket = dataclasses.replace(bucket, pieces=tuple(self._pieces))

    def reduce(self, flat: torch.Tensor, collective: Collective) -> None:
        coder, watch = self._coder, Watch()
        finite = self._bucket.finite(flat)
        matrices = [self._matrix(piece, flat) for piece in self._pieces] if finite else []
        thin = [x.m @ x.q for x in matrices] or [torch.full((p.rows, self._rank), torch.nan) for p in self._pieces]
        first = torch.cat([t.view(-1).to("cpu") for t in thin] + [flat[s].float().to("cpu") for s in self._plain])
        encode_s = watch.lap()
        collective.all_reduce(first)
        wire_s = watch.lap()
        sizes = [t.numel() for t in thin]
        columns = first[: sum(sizes)]
        for s, values in zip(self._plain, torch.split(first[sum(sizes) :], [s.stop - s.start for s in self._plain])):
            flat[s] = values.to(flat.device, flat.dtype)
        spoilt = not math.isfinite(largest_magnitude(columns)) if self._pieces else not self._bucket.finite(flat)
        if spoilt:
            for piece in self._pieces:
                flat[piece.at] = torch.nan
        elif self._pieces:
            ps = [
                orthonormal(p.view(x.m.shape[0], self._rank)).to(flat.device)
                for p, x in zip(torch.split(columns, sizes), matrices)
            ]
            own = [x.m.T @ p for x, p in zip(matrices, ps)]
            second = torch.cat([q.reshape(-1) for q in own]).to("cpu")
            encode_s += watch.lap()
            collective.all_reduce(second)
            wire_s += watch.lap()
            for x, p, q_own, q in zip(matrices, ps, own, torch.split(second, [q.numel() for q in own])):
                self._take(x, p, q_own, q.view(q_own.shape).to(flat.device), flat)
        coder.note(self._bucket, flat, spoilt)
        coder.cost.add(encode_s, wire_s, watch.lap())

    def _matrix(self, piece: Piece, flat: torch.Tensor) -> _Matrix:
        gradient = flat[piece.at].float()
        if self._feedback:  # where M stands already, should the rest not come to pass
            gradient = self._coder.residual(piece, 1, flat.device).add_(gradient)
        m = gradient.view(piece.rows, -1)
        q = self._coder.warm.get(piece.name)
        if q is None or q.shape != (m.shape[1], self._rank):
            q = self._random(piece, m.shape[1])
        return _Matrix(piece, m, q.to(flat.device))

    def _random(self, piece: Piece, columns: int) -> torch.Tensor:
        """The same on all members."""
        generator = torch.Generator().manual_seed(zlib.crc32(f"{piece.name}.{self._coder.passes}".encode()))
        return torch.randn(columns, self._rank, generator=generator)

    def _take(self, x: _Matrix, p: torch.Tensor, q_own: torch.Tensor, q: torch.Tensor, flat: torch.Tensor) -> None:
        if self._feedback:
            x.m.addmm_(p, q_own.T, alpha=-1)
            self._coder.later(x.piece, lambda: x.m.addmm_(p, q_own.T))
        total = p[:, :1] * q[:, 0]
        for i in range(1, self._rank):
            total += p[:, i : i + 1] * q[:, i]
        flat[x.piece.at] = total.view(-1).to(flat.dtype)
        nothing = (q == 0).all(0)  # from such a column nothing would ever come again
        if bool(nothing.any()):
            q = torch.where(nothing, self._random(x.piece, q.shape[0]).to(q.device), q)
        self._coder.warm[x.piece.name] = q


def orthonormal(p: torch.Tensor) -> torch.Tensor:
    """The columns of p made orthonormal, one after another; zeros for one that the others before it make up.

    >>> orthonormal(torch.tensor([[3.0, 1.0, 6.0], [4.0, 0.0, 8.0]]))
    tensor([[ 0.6000,  0.8000,  0.0000],
            [ 0.8000, -0.6000,  0.0000]])
    """
    columns = list(p.double().T)
    for j, column in enumerate(columns):
        before = math.sqrt(_exact_sum(column * column))
        for other in columns[:j]:
            column = column - _exact_sum(column * other) * other
        norm = math.sqrt(_exact_sum(column * column))
        columns[j] = column / norm if norm > 1e-6 * before else torch.zeros_like(column)
    return torch.stack(columns, 1).float()


def _exact_sum(values: torch.Tensor) -> float:
    return math.fsum(values.tolist())


def worth(piece: Piece, rank: int) -> bool:
    """Whether two thin matrices are at most half as large; else the piece travels as it is."""
    rows, columns = piece.rows, piece.numel // piece.rows
    return min(rows, columns) >= rank and 2 * rank * (rows + columns) <= rows * columns
