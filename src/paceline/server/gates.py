"""Gates: how far workers may be apart. The one difference between sync, bounded staleness and async.

A worker's clock is the number of steps that it has pushed. A gate compares it with the slowest clock among the workers
that are here, and decides whether the worker may have the weights for its next step.
"""

from __future__ import annotations

import math
from typing import Protocol

from paceline.core.errors import ConfigError
from paceline.core.words import build, whole


class Gate(Protocol):
    """How far a worker may be ahead of the slowest."""

    @property
    def words(self) -> str: ...
    @property
    def lead(self) -> float:
        """Steps that a worker's clock may be ahead."""


class Together:
    """Sync: everyone's gradients of a round are summed, and all go on from the same weights.

    Args:
        backups: so many of the slowest workers are not waited for; their gradients of that round are dropped.
    """

    lead = 0.0

    def __init__(self, backups: int = 0) -> None:
        if not whole(backups) or backups < 0:
            raise ConfigError(f"sync(backups={backups!r}): a whole number of workers is needed, 0 or more, such as 1")
        self.backups = backups

    @property
    def words(self) -> str:
        return f"sync(backups={self.backups})"


class Within:
    """Bounded staleness: no worker is more than `staleness` steps ahead of the slowest (Ho et al., 2013)."""

    def __init__(self, staleness: int) -> None:
        if not whole(staleness) or staleness < 0:
            raise ConfigError(
                f"bounded(staleness={staleness!r}): a whole number of steps is needed, 0 or more, such as 4"
            )
        self.staleness = staleness
        self.lead = float(staleness)

    @property
    def words(self) -> str:
        return f"bounded(staleness={self.staleness})"


class Apart:
    """Async: nobody waits for anybody."""

    lead = math.inf
    words = "async"


def make_gate(words: str) -> Gate:
    """The gate that `words` name.

    >>> make_gate("bounded(staleness=3)").lead
    3.0
    """
    gate: Gate = build(words, {"sync": Together, "bounded": Within, "async": Apart}, "gate")
    return gate
