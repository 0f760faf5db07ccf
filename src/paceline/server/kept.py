"""What a shard's corrections have learnt, taken apart by piece and put together again: for checkpoints.

Corrections keep flat tensors and numbers by piece. In a checkpoint they go with the optimizer's state and, by the
parameter's name, to whichever pieces hold it in the next run. Names begin with @ and are the path in the correction's
`state_dict`, with * for the piece:

    @squares/*   @momenta/*/of/0   @parts/1/steps/*/lr

What each worker was sent last is left out: after a resume all of them pull. So is nobody's who is not here any more:
the correction forgets them, as if they had left. Beside these go the rate of the last push, and the weights themselves
where workers are sent others (dana).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from paceline.core.errors import ConfigError
from paceline.server.corrected import piece_key
from paceline.staleness import Correction, Stage

if TYPE_CHECKING:
    from paceline.server.readers import Readers

MARK = "@"
_SENT, _BY_WORKER = "sent", "of"  # as corrections call them
_RATE, _WEIGHTS = "@rate", "@weights"


class Kept:
    """The state of one shard's corrections, by piece."""

    def __init__(self, readers: Readers, correction: Correction) -> None:
        self._readers = readers
        self._correction = correction
        self._coming: dict[tuple[int, int], dict[str, Any]] = {}  # by chunk and piece: what is being restored

    def all(self) -> dict[tuple[int, int], dict[str, Any]]:
        """All there is, by chunk and piece, and there by name."""
        readers, found = self._readers, _apart(self._correction.state_dict())
        kept: dict[tuple[int, int], dict[str, Any]] = {}
        for index, chunk in enumerate(readers.chunks):
            for number, piece in enumerate(chunk.pieces):
                own = kept[index, number] = {_RATE: self._group(index, number)["lr"]}
                if self._correction.stage == Stage.GATHER:
                    own[_WEIGHTS] = readers.stock.weights[index][piece.at : piece.at + piece.numel]
                own |= found.get(piece_key(index, number), {})
        return kept

    def store(self, index: int, piece: int, name: str, value: Any) -> None:
        """One of them comes back; `settle` takes over all that have."""
        where = self._readers.chunks[index].pieces[piece]
        if isinstance(value, torch.Tensor) and value.numel() != where.numel:
            raise ConfigError(f"{value.numel()} values of {name} for a piece of {where.numel}")
        if name == _RATE:
            self._group(index, piece)["lr"] = float(value)
        elif name == _WEIGHTS and isinstance(value, torch.Tensor):
            self._readers.stock.weights[index][where.at : where.at + where.numel] = value.view(-1)
        else:
            value = value.reshape(-1) if isinstance(value, torch.Tensor) else _number(value)
            self._coming.setdefault((index, piece), {})[name] = value

    def settle(self) -> None:
        """The corrections take over what has come."""
        if not self._coming:
            return
        state, workers = self._correction.state_dict(), set()
        for piece, values in self._coming.items():
            for name, value in values.items():
                path = [piece_key(*piece) if step == "*" else step for step in name.removeprefix(MARK).split("/")]
                _put(state, path, value)
                if len(path) > 1 and path[-2] == _BY_WORKER and path[-1].isdecimal():
                    workers.add(int(path[-1]))
        self._coming.clear()
        self._correction.load_state_dict(state)
        for worker in workers:
            if not self._readers.knows(worker):
                self._correction.forget(worker)

    def _group(self, index: int, piece: int) -> dict[str, Any]:
        """The optimizer's group that a piece is in."""
        number = self._readers.placement.tensors[self._readers.chunks[index].pieces[piece].tensor].group
        groups = self._readers.stock.optimizers[index].param_groups
        return next(group for group in groups if group["number"] == number)


def _apart(state: Any, path: tuple[str, ...] = (), key: str = "") -> dict[str, dict[str, Any]]:
    """Tensors and numbers by the key of their piece, and there by the path to them."""
    if isinstance(state, dict | list):
        steps = state.items() if isinstance(state, dict) else ((str(i), part) for i, part in enumerate(state))
        found: dict[str, dict[str, Any]] = {}
        for step, inner in steps:
            if step != _SENT:
                own = step.startswith("#")
                for piece, values in _apart(inner, (*path, "*" if own else step), step if own else key).items():
                    found.setdefault(piece, {}).update(values)
        return found
    return {key: {MARK + "/".join(path): state}} if key else {}


def _put(state: Any, path: list[str], value: Any) -> None:
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
    state[path[-1]] = value


def _number(value: float) -> float:
    return int(value) if value == int(value) else value
