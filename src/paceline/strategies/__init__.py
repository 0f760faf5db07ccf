"""How replicas agree."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from paceline.core.errors import ConfigError
from paceline.core.words import build, read
from paceline.strategies.allreduce import AllReduce
from paceline.strategies.async_local import AsyncLocal
from paceline.strategies.guest import Guest
from paceline.strategies.local import Local
from paceline.strategies.presets import Average, DiLoCo, PostLocal, SparseLoCo
from paceline.strategies.server import Async, Bounded, Served, Sync
from paceline.strategies.strategy import Strategy, Tally, World
from paceline.strategies.zero import Zero

STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "allreduce": AllReduce,
    "sync": Sync,
    "bounded": Bounded,
    "async": Async,
    "local": Local,
    "average": Average,
    "post_local": PostLocal,
    "diloco": DiLoCo,
    "sparseloco": SparseLoCo,
    "async_local": AsyncLocal,
    "guest": Guest,
    "zero": Zero,
}


def make_strategy(words: Any, codec: str = "") -> Strategy:
    """The strategy that a user wrote as an object or in words; a codec in words goes before the strategy's own."""
    strategy: Strategy = build(words, STRATEGIES, "strategy") if isinstance(words, str) else words
    if codec and isinstance(strategy, AllReduce | Local | Guest | Zero | Served):
        strategy.take(codec)
    elif codec and codec != "none":
        raise ConfigError(f"codec={codec!r}: {type(strategy).__name__} has no use for a codec")
    return strategy


def words_of(strategy: Strategy) -> str:
    """How a user would write it, without what is as usual.

    >>> words_of(Async("dana(0.9)")), words_of(Sync()), words_of(AllReduce(bucket_mb=8))
    ("async(correct='dana(momentum=0.9)')", 'sync', 'allreduce(bucket_mb=8.0)')
    >>> words_of(DiLoCo(every=50))
    "local(every=50, outer='nesterov(lr=0.7, momentum=0.9)')"
    >>> words_of(Zero(stage=1)), words_of(Zero())
    ('zero(stage=1)', 'zero')
    """
    changed = _changed(strategy)
    if not isinstance(strategy, AllReduce | Served | Local | Guest | Zero):
        return type(strategy).__name__
    name, gate = ("local" if isinstance(strategy, Local) else "allreduce"), ""
    if isinstance(strategy, Guest):
        name = "guest"
    if isinstance(strategy, Zero):
        name = "zero"
    if isinstance(strategy, AsyncLocal):
        name = "async_local"
    elif isinstance(strategy, Served):
        name, _, gate = strategy.gate.words.partition("(")
    own = [gate.removesuffix(")")] if gate and gate != "backups=0)" else []
    own += [f"{key}={value!r}" for key, value in changed.items() if key not in ("backups", "staleness")]
    return f"{name}({', '.join(own)})" if own else name


def choose(script: Strategy, typed: str) -> tuple[Strategy, str]:
    """The strategy of a run whose script gives one and whose command line another, and what to say of it.

    The script's says more, and is used where both are all-reduce or both have servers and nothing that was typed
    contradicts it; a gate without arguments, such as "async", takes the place of the script's gate.

    >>> script = Async("dana(0.9)")
    >>> choose(script, "async") == (script, "")
    True
    >>> choose(script, "sync")[1]
    "--strategy sync goes before the script's async(correct='dana(momentum=0.9)'): correct is left out"
    """
    made: Strategy = build(typed, STRATEGIES, "strategy")
    mine, theirs = _options(made), _options(script)
    words = read(typed, "strategy")
    said = set(words.given(STRATEGIES[words.name]))
    if isinstance(made, Local):  # what a name such as diloco stands for is said too
        said |= set(_changed(made)) - {"every"}
    before = f"--strategy {typed} goes before the script's {words_of(script)}"
    agree = all(key in theirs and theirs[key] == mine[key] for key in said)
    if agree and type(made) is type(script):
        return script, ""
    lost = [key for key, value in _changed(script).items() if mine.get(key, "") != value]
    if isinstance(made, Served) and isinstance(script, Served) and AsyncLocal not in (type(made), type(script)):
        if agree and not {"correct", "per_host"} & (set(lost) - set(mine)):
            script.gate = made.gate
            kept = [key for key in _changed(script) if key in mine]
            return script, f"{before}: its gate is left out" + (f", {', '.join(kept)} stays" if kept else "")
    elif type(made) is not type(script):
        return made, f"{before}, all of which is left out"
    return made, f"{before}: {', '.join(lost) or 'its gate'} is left out"


def _options(strategy: Strategy) -> dict[str, Any]:
    return strategy.options if isinstance(strategy, AllReduce | Served | Local | Guest | Zero) else {}


def _changed(strategy: Strategy) -> dict[str, Any]:
    """Its options that are not as usual."""
    usual = {name: p.default for name, p in inspect.signature(type(strategy)).parameters.items()}
    if not isinstance(strategy, Guest):
        usual["codec"] = "none"  # of all-reduce, in its words
    return {key: value for key, value in _options(strategy).items() if value != usual.get(key)}


__all__ = [
    "STRATEGIES",
    "AllReduce",
    "Async",
    "AsyncLocal",
    "Average",
    "Bounded",
    "DiLoCo",
    "Guest",
    "Local",
    "PostLocal",
    "SparseLoCo",
    "Strategy",
    "Sync",
    "Tally",
    "World",
    "Zero",
    "choose",
    "make_strategy",
    "words_of",
]
