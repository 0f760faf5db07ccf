"""When members that train apart come together: after how many steps, and what of it happens while they train on.

    every     100          always so many steps
              50..400      a tenth more after each round, up to the second number
              drift(0.01)  as many as let members get about so far apart: their distance from their mean, divided by
                           the norm of the weights
    overlap   5            what is sent is mixed in so many steps later, a part of the model at a time

With overlap a model is cut into fragments. With H steps and F fragments, fragment f is sent (f+1)·H/F steps into the
round and mixed in `steps` later, when it is waited for if it is not there: the same step on all members, so that a run
does not depend on the network's moods. So `steps` is at most H/F, and one fragment is under way at a time.

Reference: Douillard and others, Streaming DiLoCo with overlapping communication, 2025.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from paceline.core.errors import ConfigError
from paceline.core.words import build, finite, whole


class Every(Protocol):
    """How many steps a round has."""

    @property
    def words(self) -> int | str:
        """How a user writes it."""

    @property
    def least(self) -> int:
        """The fewest; the first round has so many."""

    def next(self, steps: int, drift: float) -> int:
        """Of the round after one that had so many, in which members came so far apart."""


@dataclass(frozen=True)
class Fixed:
    """Always so many."""

    least: int

    @property
    def words(self) -> int:
        return self.least

    def next(self, steps: int, drift: float) -> int:
        return self.least


@dataclass(frozen=True)
class Growing:
    """A tenth more after each round: weights that move less and less drift apart more slowly.

    >>> Growing(50, 400).next(50, 0.0), Growing(50, 400).next(390, 0.0)
    (55, 400)
    """

    least: int
    most: int

    @property
    def words(self) -> str:
        return f"{self.least}..{self.most}"

    def next(self, steps: int, drift: float) -> int:
        return min(self.most, steps + max(1, steps // 10))


@dataclass(frozen=True)
class Drift:
    """As many as let members come about `target` apart; at most twice as many as before, and at least half.

    >>> Drift(0.01).next(100, 0.02), Drift(0.01).next(100, 0.0)
    (50, 200)
    """

    target: float = 0.01
    least: int = 10
    most: int = 1000

    def __post_init__(self) -> None:
        if not finite(self.target) or not self.target > 0:
            raise ConfigError(f"drift(target={self.target!r}): must be more than 0, such as 0.01")
        _check_range(self.least, self.most, self.words)

    @property
    def words(self) -> str:
        return f"drift(target={self.target}, least={self.least}, most={self.most})"

    def next(self, steps: int, drift: float) -> int:
        times = min(max(self.target / drift, 0.5), 2.0) if drift > 0 else 2.0
        return min(max(round(steps * times), self.least), self.most)


_SCHEDULES: dict[str, Callable[..., Every]] = {"drift": Drift}
_RANGE = re.compile(r"\s*(\d+)\s*\.\.\s*(\d+)\s*")


def make_every(words: Every | int | str) -> Every:
    """The schedule that a user wrote as an object, a number or in words.

    >>> make_every(50), make_every("50..400")
    (Fixed(least=50), Growing(least=50, most=400))
    """
    if isinstance(words, str) and (found := _RANGE.fullmatch(words)):
        least, most = map(int, found.groups())
        _check_range(least, most, f"every={words}")
        return Growing(least, most)
    if isinstance(words, str) and not words.strip().isdecimal():
        return build(words, _SCHEDULES, "schedule")
    if isinstance(words, str):
        words = int(words)
    if whole(words) and words >= 1:  # type: ignore[operator]
        return Fixed(words)  # type: ignore[arg-type]
    if isinstance(words, type) or not hasattr(words, "next"):
        raise ConfigError(f"every={words!r}: a whole number of steps is needed, such as 100, or words such as 50..400")
    return words  # type: ignore[return-value]


def _check_range(least: object, most: object, words: str) -> None:
    if not (whole(least) and whole(most) and 1 <= least <= most):  # type: ignore[operator]
        raise ConfigError(f"{words}: from at least 1 step up to no fewer, such as 50..400")


@dataclass(frozen=True)
class Overlap:
    """How much of an exchange goes on while members train.

    Args:
        steps: after so many, what was sent is mixed in; 0: at once, when all wait for it.
        fragments: parts of the model that are sent one after the other.
        merge: the share of the new weights in what a member goes on with, beside what it has learnt meanwhile.
    """

    steps: int = 0
    fragments: int = 4
    merge: float = 0.5

    def __post_init__(self) -> None:
        if not whole(self.steps) or self.steps < 0:
            raise ConfigError(f"overlap={self.steps!r}: a whole number of steps is needed, such as 5, or 0")
        if not whole(self.fragments) or not 1 <= self.fragments <= 1000:
            raise ConfigError(f"overlap(fragments={self.fragments!r}): a whole number from 1 to 1000 is needed")
        if not finite(self.merge) or not 0 < self.merge <= 1:
            raise ConfigError(f"overlap(merge={self.merge!r}): more than 0 and at most 1")

    @property
    def words(self) -> int | str:
        if (self.fragments, self.merge) == (4, 0.5):
            return self.steps
        return f"overlap(steps={self.steps}, fragments={self.fragments}, merge={self.merge})"

    @property
    def cuts(self) -> int:
        """Fragments that there really are."""
        return self.fragments if self.steps else 1

    def check(self, every: Every) -> None:
        if self.steps and self.steps * self.fragments > every.least:
            most = every.least // self.fragments
            remedy = f"give at most overlap={most}, or fewer fragments" if most else "give a larger every or no overlap"
            raise ConfigError(
                f"every={every.words}, overlap={self.words}: {self.fragments} fragments that are under way for "
                f"{self.steps} steps each do not fit into {every.least} steps; {remedy}"
            )


@dataclass
class Place:
    """Where a member is in its round."""

    since: int = 0  # steps
    next: int = 0  # the fragment that is sent next
    arriving: int = -1  # the one that is to be mixed in; -1: none
    left: int = 0  # steps until then
    moved: int = 0  # steps since the weights were the anchors


def make_overlap(words: Overlap | int | str) -> Overlap:
    """
    >>> make_overlap(5).cuts, make_overlap("overlap(5, fragments=2)").cuts, make_overlap(0).cuts
    (4, 2, 1)
    """
    if isinstance(words, Overlap):
        return words
    if isinstance(words, str):
        return build(words, {"overlap": Overlap}, "overlap")
    return Overlap(words)
