"""What a shard holds: the weights of one server's chunks, and an optimizer for each.

Knows nothing of workers: gradients come in, one chunk at a time, and are applied by the optimizer with the options that
came with them.
"""

from __future__ import annotations

from typing import Any

import torch

from paceline.core.errors import ConfigError
from paceline.optim import OPTIMIZERS
from paceline.server.messages import Options, Rule
from paceline.server.placement import Chunk, Placement

_ALIGN = 64


class Stock:
    """The chunks of one server, in `memory`."""

    def __init__(self, placement: Placement, server: int, rule: Rule, memory: torch.Tensor) -> None:
        self.placement = placement
        self.chunks = placement.of(server)
        self.rule = rule
        self.weights = [_view(memory, at, chunk) for at, chunk in zip(offsets(self.chunks), self.chunks)]
        self._pieces = [
            [flat[p.at : p.at + p.numel].view(self._shape(p.tensor, p.numel)) for p in chunk.pieces]
            for flat, chunk in zip(self.weights, self.chunks)
        ]
        self._stored: set[int] = set()  # chunks that have been given weights
        self._room = torch.empty(max((c.nbytes for c in self.chunks), default=0), dtype=torch.uint8)
        self.optimizers = [self._optimizer(i) for i in range(len(self.chunks))]

    @property
    def filled(self) -> bool:
        """Whether all weights have been given."""
        return len(self._stored) == len(self.chunks)

    def apply(self, index: int, gradient: torch.Tensor, missing: frozenset[int], groups: list[Options]) -> None:
        """A step of a chunk's optimizer. `missing`: the pieces without a gradient."""
        optimizer = self.optimizers[index]
        for group in optimizer.param_groups:
            group.update(groups[group["number"]])
        for i, (weights, piece) in enumerate(zip(self._pieces[index], self.chunks[index].pieces)):
            part = gradient[piece.at : piece.at + piece.numel]
            weights.grad = None if i in missing else part.view(weights.shape)
        optimizer.step()
        for weights in self._pieces[index]:
            weights.grad = None

    def scratch(self, index: int) -> torch.Tensor:
        """Room for the gradients of one chunk, used anew for each."""
        chunk = self.chunks[index]
        return _view(self._room, 0, chunk)

    def rates(self, index: int) -> dict[int, float]:
        """The learning rates that a chunk was last given, by the number of the group."""
        return {group["number"]: float(group["lr"]) for group in self.optimizers[index].param_groups}

    def name(self, index: int) -> str:
        """What a chunk holds, in words."""
        pieces = self.chunks[index].pieces
        names = [self.placement.tensors[p.tensor].name for p in pieces]
        return f"parameter {names[0]!r}" if names[0] == names[-1] else f"parameters {names[0]!r} to {names[-1]!r}"

    # ---- for checkpoints

    def store(self, index: int, values: torch.Tensor) -> None:
        """Set the weights of a chunk."""
        if values.numel() != self.chunks[index].numel or values.dtype != self.weights[index].dtype:
            raise ConfigError(f"{values.numel()} values for a chunk of {self.chunks[index].numel}")
        self.weights[index].copy_(values)
        self._stored.add(index)

    def state(self, index: int, piece: int) -> dict[str, Any]:
        """The optimizer's state of a piece."""
        return dict(self.optimizers[index].state.get(self._pieces[index][piece], {}))

    def store_state(self, index: int, piece: int, key: str, value: Any) -> None:
        p = self._pieces[index][piece]
        if isinstance(value, torch.Tensor) and value.numel() == p.numel() and value.dim():
            value = value.view(p.shape).clone()
        self.optimizers[index].state[p][key] = value

    # ---- inside

    def _optimizer(self, index: int) -> torch.optim.Optimizer:
        kind = optimizer_class(self.rule.optimizer)
        numbers = [self.placement.tensors[p.tensor].group for p in self.chunks[index].pieces]
        groups = [
            {"params": [w for w, n in zip(self._pieces[index], numbers) if n == number], "number": number, **options}
            for number, options in enumerate(self.rule.groups)
            if number in numbers
        ]
        start = {}
        if kind is torch.optim.Adagrad:  # its state is made here, and by this argument alone
            start = {k: v for k, v in self.rule.groups[0].items() if k == "initial_accumulator_value"}
        try:
            optimizer: torch.optim.Optimizer = kind(groups, **start)
        except TypeError:  # one whose rate has no default
            optimizer = kind(groups, lr=0.0)
        for group in optimizer.param_groups:
            group.update(self.rule.groups[group["number"]])
        return optimizer

    def _shape(self, tensor: int, numel: int) -> tuple[int, ...]:
        whole = self.placement.tensors[tensor]
        return whole.shape if whole.numel == numel else (numel,)


def room(chunks: list[Chunk]) -> int:
    """Bytes of memory that the weights of these chunks take."""
    return offsets(chunks)[-1]


def offsets(chunks: list[Chunk]) -> list[int]:
    """Where each chunk begins in the memory, and the end of all."""
    places = [0]
    for chunk in chunks:
        places.append(places[-1] + -(-chunk.nbytes // _ALIGN) * _ALIGN)
    return places


def optimizer_class(name: str) -> type[Any]:
    """A class of torch.optim or paceline.optim by its name; nothing else is looked up."""
    if name in OPTIMIZERS:
        return OPTIMIZERS[name]
    kind = getattr(torch.optim, name, None) if name.isidentifier() else None
    if not isinstance(kind, type) or not issubclass(kind, torch.optim.Optimizer) or kind is torch.optim.Optimizer:
        raise ConfigError(f"{name!r} is no optimizer of torch.optim or paceline.optim")
    return kind


def _view(memory: torch.Tensor, at: int, chunk: Chunk) -> torch.Tensor:
    return memory[at : at + chunk.nbytes].view(getattr(torch, chunk.dtype))
