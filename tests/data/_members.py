"""Loaders of several members, drawn from side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from paceline.data import Loader


class Member:
    """One member's loader, with the loop over it."""

    def __init__(self, dataset: Any, batch_size: int, rank: int, size: int, **options: Any) -> None:
        self.loader = Loader(dataset, batch_size=batch_size, rank=rank, size=size, seed=3, **options)
        self.loader.enter_epoch(0)
        self.loop = iter(self.loader)

    def draw(self) -> list[int] | None:
        batch = next(self.loop, None)
        return None if batch is None else batch.flatten().tolist()[: self.loader.last_real]


def step(members: Sequence[Member], counted: Counter[int]) -> bool:
    """A committed step of all; False: the epoch is over."""
    drawn = [member.draw() for member in members]
    assert len({batch is None for batch in drawn}) == 1, "some loops ended before others"
    if drawn[0] is None:
        return False
    for member, batch in zip(members, drawn):
        assert len(batch or ()) <= member.loader.widths[member.loader.terms.rank]
        member.loader.mark()
        counted.update(batch or ())
    return True
