"""Averaging: what members that have trained apart make of their contributions.

    weights   mean, samples, tokens, loss      Σ wᵢ·xᵢ, through an all-reduce: a member multiplies before it sends
    rows      trimmed, median                  element by element over everyone's values, which all must see

A member that is not sound (its contribution is not finite) gets weight zero, whatever the average. Weights are of the
members of one round and add up to one; with the averages over rows only whether they are zero counts.

Trimmed mean and median: Yin and others, Byzantine-robust distributed learning, 2018.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from paceline.core.errors import ConfigError, PacelineError
from paceline.core.words import build, finite, whole

Combine = Callable[[torch.Tensor], torch.Tensor]  # rows, one for each member, become one


class Seen(NamedTuple):
    """What a member says of its steps since the last round."""

    sound: bool = True  # all that it contributes is finite
    samples: float = 0.0
    tokens: float = 0.0
    loss: float = math.nan  # the mean of what was logged; nan where nothing was


class Averaging(Protocol):
    """The contract of all averages."""

    @property
    def words(self) -> str:
        """How a user writes it."""

    @property
    def hears(self) -> str:
        """The name under which scripts log what it needs, with `run.log`; empty: nothing."""

    @property
    def combine(self) -> Combine | None:
        """Of finite rows, in any order, of which there is at least one; None where weights are all there is to it."""

    def weigh(self, seen: Sequence[Seen]) -> list[float]:
        """The members' weights."""

    def check(self, size: int) -> None:
        """Refuse a number of members that it cannot work with."""


class Mean:
    """All members alike.

    >>> Mean().weigh([Seen(), Seen(), Seen(sound=False)])
    [0.5, 0.5, 0.0]
    """

    words = "mean"
    hears = ""
    combine = None

    def weigh(self, seen: Sequence[Seen]) -> list[float]:
        return _shares([1.0] * len(seen), seen)

    def check(self, size: int) -> None:
        pass


class BySamples:
    """By the samples that each has drawn since the last round.

    >>> BySamples().weigh([Seen(samples=30), Seen(samples=10)])
    [0.75, 0.25]
    """

    words = "samples"
    hears = ""
    combine = None

    def weigh(self, seen: Sequence[Seen]) -> list[float]:
        return _shares([s.samples for s in seen], seen)

    def check(self, size: int) -> None:
        pass


class ByTokens:
    """By the tokens that each has seen since the last round, which scripts log: `run.log(tokens=x.numel())`."""

    words = "tokens"
    hears = "tokens"
    combine = None

    def weigh(self, seen: Sequence[Seen]) -> list[float]:
        if not any(s.tokens > 0 for s in seen):
            raise ConfigError("average=tokens: no member has logged any; call run.log(tokens=...) in the loop")
        return _shares([s.tokens for s in seen], seen)

    def check(self, size: int) -> None:
        pass


@dataclass(frozen=True)
class ByLoss:
    """wᵢ = softmax(−lossᵢ / temperature), of the mean loss that each has logged since the last round.

    A member without a finite loss gets zero. Losses of unlike data are not comparable: whoever has the easier data
    gets more weight. Compare with the plain mean.

    >>> ByLoss().weigh([Seen(loss=1.0), Seen(loss=1.0), Seen(loss=math.nan)])
    [0.5, 0.5, 0.0]

    Args:
        temperature: the larger, the more alike the weights.
    """

    temperature: float = 1.0

    hears = "loss"
    combine = None

    def __post_init__(self) -> None:
        if not finite(self.temperature) or not self.temperature > 0:
            raise ConfigError(f"loss(temperature={self.temperature!r}): must be more than 0, such as 1")

    @property
    def words(self) -> str:
        return f"loss(temperature={self.temperature})"

    def weigh(self, seen: Sequence[Seen]) -> list[float]:
        losses = [s.loss for s in seen if s.sound and math.isfinite(s.loss)]
        if not losses:
            raise PacelineError(
                f"average={self.words}: no member has logged a finite loss since the last round. Call "
                "run.log(loss=loss) at each step; where it does, all members have diverged: lower the learning rate"
            )
        least = min(losses)
        usable = [s.sound and math.isfinite(s.loss) for s in seen]
        return _shares(
            [math.exp((least - s.loss) / self.temperature) if u else 0.0 for s, u in zip(seen, usable)], seen
        )

    def check(self, size: int) -> None:
        pass


