"""Gradients that are old: what a shard of the parameter server does about them.

>>> make_corrections("compensate + dana(0.9) + drop(8)").words
'compensate(strength=0.04, adaptive=False) + dana(momentum=0.9) + drop(age=8)'
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from paceline.core.errors import ConfigError
from paceline.core.words import build
from paceline.staleness.chain import Chain
from paceline.staleness.compensate import DelayCompensation
from paceline.staleness.correction import Correction, Push, Stage
from paceline.staleness.decay import Decay
from paceline.staleness.drop import Drop
from paceline.staleness.gap import GapAware
from paceline.staleness.momentum import Dana
from paceline.staleness.scale import ByAge

CORRECTIONS: dict[str, Callable[..., Correction]] = {
    "by_age": ByAge,
    "compensate": DelayCompensation,
    "dana": Dana,
    "decay": Decay,
    "drop": Drop,
    "gap": GapAware,
}

_BETWEEN = re.compile(r"\+(?![^(]*\))")  # not the + of a number such as 1e+2, within parentheses


def make_corrections(words: Correction | str | Sequence[Correction | str] | None) -> Correction | None:
    """The correction that a user wrote as an object, in words joined by +, or as several; "none" and "" are None.

    Several become a `Chain`, in the order given: that in which a gradient passes them.

    Raises:
        ConfigError: a name or a setting is not known, or they do not go together.
    """
    if isinstance(words, str):
        if words.strip() in ("", "none"):
            return None
        words = [build(part, CORRECTIONS, "correction") for part in _BETWEEN.split(words)]
    if words is None or (isinstance(words, Correction) and not isinstance(words, type)):
        return words
    if not isinstance(words, Sequence):
        raise ConfigError(
            f'correct={words!r}: corrections are needed, in words such as "dana(0.9) + drop(16)" or as objects'
        )
    made = [made for part in words if (made := make_corrections(part)) is not None]
    if len(made) < 2:
        return made[0] if made else None
    return Chain(*made)


__all__ = [
    "CORRECTIONS",
    "ByAge",
    "Chain",
    "Correction",
    "Dana",
    "Decay",
    "DelayCompensation",
    "Drop",
    "GapAware",
    "Push",
    "Stage",
    "make_corrections",
]
