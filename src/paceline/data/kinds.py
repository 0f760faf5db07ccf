"""Samples bound to kinds of members: only a member with a sample's label trains it.

Such samples are dealt out in batches of one kind each (`leases`): first those that anybody may have, then those of each
label, in the order of its name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.core.errors import ConfigError, nearest
from paceline.core.labels import check

Bound = Sequence[str | None] | Callable[[int], str | None]
Parts = tuple[tuple[str, int], ...]  # labels, and how many batches are bound to each


class Batched(NamedTuple):
    """Samples cut into batches: number n is `queue[edges[n] : edges[n + 1]]`."""

    queue: Tensor
    edges: list[int]
    bound: Parts


class Kinds:
    """The label of every sample; without one, anybody may train it.

    >>> kinds = Kinds(["a", None, "a", "b", None], 5)
    >>> queue, edges, bound = kinds.cut(torch.arange(5), batch_size=2, drop_last=False)
    >>> queue.tolist(), edges, bound
    ([1, 4, 0, 2, 3], [0, 2, 4, 5], (('a', 1), ('b', 1)))
    """

    def __init__(self, bound: Bound | None, length: int) -> None:
        if bound is None:
            self.labels: tuple[str, ...] = ()
            return
        named = [bound(index) for index in range(length)] if callable(bound) else list(bound)
        if len(named) != length:
            raise ConfigError(f"bound= has {len(named)} labels for {length} samples: give one, or None, per sample")
        self.labels = tuple(sorted({check(label, "bound=") for label in set(named) if label is not None}))
        codes = {label: code for code, label in enumerate(self.labels, 1)}
        self._codes = torch.tensor([codes[label] if label is not None else 0 for label in named])

    def check(self, have: Sequence[str]) -> None:
        """Refuse a label that no member has."""
        for label in self.labels:
            if label not in have:
                known = nearest(label, have) if have else "no member has any"
                raise ConfigError(
                    f"bound=: samples are bound to {label!r}, and no member has this label ({known}): start members "
                    f"with --label {label}, or bind the samples to None"
                )

    def cut(self, order: Tensor, batch_size: int, *, drop_last: bool) -> Batched:
        """Batches of one kind each; `drop_last` leaves out the last, shorter one of each kind."""
        kept, edges, bound = [], [0], []
        for code, label in enumerate(("", *self.labels)):
            mine = order[self._codes[order] == code] if self.labels else order
            batches = len(mine) // batch_size if drop_last else -(-len(mine) // batch_size)
            kept.append(mine[: batches * batch_size])
            first = edges[-1]
            edges += [first + min(len(mine), (batch + 1) * batch_size) for batch in range(batches)]
            if label and batches:
                bound.append((label, batches))
        return Batched(torch.cat(kept), edges, tuple(bound))
