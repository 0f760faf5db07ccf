"""A push that is under way at a shard."""

from __future__ import annotations

import math

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
