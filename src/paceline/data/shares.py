"""Unequal shares of a global batch: how many of its samples each member gets, and which.

The samples of a global batch stay the same in number; who computes faster gets more of them. Where batches are weighed
by their samples (`paceline.strategies.allreduce`), the step is that of the global batch, however it is shared out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

_LEAST = 1 / 4  # of an equal share
_MOST = 2  # equal shares: more may not fit into a member's memory
_PAIR = 2  # samples: layers such as batch norm refuse a batch of one


def widths_of(speeds: Sequence[float], batch_size: int) -> tuple[int, ...]:
    """Each member's samples of a global batch of `batch_size` each, in proportion to their speeds, within bounds.

    >>> widths_of([1, 1, 1, 0.5], 16)
    (19, 18, 18, 9)
    >>> widths_of([1, 1, 1, 0.01], 16)  # not below a quarter
    (20, 20, 20, 4)
    """
    total = len(speeds) * batch_size
    least = max(math.ceil(_LEAST * batch_size), min(_PAIR, batch_size))
    most = max(_MOST * batch_size, least)

    def scaled(by: float) -> list[float]:
        return [min(max(by * speed, least), most) for speed in speeds]

    low, high = 0.0, total / min(speeds)
    for _ in range(100):  # the largest scale whose shares do not add up to more than the batch
        middle = (low + high) / 2
        low, high = (middle, high) if sum(scaled(middle)) <= total else (low, middle)
    ideal = scaled(low)
    widths = [int(share) for share in ideal]
    by_rest = sorted(range(len(widths)), key=lambda rank: (widths[rank] - ideal[rank], rank))
    for rank in [r for r in by_rest if widths[r] < most][: total - sum(widths)]:
        widths[rank] += 1
    return tuple(widths)


def deal(rest: Tensor, widths: Sequence[int]) -> list[Tensor]:
    """Each global batch is the next sum(widths) samples of `rest`; the last, shorter one is cut in proportion.

    >>> [s.tolist() for s in deal(torch.arange(10), [3, 1])]
    [[0, 1, 2, 4, 5, 6, 8], [3, 7, 9]]
    """
    total = sum(widths)
    bounds = [0]
    for width in widths:
        bounds.append(bounds[-1] + width)
    full = len(rest) // total
    head, tail = rest[: full * total].view(full, total), rest[full * total :]
    cuts = [len(tail) * bound // total for bound in bounds]
    return [
        torch.cat([head[:, start:stop].reshape(-1), tail[cuts[i] : cuts[i + 1]]])
        for i, (start, stop) in enumerate(itertools.pairwise(bounds))
    ]
