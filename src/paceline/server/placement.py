"""Placement: which server holds which part of which parameter.

Tensors are placed whole where that balances; large ones are cut. A *piece* is a range of one parameter; a *chunk* is
some pieces of one server that travel and are applied together, a few MB at most, so that receiving, applying and
sending overlap. Chunks stand in the order of the model's parameters: the first layers' weights come back first.

Everyone computes the same placement from the same list of parameters, so only its number travels: the view.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import msgspec
import torch

CHUNK_BYTES = 4 << 20
_SMALLEST_CUT = 64 << 10  # bytes: smaller pieces cost more in headers than they help the balance
_CUTS_PER_SERVER = 8


class Tensor(msgspec.Struct, frozen=True):
    """A parameter as a server sees it."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # "float32"
    group: int  # of the optimizer

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def torch_dtype(self) -> torch.dtype:
        return dtype_of(self.dtype)

    @property
    def nbytes(self) -> int:
        return self.numel * self.torch_dtype.itemsize


class Piece(msgspec.Struct, frozen=True):
    """Elements `start` to `stop` of parameter number `tensor`, at `at` in their chunk."""

    tensor: int
    start: int
    stop: int
    at: int = 0

    @property
    def numel(self) -> int:
        return self.stop - self.start


class Chunk(msgspec.Struct, frozen=True):
    """Pieces of one server and one dtype."""

    server: int
    dtype: str
    pieces: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        return self.pieces[-1].at + self.pieces[-1].numel

    @property
    def nbytes(self) -> int:
        return self.numel * dtype_of(self.dtype).itemsize


class Placement(msgspec.Struct, frozen=True):
    """The table. A higher view replaces a lower one."""

    view: int
    tensors: tuple[Tensor, ...]
    chunks: tuple[Chunk, ...]
    servers: int

    def of(self, server: int) -> list[Chunk]:
        return [chunk for chunk in self.chunks if chunk.server == server]

    def nbytes(self, server: int) -> int:
        return sum(chunk.nbytes for chunk in self.of(server))


def place(
    tensors: Sequence[Tensor], servers: int, *, cut: bool = True, chunk_bytes: int = CHUNK_BYTES, view: int = 1
) -> Placement:
    """Spread parameters over servers, balanced by bytes.

    Args:
        cut: whether a tensor may be cut. Optimizers that look at a whole tensor (Adafactor) want it whole.

    >>> table = place([Tensor("w", (3, 100_000), "float32", 0), Tensor("b", (3,), "float32", 0)], servers=2)
    >>> [table.nbytes(server) for server in range(2)]
    [600012, 600000]
    """
    total = sum(t.nbytes for t in tensors)
    limit = min(chunk_bytes, max(total // (servers * _CUTS_PER_SERVER), _SMALLEST_CUT))
    pieces = [piece for i, t in enumerate(tensors) for piece in _cut(i, t, limit if cut else max(t.nbytes, 1))]
    sizes = {piece: piece.numel * tensors[piece.tensor].torch_dtype.itemsize for piece in pieces}
    held: list[list[Piece]] = [[] for _ in range(servers)]
    load = [0] * servers
    for piece in sorted(pieces, key=lambda p: (-sizes[p], p.tensor, p.start)):
        server = load.index(min(load))
        held[server].append(piece)
        load[server] += sizes[piece]
    chunks = [chunk for server, own in enumerate(held) for chunk in _chunks(server, own, tensors, chunk_bytes)]
    chunks.sort(key=lambda c: (c.pieces[0].tensor, c.pieces[0].start))
    return Placement(view, tuple(tensors), tuple(chunks), servers)


def _cut(number: int, tensor: Tensor, limit: int) -> list[Piece]:
    if not tensor.numel:
        return []
    parts = -(-tensor.nbytes // limit)
    bounds = [tensor.numel * i // parts for i in range(parts + 1)]
    return [Piece(number, start, stop) for start, stop in itertools.pairwise(bounds)]


def _chunks(server: int, pieces: Sequence[Piece], tensors: Sequence[Tensor], limit: int) -> list[Chunk]:
    """Gather neighbours of one dtype until a chunk is full."""
    chunks: list[list[Piece]] = []
    size, dtype = limit, ""
    for piece in sorted(pieces, key=lambda p: (p.tensor, p.start)):
        tensor = tensors[piece.tensor]
        nbytes = piece.numel * tensor.torch_dtype.itemsize
        if size + nbytes > limit or tensor.dtype != dtype:
            chunks.append([])
            size, dtype = 0, tensor.dtype
        at = chunks[-1][-1].at + chunks[-1][-1].numel if chunks[-1] else 0
        chunks[-1].append(msgspec.structs.replace(piece, at=at))
        size += nbytes
    return [Chunk(server, tensors[c[0].tensor].dtype, tuple(c)) for c in chunks]


def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
