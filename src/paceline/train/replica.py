"""What of a run is the same on all members, and how one of them gets it from another: models, optimizers, loaders, what
the user tracks, and the place in the epochs.

A state is always as of the last committed step. Where a group breaks in the middle of an iteration, its step is
dropped: until the loop asks for its next batch nothing that it does counts (`World.dropped`), and then the state is put
back, so that what the rest of the iteration did (a scheduler's step) is undone and its batches are drawn again.

A newcomer gets at once what is light (`light`), and the rest while the others compute. Its turn counts for nothing but
takes part in the exchange; before its step the parameters must be there (`before_step`), and get the same sums as the
others'. Until that step is committed the others deal out batches among themselves; the newcomer is handed those of the
first, so that all loaders come equally far.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from paceline.checkpoint import Coming, Lent, Pipe, digest, pack, seed_newcomer, unpack
from paceline.data import Loader
from paceline.strategies import Strategy, World
from paceline.train import again, light
from paceline.train.accounts import Accounts
from paceline.train.body import Healing
from paceline.train.meter import Meter
from paceline.train.saving import Saver, Stateful
from paceline.transport.group import Group


class Replica:
    """This member's, in an elastic run whose members take every step together."""

    apart = False
    even = False  # it does not matter here

    def __init__(
        self,
        *,
        world: World,
        strategy: Strategy,
        saver: Saver,
        meter: Meter,
        loaders: list[Loader],
        seed: int,
        accounts: Accounts,
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
        self._accounts = accounts
        self._on_group = on_group
        self._held: bytes | None = None  # the state to go on from when the loop asks for its next batch
        self._fresh = True  # nothing was ever restored or committed here
        self._healing: Healing | None = None  # newcomers that have not taken a step yet
        self._stepped = False  # since they came
        self._lent: Lent | None = None  # to them, by this member
        self._coming: Coming | None = None  # to this one

    @property
    def step(self) -> int:
        return self._meter.step

    @property
    def busy(self) -> bool:
        return bool(self._world.passed) or self._world.dropped or any(loader.out for loader in self._loaders)

    @property
    def outdated(self) -> bool:
        return self._saver.newest > self.step

    @property
    def waits(self) -> bool:
        return self._coming is not None

    @property
    def healed(self) -> Healing | None:
        return self._healing if self._stepped else None

    def state(self) -> bytes:
        return self._held if self._held is not None else pack({**self._state(), "accounts": self._accounts.state()})

    def digest(self) -> bytes:
        return digest(self._state())

    def _state(self) -> dict[str, Any]:
        parts = {
            name: part.committed() if isinstance(part, Loader) else part.state_dict()
            for name, part in self._saver.parts.items()
        }
        return {"parts": parts, "place": [self._meter.step, self._meter.epoch, self.epoch_step]}

    def committed(self) -> None:
        """A step of the first optimizer was taken: what was drawn for it counts."""
        self._world.passed = 0
        self._world.tally.commit()
        self._fresh = False
        self._stepped = self._healing is not None
        for loader in self._loaders:
            loader.mark()

    # ---- another group

    def regroup(self, group: Group, state: bytes | None, healing: Healing | None = None, *, even: bool = False) -> None:
        busy = self.busy
        if busy and state is None:
            state = self.state()
        self._healing, self._stepped, self._coming = healing, False, None
        if not healing or group.rank != healing.source:
            self._lent = None
        self._on_group(group)
        self._world.passed, self._world.dropped, self._world.moving = 0, busy, False
        self._world.tally.rest(self._idle)
        self._strategy.regroup()
        self._held = state
        if busy:
            return
        if state is not None:
            self.restore()
        else:
            self._deal_anew()

    def restore(self) -> None:
        """Between two steps: put back what is held, if something is."""
        data, self._held = self._held, None
        self._world.dropped = False
        if data is None:
            return
        state = self._opened(data)
        self._saver.restore(state["parts"], self._put)
        self._accounts.load(state["accounts"])
        self._world.tally.drop()
        self._meter.step, self._meter.epoch, self.epoch_step = state["place"]
        self._world.passed = 0
        if self._fresh:
            seed_newcomer(self._seed, self._meter.step, self._world.group.rank)
        self._fresh = False
        if "late" in state:
            assert self._healing is not None
            assert self._healing.pipe is not None
            self._coming = Coming(state["late"], self._healing.pipe, self._world.limit_s)

    def draw_again(self) -> None:
        """A turn for nothing begins where the next one will, lest it come to the end of an epoch that has more."""
        held = self._held
        if held is None:
            return
        self.restore()
        self._held, self._world.dropped = held, True

    def put_back(self) -> None:
        """A step was dropped: what the loop looks at in the rest of its turn is as of the last commit, but for batches.
        What it changes there is put back too, when it asks for its next one."""
        if self._held is None:
            return
        state = self._opened(self._held)

        def put(part: Stateful, own: dict[str, Any]) -> None:
            if not isinstance(part, Loader):
                part.load_state_dict(own)

        self._saver.restore(state["parts"], put)

    def _opened(self, data: bytes) -> dict[str, Any]:
        state: dict[str, Any] = unpack(memoryview(data))
        again.check_same(state["parts"], self._saver.parts)
        return state

    def _put(self, part: Stateful, own: dict[str, Any]) -> None:
        if isinstance(part, Loader):
            rank, size = self._seat
            part.go_on(own, rank, size, idle=self._idle)
        elif self._idle:
            light.load_light(part, own)
        else:
            part.load_state_dict(own)

    def _deal_anew(self) -> None:
        rank, size = self._seat
        for loader in self._loaders:
            terms = loader.terms
            if not self._healing or (terms.rank, terms.size, terms.widths) != (rank, size, ()):
                loader.go_on(loader.committed(), rank, size, idle=self._idle)

    @property
    def _idle(self) -> bool:
        return self._healing is not None and self._world.group.rank in self._healing.idle

    @property
    def _seat(self) -> tuple[int, int]:
        """Rank and number of those among whom batches are dealt out; a newcomer is handed what the first one gets."""
        group = self._world.group
        idle = self._healing.idle if self._healing else ()
        return 0 if self._idle else group.rank - sum(r < group.rank for r in idle), group.size - len(idle)

    # ---- newcomers

    def lend(self, pipes: list[Pipe]) -> bytes:
        now, late = {}, {}
        state = self._state()
        for name, own in state["parts"].items():
            now[name], heavy = light.split(name, self._saver.parts[name], own)
            if heavy is not None:
                late[name] = heavy
        self._lent = Lent(late, pipes)
        more = {"place": state["place"], "accounts": self._accounts.state()}
        return pack({"parts": now, **more, "late": self._lent.head})

    def before_step(self) -> None:
        """The weights are going to change: what is on its way must be there, or be kept as it is."""
        if self._lent:
            self._lent.keep()
        self.arrive()

    def arrive(self) -> None:
        if self._coming is None:
            return
        began, before = time.monotonic(), self._world.status.what
        self._world.status.set("healing")
        late = self._coming.wait()
        for name, own in late.items():
            light.load_heavy(self._saver.parts[name], own)
        self._coming = None
        self._world.status.set(before)
        self._world.waited_s += time.monotonic() - began

    def settled(self) -> None:
        self._healing, self._stepped, self._lent = None, False, None
        self._world.tally.rest(False)
        self._deal_anew()
