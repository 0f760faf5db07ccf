"""Chain: several corrections, one behind the other.

    a worker  ── gradient ──▶  first  ─▶  …  ─▶  last  ──▶  applied
    a worker  ◀── what is sent ──  first  ◀─  …  ◀─  last  ◀──  weights

Gradients pass it forwards, weights backwards. So one that keeps what was sent (compensate, gap) stands before one that
changes it (dana), gets the worker's gradient first, and sees what really left.

Other orders give other, wrong formulas, and are refused; see `Stage`.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch

from paceline.core.errors import CheckpointError, ConfigError
from paceline.staleness.correction import Correction, Push, Stage, check_state

_WHY = {
    Stage.ESTIMATE: "{second} needs the gradient as the worker computed it, and {first} has changed it",
    Stage.SCALE: "what {first} sends to workers counts on all of its momentum being applied; {second} takes from it",
}


class Chain:
    """Corrections in the order in which a gradient passes them; chains among them are taken apart.

    >>> from paceline.staleness import DelayCompensation, Dana, Drop
    >>> Chain(Drop(8), DelayCompensation(), Dana()).words
    'drop(age=8) + compensate(strength=0.04, adaptive=False) + dana(momentum=0.9)'
    """

    def __init__(self, *corrections: Correction) -> None:
        apart = [correction.parts if isinstance(correction, Chain) else (correction,) for correction in corrections]
        self.parts: tuple[Correction, ...] = tuple(part for parts in apart for part in parts)
        _check(self.parts)
        self.reads = any(part.reads for part in self.parts)
        self.stage = max((part.stage for part in self.parts), default=Stage.BESIDE)

    @property
    def words(self) -> str:
        return " + ".join(part.words for part in self.parts)

    def check_optimizer(self, options: Mapping[str, Any]) -> None:
        for part in self.parts:
            part.check_optimizer(options)

    def accepts(self, push: Push) -> bool:
        return all(part.accepts(push) for part in self.parts)

    def on_pull(self, key: str, weights: torch.Tensor, worker: int, lr: float) -> torch.Tensor:
        for part in reversed(self.parts):
            if part.reads:
                weights = part.on_pull(key, weights, worker, lr)
        return weights

    def on_push(self, key: str, grad: torch.Tensor, weights: torch.Tensor, push: Push) -> torch.Tensor:
        for part in self.parts:
            grad = part.on_push(key, grad, weights, push)
        return grad

    def forget(self, worker: int) -> None:
        for part in self.parts:
            part.forget(worker)

    def state_dict(self) -> dict[str, Any]:
        return {"correction": "chain", "parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_state(state, "chain")
        if len(state["parts"]) != len(self.parts):
            raise CheckpointError(
                f"the checkpoint has the state of {len(state['parts'])} corrections, and {self.words} has "
                f"{len(self.parts)}. Resume with the corrections that the run was started with, in the same order"
            )
        for part, own in zip(self.parts, state["parts"]):
            part.load_state_dict(own)


def _check(parts: tuple[Correction, ...]) -> None:
    """Refuse what would correct the same thing twice, or with the wrong formula."""
    names = [part.words.partition("(")[0] for part in parts]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"corrections {' + '.join(names)}: {name} stands there twice. Write it once")
    changing = [(name, part.stage) for name, part in zip(names, parts) if part.stage != Stage.BESIDE]
    for (first, before), (second, after) in pairwise(changing):
        if before == after:
            raise ConfigError(
                f"corrections {' + '.join(names)}: {first} and {second} both correct the same thing. Leave one out"
            )
        if before > after:
            why = _WHY[after].format(first=first, second=second)
            raise ConfigError(f"corrections {' + '.join(names)}: {why}. Write {second} before {first}")
