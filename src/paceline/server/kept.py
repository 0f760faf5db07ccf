"""What a shard's corrections have learnt, taken apart by piece and put together again: for checkpoints.

Corrections keep flat tensors by chunk. For a checkpoint they are cut into pieces, which go with the optimizer's state
and, by the parameter's name, to whichever chunks hold it in the next run. Names begin with @ and are the path in the
correction's `state_dict`, with * for the chunk:

    @squares/*   @momenta/*/of/0   @parts/1/steps/*/lr

What each worker was sent last is left out: after a resume all of them pull. So is nobody's who is not here any more:
the correction forgets them, as if they had left. Versions are counted from the present one. Beside these go the rate
of the last push, and the weights themselves where workers are sent others (dana).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from paceline.core.errors import ConfigError
from paceline.staleness import Correction, Stage

if TYPE_CHECKING:
    from paceline.server.shard import Shard

MARK = "@"
_SENT, _BY_WORKER, _VERSION = "sent", "of", "decayed"  # as corrections call them
_RATE, _WEIGHTS = "@rate", "@weights"


class Kept:
    """The state of one shard's corrections, by piece."""

    def __init__(self, shard: Shard, correction: Correction) -> None:
        self._shard = shard
        self._correction = correction
        self._coming: dict[int, dict[str, Any]] = {}  # by chunk: what is being restored

    def of(self, index: int, piece: int) -> dict[str, Any]:
        """All there is of a piece, by name."""
        shard, where = self._shard, self._shard.chunks[index].pieces[piece]
        found: dict[str, Any] = {_RATE: self._group(index, piece)["lr"]}
        if self._correction.stage == Stage.GATHER:
            found[_WEIGHTS] = shard.stock.weights[index]
        found |= _apart(self._correction.state_dict(), chunk_key(index), shard.version)
        return {
            name: value[where.at : where.at + where.numel] if isinstance(value, torch.Tensor) else value
            for name, value in found.items()
        }

    def store(self, index: int, piece: int, name: str, value: Any) -> None:
        """One of them comes back; `settle` takes over all that have."""
        shard, where = self._shard, self._shard.chunks[index].pieces[piece]
        if not isinstance(value, torch.Tensor):
            if name == _RATE:
                self._group(index, piece)["lr"] = value
            else:
                self._coming.setdefault(index, {})[name] = value
            return
        if value.numel() != where.numel:
            raise ConfigError(f"{value.numel()} values of {name} for a piece of {where.numel}")
        if name == _WEIGHTS:
            whole = shard.stock.weights[index]
        else:
            chunk = self._coming.setdefault(index, {})
            whole = chunk.setdefault(name, torch.zeros(shard.chunks[index].numel, dtype=value.dtype))
        whole[where.at : where.at + where.numel] = value.view(-1)

    def settle(self) -> None:
        """The corrections take over what has come."""
        if not self._coming:
            return
        state, workers = self._correction.state_dict(), set()
        for index, chunk in self._coming.items():
            for name, value in chunk.items():
                path = [chunk_key(index) if step == "*" else step for step in name.removeprefix(MARK).split("/")]
                _put(state, path, value if isinstance(value, torch.Tensor) else _number(value), self._shard.version)
                if len(path) > 1 and path[-2] == _BY_WORKER and path[-1].isdecimal():
                    workers.add(int(path[-1]))
        self._coming.clear()
        self._correction.load_state_dict(state)
        for worker in workers:
            if not self._shard.knows(worker):
                self._correction.forget(worker)

    def _group(self, index: int, piece: int) -> dict[str, Any]:
        """The optimizer's group that a piece is in."""
        number = self._shard.placement.tensors[self._shard.chunks[index].pieces[piece].tensor].group
        groups = self._shard.stock.optimizers[index].param_groups
        return next(group for group in groups if group["number"] == number)


def chunk_key(index: int) -> str:
    """How corrections know a chunk; not to be mistaken for a worker."""
    return f"#{index}"


def _apart(state: Any, key: str, version: int, path: tuple[str, ...] = ()) -> dict[str, Any]:
    """Tensors and numbers of one chunk, by the path to them."""
    if isinstance(state, dict | list):
        steps = state.items() if isinstance(state, dict) else ((str(i), part) for i, part in enumerate(state))
        found: dict[str, Any] = {}
        for step, inner in steps:
            if step != _SENT and not (step.startswith("#") and step != key):
                found |= _apart(inner, key, version, (*path, "*" if step == key else step))
        return found
    if "*" not in path or isinstance(state, str):
        return {}
    return {MARK + "/".join(path): state - version if _VERSION in path else state}


def _put(state: Any, path: list[str], value: Any, version: int) -> None:
    """Put a value into a correction's state, at the end of its path."""
    for i, step in enumerate(path[:-1]):
        if isinstance(state, list):
            if not step.isdecimal() or int(step) >= len(state):
                raise ConfigError(f"the correction has no {'/'.join(path[: i + 1])}")
            state = state[int(step)]
        else:
            state = state.setdefault(step, {})
    if not isinstance(state, dict):
        raise ConfigError(f"the correction has no {'/'.join(path)}")
    state[path[-1]] = value + version if _VERSION in path else value


def _number(value: float) -> float:
    return int(value) if value == int(value) else value
