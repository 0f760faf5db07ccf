"""What of a run is the same on all members, and how one of them gets it from another: models, optimizers, loaders, what
the user tracks, and the place in the epochs.

A state is always as of the last committed step. Where a group breaks in the middle of an iteration, its step is
dropped: until the loop asks for its next batch nothing that it does counts (`World.dropped`), and then the state is put
back, so that what the rest of the iteration did (a scheduler's step) is undone and its batches are drawn again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline.checkpoint import pack, unpack
from paceline.data import Loader
from paceline.strategies import Strategy, World
from paceline.train.meter import Meter
from paceline.train.saving import Saver, Stateful
from paceline.transport.group import Group


class Replica:
    """This member's, in an elastic run."""

    def __init__(
        self,
        *,
        world: World,
        strategy: Strategy,
        saver: Saver,
        meter: Meter,
        loaders: list[Loader],
        seed: int,
        on_group: Callable[[Group], object],
    ) -> None:
        self.epoch_step = 0  # steps before the epoch under way
        self.saving = False  # all have agreed to save between these two steps
        self._world = world
        self._strategy = strategy
        self._saver = saver
        self._meter = meter
        self._loaders = loaders
        self._seed = seed
        self._on_group = on_group
        self._held: bytes | None = None  # the state to go on from when the loop asks for its next batch
        self._fresh = True  # nothing was ever restored or committed here

    @property
    def step(self) -> int:
        return self._meter.step

    @property
    def busy(self) -> bool:
        return bool(self._world.passed) or self._world.dropped or any(loader.out for loader in self._loaders)

    def state(self) -> bytes:
        if self._held is not None:
            return self._held
        parts = {
            name: part.committed() if isinstance(part, Loader) else part.state_dict()
            for name, part in self._saver.parts.items()
        }
        return pack({"parts": parts, "place": [self._meter.step, self._meter.epoch, self.epoch_step]})

    def committed(self) -> None:
        """A step of the first optimizer was taken: what was drawn for it counts."""
        self._world.passed = 0
        self._fresh = False
        for loader in self._loaders:
            loader.mark()

    def regroup(self, group: Group, state: bytes | None) -> None:
        busy = self.busy
        if busy and state is None:
            state = self.state()
        self._on_group(group)
        self._world.passed, self._world.dropped, self._world.moving = 0, busy, False
        self._strategy.regroup()
        self._held = state
        if busy:
            return
        if state is not None:
            self.restore()
        else:
            for loader in self._loaders:
                loader.go_on(loader.committed(), group.rank, group.size)

    def restore(self) -> None:
        """Between two steps: put back what is held, if something is."""
        data, self._held = self._held, None
        self._world.dropped = False
        if data is None:
            return
        state = unpack(memoryview(data))
        group = self._world.group

        def put(part: Stateful, own: dict[str, Any]) -> None:
            if isinstance(part, Loader):
                part.go_on(own, group.rank, group.size)
            else:
                part.load_state_dict(own)

        self._saver.restore(state["parts"], put)
        self._meter.step, self._meter.epoch, self.epoch_step = state["place"]
        self._world.passed = 0
        if self._fresh:
            torch.manual_seed(self._seed * 1_000_003 + self._meter.step * 1009 + group.rank)
        self._fresh = False
