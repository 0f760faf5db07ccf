"""Blocks of gradients on their way to their owners: a thread sums them over the members while backward goes on.

    open   memory for a block that begins to fill; taken from what earlier blocks have given back
    post   a full block: each member gets the sum of its part, and the block's memory is free again
    wait   until all that was posted is summed

A few blocks may be under way at a time, so memory stays small however slow the link is. Without a codec each part goes
to its owner only. With one, everyone's codes go to everyone, as with all-reduce, and each keeps its part of the sum.
In a run of one the memory of a block is what its owner keeps.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import torch

from paceline.strategies.buckets import rows_of
from paceline.strategies.cuts import Block
from paceline.strategies.reducers import Coder, Piece, Reducer
from paceline.strategies.strategy import World
from paceline.transport.arena import Courier, Reduce

_AHEAD = 4  # blocks under way


class Carrier:
    """That of one model. Blocks lie in host memory, pinned where they come from a CUDA device."""

    def __init__(self, world: World, coder: Coder | None, name_of: Callable[[torch.Tensor], str]) -> None:
        self.sums: dict[int, torch.Tensor] = {}  # by id of the block: this member's part of the last pass
        self._world = world
        self._coder = coder
        self._name_of = name_of
        self._free: dict[tuple[int, torch.dtype, bool], list[torch.Tensor]] = {}
        self._jobs: deque[Callable[[], object]] = deque()
        self._ahead: deque[Future[None]] = deque()
        self._reduces: dict[int, Reduce] = {}  # by id of the block, with a codec
        self._several = world.group.size > 1
        self._ready: dict[int, torch.cuda.Event] = {}  # by id of the block: when it has been copied from its device
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        if self._several:
            self._lane = world.group.lane()
            self._courier = Courier(self._carry, f"{world.group.name}-parts")

    def open(self, block: Block) -> torch.Tensor:
        free = self._free.setdefault(_kind(block), [])
        if free:
            return free.pop()
        return torch.empty(block.numel, dtype=block.dtype, pin_memory=block.device.type == "cuda")

    def copy(self, gradient: torch.Tensor, into: torch.Tensor, scale: float, block: Block) -> None:
        """A piece of a gradient into its block; from a device beside what it computes."""
        if gradient.device.type == "cpu":
            torch.mul(gradient, scale, out=into)
            return
        device = gradient.device
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream = self._streams[device]
        if scale != 1.0:
            gradient = gradient * scale
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            into.copy_(gradient, non_blocking=True)
            self._ready[id(block)] = stream.record_event()
        gradient.record_stream(stream)

    def post(self, block: Block, flat: torch.Tensor) -> None:
        if not self._several:
            self.sums[id(block)] = flat
            return
        began = time.monotonic()
        while len(self._ahead) >= _AHEAD:
            self._ahead.popleft().result()  # bounded: what carries them limits its own waits
        self._world.waited_s += time.monotonic() - began
        self._jobs.append(lambda: self._sum(block, flat))
        self._ahead.append(self._courier.post(flat))

    def all_reduce(self, flat: torch.Tensor) -> None:
        """Behind what was posted: replace this by its sum."""
        if self._several:
            self._jobs.append(lambda: self._lane.all_reduce(flat))
            self._ahead.append(self._courier.post(flat))

    def wait(self) -> None:
        self._ahead.clear()
        if self._several:
            before = self._courier.waited_s
            try:
                self._courier.wait()
            finally:
                self._world.waited_s += self._courier.waited_s - before
        for event in self._ready.values():
            event.synchronize()
        self._ready.clear()

    def close(self) -> None:
        if self._several:
            self._courier.close()

    def give_back(self, block: Block, flat: torch.Tensor) -> None:
        self._free.setdefault(_kind(block), []).append(flat)

    def _carry(self, flat: torch.Tensor) -> None:
        """In the thread: the next that was posted."""
        self._jobs.popleft()()

    def _sum(self, block: Block, flat: torch.Tensor) -> None:
        if event := self._ready.pop(id(block), None):
            event.synchronize()
        group = self._world.group
        part = block.part(group.rank)
        if self._coder:
            self._reduce_of(block, self._coder)(flat)
        elif block.owner is not None:
            self._lane.all_reduce(flat)
        else:
            own = torch.empty(part.stop - part.start, dtype=flat.dtype)
            self._lane.reduce_scatter(flat, own)
            self.sums[id(block)] = own
            self.give_back(block, flat)
            return
        if block.owner == group.rank:
            self.sums[id(block)] = flat
            return
        self.sums[id(block)] = flat[part].clone()
        self.give_back(block, flat)

    def _reduce_of(self, block: Block, coder: Coder) -> Reduce:
        if id(block) not in self._reduces:
            reducer = Reducer(coder, alone=False)
            named = [(self._name_of(s.parameter), s) for s in block.spans]
            pieces = [Piece(name, s.place, id(s.parameter), rows_of(s.parameter)) for name, s in named]
            reducer.add(0, block.dtype, block.numel, pieces)
            self._reduces[id(block)] = reducer.through(self._lane)
        return self._reduces[id(block)]


def _kind(block: Block) -> tuple[int, torch.dtype, bool]:
    return block.numel, block.dtype, block.device.type == "cuda"