@dataclass(frozen=True)
class Trimmed:
    """The mean without the `count` largest and the `count` smallest of each element: survives so many bad members.

    >>> Trimmed(1).combine(torch.tensor([[1.0], [3.0], [1e30]]))
    tensor([3.])

    Args:
        count: at each end; where members are left out, at most what leaves one.
    """

    count: int = 1

    hears = ""

    def __post_init__(self) -> None:
        if not whole(self.count) or self.count < 1:
            raise ConfigError(f"trimmed(count={self.count!r}): a whole number of at least 1 is needed")

    @property
    def words(self) -> str:
        return f"trimmed(count={self.count})"

    def weigh(self, seen: Sequence[Seen]) -> list[float]:
        return _shares([1.0] * len(seen), seen)

    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        cut = min(self.count, (len(rows) - 1) // 2)
        return _by_parts(rows, lambda x: x.sort(dim=0).values[cut : len(x) - cut].mean(dim=0))

    def check(self, size: int) -> None:
        if 1 < size < 2 * self.count + 1:
            raise ConfigError(
                f"average={self.words}: of {size} members nothing would be left; start at least {2 * self.count + 1}, "
                "or use average=mean"
            )


class Median:
    """The median of each element, between the two middle ones of an even number: survives (n−1)//2 bad members of n.

    >>> Median().combine(torch.tensor([[1.0], [3.0], [1e30]]))
    tensor([3.])
    """

    words = "median"
    hears = ""

    def weigh(self, seen: Sequence[Seen]) -> list[float]:
        return _shares([1.0] * len(seen), seen)

    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        low, high = (len(rows) - 1) // 2, len(rows) // 2

        def middle(x: torch.Tensor) -> torch.Tensor:
            ordered = x.sort(dim=0).values
            return ordered[low].lerp(ordered[high], 0.5) if high > low else ordered[low]

        return _by_parts(rows, middle)

    def check(self, size: int) -> None:
        if size == 2:
            raise ConfigError("average=median: of two members it is the mean; start at least 3, or use average=mean")


AVERAGES: dict[str, Callable[..., Averaging]] = {
    "mean": Mean,
    "samples": BySamples,
    "tokens": ByTokens,
    "loss": ByLoss,
    "trimmed": Trimmed,
    "median": Median,
}


def make_average(words: Averaging | str) -> Averaging:
    """The average that a user wrote as an object or in words."""
    if isinstance(words, str):
        return build(words, AVERAGES, "average")
    if isinstance(words, type) or not hasattr(words, "weigh"):
        raise ConfigError(f'average={words!r}: give words such as "median" or "loss(temperature=0.5)"')
    return words


def combine_rows(rows: torch.Tensor, combine: Combine | None, weights: Sequence[float]) -> torch.Tensor:
    """One row of several; those of weight zero, and those that are not finite, are left out."""
    told = torch.view_as_real(rows).flatten(1) if rows.is_complex() else rows
    good = [i for i, w in enumerate(weights) if w > 0 and bool(torch.isfinite(told[i]).all())]
    if not good:
        raise PacelineError("no member's values are finite, so there is nothing to average: lower the learning rate")
    if combine:
        return combine(rows[good])
    total = sum(weights[i] for i in good)
    return torch.stack([rows[i] * (weights[i] / total) for i in good]).sum(dim=0)


def _by_parts(rows: torch.Tensor, combine: Combine) -> torch.Tensor:
    """Complex numbers have no order: their parts do."""
    return torch.view_as_complex(combine(torch.view_as_real(rows))) if rows.is_complex() else combine(rows)


def _shares(weights: Sequence[float], seen: Sequence[Seen]) -> list[float]:
    """Of one, but for those that are not sound; alike where nobody has any weight."""
    sound = [w if s.sound and math.isfinite(w) and w > 0 else 0.0 for w, s in zip(weights, seen)]
    if not any(sound):
        sound = [float(s.sound) for s in seen]
    total = sum(sound)
    if not total:
        raise PacelineError(
            "the weights of all members have become infinite or nan since the last round: lower the learning rate, or "
            "clip gradients, and resume from the last checkpoint"
        )
    return [w / total for w in sound]
