"""A shard's corrections, called piece by piece.

Each piece has a state and a learning rate of its own: that of its parameter group. A piece without a gradient is not
pushed, so it is left as it is, as torch's optimizers leave a parameter whose `grad` is None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from paceline.server.messages import Options
from paceline.server.stock import Stock
from paceline.staleness import Correction, Push


class _Span(NamedTuple):
    """A piece, as corrections know it."""

    key: str
    where: slice  # in its chunk
    group: int
    weights: torch.Tensor


class Corrected:
    """The chunks of one server, with a correction."""

    def __init__(self, stock: Stock, correction: Correction) -> None:
        self._stock = stock
        self._correction = correction
        self._spans = [[_span(stock, i, j) for j in range(len(chunk.pieces))] for i, chunk in enumerate(stock.chunks)]

    def accepts(self, worker: int, age: int, groups: Sequence[Options]) -> bool:
        """Whether a push is applied at all."""
        lr = max(map(_rate, groups), default=0.0)
        return self._correction.accepts(Push(worker=worker, age=age, lr=lr))

    def push(
        self,
        index: int,
        gradient: torch.Tensor,
        missing: frozenset[int],
        *,
        worker: int,
        age: int,
        groups: Sequence[Options],
    ) -> None:
        """Correct the gradients of a chunk, in place."""
        pushes = [Push(worker=worker, age=age, lr=_rate(options)) for options in groups]
        for i, span in enumerate(self._spans[index]):
            if i not in missing:
                self._correction.on_push(span.key, gradient[span.where], span.weights, pushes[span.group])

    def pull(self, index: int, workers: Sequence[int]) -> torch.Tensor:
        """What these workers, who read together, are sent of a chunk."""
        spans, rates = self._spans[index], self._stock.rates(index)
        if self._correction.reads:
            for worker in workers:
                sent = [self._correction.on_pull(s.key, s.weights, worker, rates[s.group]) for s in spans]
            if any(part is not span.weights for part, span in zip(sent, spans)):
                return torch.cat(sent) if len(sent) > 1 else sent[0]
        return self._stock.weights[index]


def piece_key(index: int, piece: int) -> str:
    """How corrections know a piece; not to be mistaken for a worker."""
    return f"#{index}.{piece}"


def _span(stock: Stock, index: int, number: int) -> _Span:
    piece = stock.chunks[index].pieces[number]
    where = slice(piece.at, piece.at + piece.numel)
    group = stock.placement.tensors[piece.tensor].group
    return _Span(piece_key(index, number), where, group, stock.weights[index][where])


def _rate(options: Options) -> float:
    return float(options.get("lr", 0.0))
