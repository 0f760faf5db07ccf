"""A push that is under way at a shard, and the mean of several."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from paceline.server.messages import Push


class Under:
    """A push that is under way, or waits for its round."""

    def __init__(self, push: Push, age: int, reason: str) -> None:
        self.push = push
        self.age = age
        self.reason = reason  # why it is dropped; "": it is applied
        self.parts = 0  # that have come
        self.kept: dict[int, tuple[torch.Tensor, frozenset[int]]] = {}  # by chunk, in sync
        self.whole = False


def finite(gradient: torch.Tensor) -> bool:
    """One pass where all is well; a sum may be infinite although no part is."""
    return math.isfinite(gradient.sum().item()) or bool(torch.isfinite(gradient).all())


def mean_of(
    index: int, pushes: Sequence[Under], room: Callable[[], torch.Tensor]
) -> tuple[torch.Tensor, frozenset[int]] | None:
    """The mean of a chunk over the samples of these pushes, added up in their order, and which pieces none of them has;
    None where they weigh nothing. They keep the chunk no more. `room`: for a mean of several."""
    total = sum(under.push.weight for under in pushes)
    parts = [under.kept.pop(index) for under in pushes]
    if not total:
        return None
    mean = parts[0][0]
    if len(parts) > 1:
        mean = torch.mul(mean, pushes[0].push.weight / total, out=room())
        for under, (gradient, _) in zip(pushes[1:], parts[1:]):
            mean.add_(gradient, alpha=under.push.weight / total)
    return mean, frozenset.intersection(*(missing for _, missing in parts))
