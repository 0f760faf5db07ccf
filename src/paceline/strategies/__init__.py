"""How replicas agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.core.errors import ConfigError
from paceline.core.words import build
from paceline.server.packing import servable
from paceline.strategies.allreduce import AllReduce
from paceline.strategies.server import Async, Bounded, Served, Sync
from paceline.strategies.strategy import Strategy, Tally, World

STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "allreduce": AllReduce,
    "sync": Sync,
    "bounded": Bounded,
    "async": Async,
}


def make_strategy(words: Any, codec: str = "") -> Strategy:
    """The strategy that a user wrote as an object or in words; a codec in words goes before the strategy's own."""
    strategy: Strategy = build(words, STRATEGIES, "strategy") if isinstance(words, str) else words
    if codec and isinstance(strategy, AllReduce):
        strategy.take(codec)
    elif codec and codec != "none" and isinstance(strategy, Served):
        servable(codec)
        strategy.codec = codec
    elif codec and codec != "none":
        raise ConfigError(f"codec={codec!r}: {type(strategy).__name__} has no use for a codec")
    return strategy


__all__ = ["STRATEGIES", "AllReduce", "Async", "Bounded", "Strategy", "Sync", "Tally", "World", "make_strategy"]
