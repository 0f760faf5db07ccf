"""How replicas agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.core.words import build
from paceline.strategies.allreduce import AllReduce
from paceline.strategies.strategy import Strategy, Tally, World

STRATEGIES: dict[str, Callable[..., Strategy]] = {"allreduce": AllReduce}


def make_strategy(words: Any) -> Strategy:
    """The strategy that a user wrote as an object or in words."""
    if isinstance(words, str):
        return build(words, STRATEGIES, "strategy")
    strategy: Strategy = words
    return strategy


__all__ = ["STRATEGIES", "AllReduce", "Strategy", "Tally", "World", "make_strategy"]
