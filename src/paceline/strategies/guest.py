"""A guest: a small or unreliable machine that trains by itself and calls a run now and then. It is no member of it.

    begin     fetch the weights of the run's last round
    step      the optimizer's own
    every H   call: bring what was learnt since (`luggage`), fetch the newest weights, go on from them
              no link, or no bytes left in this hour (`allowance`): train on, and call later
    end       try to bring the rest, for a limited time

It is a run of one with its own data and checkpoints. It dials the run (`hosting` is the other side) and is never
dialled: it opens no port. Training waits while it calls, and every wait has a limit.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from paceline.core.errors import ConfigError
from paceline.core.words import finite, whole
from paceline.server.outside import calls as c
from paceline.server.outside.calling import Where
from paceline.strategies.allowance import Allowance
from paceline.strategies.hosting import digest
from paceline.strategies.luggage import Luggage
from paceline.strategies.replicas import names_of
from paceline.strategies.strategy import World
from paceline.strategies.trips import Trips, Work


class Guest:
    """Trains alone, and brings what it has learnt to a run that has `guests`.

    Args:
        at: the run's address, host:port, with its token in PACELINE_GUEST_TOKEN; or a copy of its guests.json.
        every: steps of the first optimizer between two calls, at least.
        codec: what travels instead of differences; "none": float32.
        bytes_per_hour: that may go over the link, both ways together; None: any number.
        weights: the code of the run's weights, on their way here: bf16, quantize(8) or none.
        wait_s: after it has brought something, it waits so long for the round that has it.
        last_s: at the end it tries for so long to bring the rest.
    """

    forgives = False
    owes = False

    def __init__(
        self,
        at: str,
        every: int = 50,
        codec: str = "topk(0.015625, values=2bit)",
        bytes_per_hour: float | None = None,
        weights: str = "bf16",
        wait_s: float = 0.0,
        last_s: float = 60.0,
    ) -> None:
        if not whole(every) or every < 1:
            raise ConfigError(f"guest(every={every!r}): a whole number of steps is needed, such as 50")
        for name, value, most in (("wait_s", wait_s, 240.0), ("last_s", last_s, 86400.0)):
            if not finite(value) or not 0 <= value <= most:
                raise ConfigError(f"guest({name}={value!r}): seconds, from 0 to {most:g}")
        self._where, self._code = Where(at), c.make_weights_code(weights)
        self.every, self._wait_s, self._last_s = every, wait_s, last_s
        self.allowance = Allowance(bytes_per_hour)
        self.options = {
            "at": at,
            "every": every,
            "codec": codec,
            "bytes_per_hour": bytes_per_hour,
            "weights": weights,
            "wait_s": wait_s,
            "last_s": last_s,
        }
        self.take(codec)
        self._world: World | None = None
        self._named: list[tuple[str, torch.nn.Parameter]] = []
        self._all: dict[str, torch.nn.Parameter] = {}  # also those that are not trained
        self._optimizers: list[torch.optim.Optimizer] = []
        self._work = Work()
        self._due = every  # steps, when it calls
        self.luggage: Luggage | None = None  # once training begins
        self.trips: Trips | None = None

    def take(self, codec: str) -> None:
        """Send differences by this codec."""
        self._codec = c.make_code(codec)
        self.options["codec"] = codec

    def refuse(self, members: int, *, elastic: bool) -> None:
        """Say what cannot be, of a run of so many members."""
        if members > 1 or elastic:
            raise ConfigError("a guest trains alone: start it with -n 1; several guests are several runs")
        self._where.check()

    # ---- the contract

    def attach(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, world: World) -> None:
        self.refuse(world.group.size, elastic=world.elastic)
        if self.trips:
            raise ConfigError("a guest's parameters are known when it begins: call run.optimizer before the loop")
        self._world, world.listen = world, self._work.heard
        names, known = names_of(model), {id(p) for _, p in self._named}
        for i, group in enumerate(optimizer.param_groups):
            for j, p in enumerate(group["params"]):
                if id(p) not in known and p.is_floating_point():
                    self._named.append((names.get(id(p), f"optimizer.{i}.{j}"), p))
        self._all.update({names[id(p)]: p for p in model.parameters()})
        self._optimizers.append(optimizer)

    def extend(self, optimizer: torch.optim.Optimizer) -> None:
        raise ConfigError("parameters cannot be added by a guest: give them to run.optimizer at once")

    def reduced(self) -> None:
        pass

    def finish(self, optimizer: torch.optim.Optimizer) -> bool:
        self._ready()
        return True

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer is not self._optimizers[0] or not self.trips:
            return
        self._work.steps += 1
        if self._work.steps >= self._due and self.trips.allowed:
            self.trips.attempt(wait_s=self._wait_s)
            # Where it came too soon, or in vain, it does not ask at every step from now on.
            self._due = self.every if not self._work.steps else self._work.steps + max(1, self.every // 4)

    def together(self, *, keep: bool = False, end: bool = False) -> None:
        if end and self.trips:
            self.trips.rest(self._last_s)

    @contextmanager
    def showing(self) -> Iterator[None]:
        yield

    def cleared(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        self._ready()

    def reading(self) -> Mapping[int, Sequence[int]]:
        raise ConfigError("a guest changes all weights when it calls, under the feet of threads: use one")

    def rest(self) -> None:
        pass  # nobody waits for it

    def wake(self) -> None:
        pass

    def regroup(self) -> None:
        raise ConfigError("a guest trains alone: start it with -n 1")

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def own_state(self) -> dict[str, Any]:
        if self._world is None or self.luggage is None or self.trips is None:
            return {}
        return {
            "luggage": self.luggage.state(),
            "allowance": self.allowance.state(),
            "trips": self.trips.state(),
            "work": self._work.state(self._world.tally),
            "due": self._due,
        }

    def load_own_state(self, states: Sequence[dict[str, Any]]) -> None:
        """Its own; where another strategy has saved, it begins as a new guest."""
        if not states or "luggage" not in states[0] or self._world is None:
            return
        state = states[0]
        luggage, trips = self._make(self._world)
        luggage.load(state["luggage"], self._world.tell)
        trips.load(state["trips"])
        self.allowance.load(state["allowance"])
        self._work.load(state["work"], self._world.tally)
        self._due = int(state["due"])

    def readings(self) -> dict[str, Any]:
        trips = self.trips
        if trips is None:
            return {}
        told = {"calls": trips.calls, "brought": trips.brought, "brought_samples": trips.brought_samples}
        return {**told, "called_bytes": self.allowance.total}

    def close(self, *, failed: bool = False) -> None:
        pass  # no connection outlives a call

    # ---- inside

    def _ready(self) -> None:
        """Training begins: with the run's weights, for which it waits."""
        if self.trips is not None or self._world is None:
            return
        _, trips = self._make(self._world)
        before = self._world.status.what
        self._world.status.set("waiting for the run's weights")
        trips.begin()
        self._world.status.set(before)

    def _make(self, world: World) -> tuple[Luggage, Trips]:
        trained = {id(p) for _, p in self._named}
        frozen = {name: p for name, p in self._all.items() if id(p) not in trained}
        self.luggage = luggage = Luggage([p for _, p in self._named], self._codec, self._code)
        self.trips = trips = Trips(
            self._where,
            luggage,
            self.allowance,
            self._work,
            world=world,
            name=self.trips.name if self.trips else secrets.token_hex(8),
            model=digest(self._named, frozen),
        )
        trips.optimizers = self._optimizers
        return luggage, trips
