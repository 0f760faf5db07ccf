"""Which member owns which elements: parameters laid out in blocks, and each block cut among the members.

    block   a run of elements of one optimizer, dtype and device, from the last parameter on, as gradients come
    part    what one member owns of it: as many elements as every other one has; or, for an optimizer that looks at
            whole parameters, all of it: then a block has one owner, and blocks are dealt out by their size

Parameters are laid out in the order of their memory and may be cut anywhere, so a large one does not make a large
block. The layout follows from the optimizers alone and is the same on all members. It grows where parameters are added
or thawed; what is there stays where it is, and so does the optimizer's state of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from paceline import optim
from paceline.core.errors import ConfigError
from paceline.strategies.weighing import trainable

_ALIGN = 16  # elements: parts and parameters begin at cache lines

# These look at each element by itself.
ELEMENTWISE: tuple[type, ...] = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
    optim.Adagrad,
    optim.DelayedNesterov,
)


@dataclass(frozen=True)
class Span:
    """Some elements of a parameter, in the order of its memory, and where they begin in their block."""

    parameter: torch.nn.Parameter
    start: int
    stop: int
    at: int

    @property
    def place(self) -> slice:
        return slice(self.at, self.at + self.stop - self.start)

    @property
    def whole(self) -> bool:
        return self.stop - self.start == self.parameter.numel()

    def within(self, part: slice) -> Span | None:
        """What of it lies in a part of the block."""
        first, last = max(self.at, part.start), min(self.place.stop, part.stop)
        if first >= last:
            return None
        start = self.start + first - self.at
        return Span(self.parameter, start, start + last - first, first)


class Block:
    """Elements that travel together."""

    def __init__(self, optimizer: int, like: torch.Tensor, size: int, owner: int | None) -> None:
        self.optimizer = optimizer  # its id
        self.dtype = like.dtype
        self.device = like.device
        self.spans: list[Span] = []
        self.numel = 0
        self.owner = owner  # None: every member owns a part
        self._size = size

    def add(self, p: torch.nn.Parameter, start: int, stop: int) -> None:
        at = _up(self.spans[-1].place.stop if self.spans else 0, _ALIGN)
        self.spans.append(Span(p, start, stop, at))
        self.numel = _up(at + stop - start, _ALIGN * self._size if self.owner is None else _ALIGN)

    def part(self, rank: int) -> slice:
        """What a member owns."""
        if self.owner is not None:
            return slice(0, self.numel if rank == self.owner else 0)
        per = self.numel // self._size
        return slice(rank * per, (rank + 1) * per)

    def of(self, rank: int) -> list[Span]:
        part = self.part(rank)
        return [own for span in self.spans if (own := span.within(part))]


class Cuts:
    """The blocks of a run.

    `ranges`: large parameters may be spread over several blocks.
    """

    def __init__(self, size: int, block_bytes: int, *, ranges: bool = True) -> None:
        self.blocks: list[Block] = []
        self.spans: dict[int, list[tuple[Block, Span]]] = {}  # by id of the parameter
        self._held: dict[int, torch.nn.Parameter] = {}  # so that no other one gets the same id
        self._size = size
        self._block_bytes = block_bytes
        self._ranges = ranges
        self._loads = [0] * size

    def grow(self, optimizer: torch.optim.Optimizer, parameters: Iterable[torch.nn.Parameter]) -> list[Block]:
        """Make room for these parameters of an optimizer, where they have none; the blocks that are new."""
        new = [p for p in parameters if id(p) not in self.spans and trainable(p)]
        for p in new:
            if not torch.ops.aten.is_non_overlapping_and_dense(p):
                raise ConfigError(
                    f"zero: a parameter of shape {tuple(p.shape)} and strides {p.stride()} does not fill its memory, "
                    "so it cannot be cut: give the model a contiguous copy of it"
                )
            self.spans[id(p)] = []
            self._held[id(p)] = p
        whole = not elementwise(optimizer)
        blocks: list[Block] = []
        owners = _dealt(new, self._loads) if whole else {}
        kinds = dict.fromkeys((p.dtype, p.device, owners.get(id(p))) for p in new)
        for dtype, device, owner in kinds:
            mine = [p for p in reversed(new) if (p.dtype, p.device, owners.get(id(p))) == (dtype, device, owner)]
            blocks += self._fill(id(optimizer), mine, owner)
        order = {id(p): i for i, p in enumerate(reversed(new))}
        blocks.sort(key=lambda block: order[id(block.spans[-1].parameter)])  # as they are complete
        for block in blocks:
            for span in block.spans:
                self.spans[id(span.parameter)].append((block, span))
        self.blocks += blocks
        return blocks

    def _fill(self, optimizer: int, parameters: Sequence[torch.nn.Parameter], owner: int | None) -> list[Block]:
        blocks: list[Block] = []
        most = max(_up(self._block_bytes // parameters[0].element_size(), _ALIGN * self._size), 1)
        for p in parameters:
            start = 0
            while start < p.numel() or not p.numel():
                if not blocks or blocks[-1].numel >= most:
                    blocks.append(Block(optimizer, p, self._size, owner))
                stop = p.numel()
                if owner is None and self._ranges:
                    used = blocks[-1].spans[-1].place.stop if blocks[-1].spans else 0
                    stop = min(stop, start + max(most - _up(used, _ALIGN), _ALIGN))
                blocks[-1].add(p, start, stop)
                start = stop
                if not p.numel():
                    break
        return blocks


def elementwise(optimizer: torch.optim.Optimizer) -> bool:
    return kind_of(optimizer) in ELEMENTWISE


def kind_of(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    """The optimizer's own class, without the run in it."""
    kind = type(optimizer)
    return kind.__mro__[1] if hasattr(optimizer, "_paceline") else kind


def flat(t: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor in the order of its memory; a view."""
    return t.detach().as_strided((t.numel(),), (1,))


def flat_like(t: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The elements of `t` in the order of the memory of `like`; a view where they lie so."""
    t = t.detach()
    if t.stride() != like.stride() or not torch.ops.aten.is_non_overlapping_and_dense(t):
        t = torch.empty_like(like, dtype=t.dtype, device=t.device).copy_(t)
    return flat(t)


def _dealt(parameters: Sequence[torch.nn.Parameter], loads: list[int]) -> dict[int, int]:
    """An owner for each, the largest first, to whoever has least; `loads` go on."""
    owners = {}
    for p in sorted(parameters, key=lambda p: -p.numel()):
        owners[id(p)] = loads.index(min(loads))
        loads[owners[id(p)]] += p.numel()
    return owners


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
