"""A guest: a small or unreliable machine that trains by itself and calls a run now and then. It is no member of it.

    begin     fetch the weights of the run's last round
    step      the optimizer's own
    every H   call: bring what was learnt since (`luggage`), fetch the newest weights, go on from them
              no link, or no bytes left in this hour (`allowance`): train on, and call later
    end       try to bring the rest, for a limited time

It is a run of one with its own data and checkpoints. It dials the run (`paceline.strategies.hosting` is the other side)
and is never dialled: it opens no port. Training waits while it calls, and every wait has a limit.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from paceline.core.errors import AuthError, ConfigError, Interrupted, TimedOut
from paceline.core.words import finite, whole
from paceline.server.outside import calls as c
from paceline.server.outside.calling import Calling, Where, call_bytes
from paceline.strategies.allowance import Allowance
from paceline.strategies.exchange import Heard
from paceline.strategies.hosting import digest
from paceline.strategies.luggage import Luggage
from paceline.strategies.replicas import names_of
from paceline.strategies.strategy import World

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 300.0  # between two calls, where the run is not reached


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
        for name, value in (("wait_s", wait_s), ("last_s", last_s)):
            if not finite(value) or value < 0:
                raise ConfigError(f"guest({name}={value!r}): seconds, 0 or more")
        self._where = Where(at)
        self.every, self._wait_s, self._last_s = every, wait_s, last_s
        self._code = c.make_weights_code(weights)
        self._clock: Callable[[], float] = time.monotonic
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
        self.name = secrets.token_hex(8)
        self._world: World | None = None
        self._named: dict[str, torch.nn.Parameter] = {}
        self._frozen: dict[str, torch.Tensor] = {}  # and those that are trained
        self._model = ""  # a digest of both
        self._optimizers: list[torch.optim.Optimizer] = []
        self._luggage: Luggage | None = None  # once training begins
        self._saved: dict[str, Any] = {}
        self._heard = Heard("tokens", 1)
        self._steps = 0  # since the last difference
        self._due = every  # steps, when it calls
        self._drawn = 0.0  # samples, then
        self._calls_after = 0.0  # by the clock, where the run was not reached
        self._failures = 0  # one after another
        self._sparing = False  # the allowance has been mentioned
        self.brought = self.calls = 0
        self.brought_samples = 0.0

    def take(self, codec: str) -> None:
        """Send differences by this codec."""
        self._codec = c.make_code(codec)
        self.options["codec"] = codec

    # ---- the contract

    def attach(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, world: World) -> None:
        if world.group.size > 1 or world.elastic:
            raise ConfigError("a guest trains alone: start it with -n 1; several guests are several runs")
        if self._luggage:
            raise ConfigError("a guest's parameters are known when it begins: call run.optimizer before the loop")
        self._world, world.listen = world, self._heard
        names = names_of(model)
        known = {id(p) for p in self._named.values()}
        number = len(self._optimizers)
        for i, group in enumerate(optimizer.param_groups):
            for j, p in enumerate(group["params"]):
                if id(p) not in known and p.is_floating_point():
                    self._named[f"{number}/{names.get(id(p), f'optimizer.{i}.{j}')}"] = p
        self._frozen.update({names[id(p)]: p for p in model.parameters()})
        self._optimizers.append(optimizer)

    def extend(self, optimizer: torch.optim.Optimizer) -> None:
        raise ConfigError("parameters cannot be added by a guest: give them to run.optimizer at once")

    def reduced(self) -> None:
        pass

    def finish(self, optimizer: torch.optim.Optimizer) -> bool:
        self._ready()
        return True

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer is not self._optimizers[0]:
            return
        self._steps += 1
        if self._steps >= self._due and self._clock() >= self._calls_after and self._affords():
            self._try_call(fetch=True)

    def together(self, *, keep: bool = False, end: bool = False) -> None:
        if end and self._luggage and self._owes:
            self._bring_the_rest()

    @contextmanager
    def showing(self) -> Iterator[None]:
        yield

    def cleared(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        self._ready()

    def reading(self) -> Mapping[int, Sequence[int]]:
        raise ConfigError("a guest changes all weights when it calls, under the feet of threads: use one")

    def rest(self) -> None:
        pass

    def wake(self) -> None:
        pass

    def regroup(self) -> None:
        raise ConfigError("a guest trains alone: start it with -n 1")

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def own_state(self) -> dict[str, Any]:
        if self._luggage is None:
            return {}
        return {
            "name": self.name,
            "luggage": self._luggage.state(),
            "allowance": self.allowance.state(),
            "place": [self._steps, self._due, self._world.tally.drawn - self._drawn if self._world else 0.0],
            "heard": self._heard.state(),
            "told": [self.brought, self.brought_samples, self.calls],
        }

    def load_own_state(self, states: Sequence[dict[str, Any]]) -> None:
        """Its own; that of another strategy is none: then it begins as a new guest."""
        if not states or "luggage" not in states[0] or self._world is None:
            return
        state = states[0]
        self._luggage = self._made()
        self._luggage.load(state["luggage"], self._world.tell)
        self.name = state["name"]
        self.allowance.load(state["allowance"])
        self._steps, self._due, seen = state["place"]
        self._drawn = self._world.tally.drawn - seen
        self._heard.load(state["heard"])
        self.brought, self.brought_samples, self.calls = state["told"]

    def readings(self) -> dict[str, Any]:
        return {
            "calls": self.calls,
            "brought": self.brought,
            "brought_samples": self.brought_samples,
            "called_bytes": self.allowance.total,
        }

    def close(self, *, failed: bool = False) -> None:
        pass

    # ---- inside

    @property
    def _now(self) -> tuple[World, Luggage]:
        assert self._world is not None
        assert self._luggage is not None
        return self._world, self._luggage

    def _made(self) -> Luggage:
        trained = {id(p) for p in self._named.values()}
        frozen = {name: p for name, p in self._frozen.items() if id(p) not in trained}
        self._model = digest([(name.partition("/")[2], p) for name, p in self._named.items()], frozen)
        luggage = Luggage(list(self._named.values()), self._codec, self._code)
        self.allowance.check(call_bytes(luggage.up_bytes + luggage.down_bytes))
        return luggage

    def _ready(self) -> None:
        """Training begins: with the run's weights, for which it waits."""
        if self._luggage is not None or self._world is None:
            return
        self._luggage, world = self._made(), self._world
        before = world.status.what
        world.status.set("waiting for the run's weights")
        deadline, pause_s = time.monotonic() + world.limit_s, 0.2
        while self._luggage.round < 0:
            why = "it has no weights to give yet"
            try:
                self._call(fetch=True)
            except AuthError:
                raise
            except Interrupted as error:
                why = str(error)
            if self._luggage.round >= 0:
                break
            if time.monotonic() + pause_s > deadline:
                raise TimedOut(
                    f"the run at {self._where.at} gave no weights to begin with for {world.limit_s:g} s "
                    f"(--wait-limit-s): {why}"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 5.0)
        self._drawn = world.tally.drawn
        world.status.set(before)

    @property
    def _owes(self) -> bool:
        """Whether there is something to bring."""
        _, luggage = self._now
        return luggage.round >= 0 and bool(self._steps or luggage.sent or luggage.samples)

    def _affords(self) -> bool:
        _, luggage = self._now
        wait_s = self.allowance.wait_s(call_bytes(luggage.up_bytes + luggage.down_bytes))
        if wait_s and not self._sparing:
            self._sparing = True
            self._tell(
                f"bytes_per_hour={self.allowance.bytes_per_hour:g} permits the next call in {wait_s / 60:.0f} minutes: "
                "training goes on, with more steps between calls"
            )
        return not wait_s

    def _try_call(self, *, fetch: bool) -> None:
        """Call; where the run is not reached, say so once and try again later."""
        try:
            self._call(fetch=fetch)
        except (Interrupted, AuthError) as error:  # another run may listen there by now
            self._failures += 1
            pause_s = min(_FIRST_PAUSE_S * 2.0 ** (self._failures - 1), _LONGEST_PAUSE_S)
            self._calls_after = self._clock() + pause_s
            if self._failures == 1:
                self._tell(f"the run at {self._where.at} is not reached ({error}): training goes on, and calls later")
            return
        if self._failures:
            self._tell(f"the run at {self._where.at} is reached again")
        self._failures = 0

    def _call(self, *, fetch: bool) -> None:
        world, luggage = self._now
        began, before = time.monotonic(), world.status.what
        world.status.set("calling the run")
        self.calls += 1
        call = c.Call(guest=self.name, model=self._model, round=luggage.round)
        made = False
        try:
            with Calling(self._where, call, self.allowance.spend) as calling:
                made = self._bring(calling)
                self._due = self._steps + self.every
                if made or luggage.round < 0:
                    wait_s = self._wait_s if made else 0.0
                    came = calling.fetch(self._code, luggage.numels, luggage.round, wait_s) if fetch else None
                    if came:
                        luggage.arrive(*came)
                        made = False
        finally:
            if made:
                luggage.anchor_here()
            world.waited_s += time.monotonic() - began
            world.sent_bytes = self.allowance.total
            world.status.set(before)

    def _bring(self, calling: Calling) -> bool:
        """Whether a difference was made, so that the next one must not say it again."""
        world, luggage = self._now
        reply = calling.reply
        if luggage.sent:
            self._settle(reply.taken >= luggage.sent.number)
        elif reply.taken > luggage.number:
            luggage.number = reply.taken
            self._drop("it has brought more than its checkpoint knows")
        if luggage.round < 0:
            return False
        if not luggage.sound:
            for optimizer in self._optimizers:
                optimizer.state.clear()
            self._drop("its weights have become infinite or nan")
        elif reply.stale:
            self._drop(reply.why)
        elif reply.takes and (self._steps or luggage.samples):
            samples = world.tally.drawn - self._drawn or float(self._steps)  # where they are not run.loader's
            sent = luggage.make(samples, self._heard.since(0)[0], world.seed)
            self._start_counting()
            thanks = calling.bring(
                c.Bring(
                    number=sent.number,
                    round=luggage.round,
                    samples=sent.samples,
                    tokens=sent.tokens,
                    codec=luggage.codec.words,
                    sizes=sent.sizes,
                ),
                sent.data,
            )
            if thanks.stale:
                self._drop(thanks.why)
                return False
            self._settle(thanks.taken)
            return True
        return False

    def _settle(self, taken: bool) -> None:
        _, luggage = self._now
        if taken and luggage.sent:
            self.brought += 1
            self.brought_samples += luggage.sent.samples
        luggage.settle(taken)

    def _drop(self, why: str) -> None:
        _, luggage = self._now
        self._tell(f"what was learnt since round {luggage.round} is left out: {why}; it goes on with the run's weights")
        luggage.drop()
        self._start_counting()

    def _start_counting(self) -> None:
        world, _ = self._now
        self._steps = 0
        self._drawn = world.tally.drawn
        self._heard.sent(0)

    def _bring_the_rest(self) -> None:
        """The last epoch is over."""
        _, luggage = self._now
        deadline, pause_s = time.monotonic() + self._last_s, 0.2
        why = f"it was not reached within {self._last_s:g} s"
        while self._owes:
            wait_s = self.allowance.wait_s(call_bytes(luggage.up_bytes))
            if wait_s > max(0.0, deadline - time.monotonic()):
                why = f"bytes_per_hour={self.allowance.bytes_per_hour:g} permits no more now"
                break
            if not wait_s:
                self._try_call(fetch=False)
            if not self._owes or time.monotonic() + pause_s > deadline:
                break
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 5.0)
        if self._owes:
            self._tell(f"what was learnt in the last {self._steps} steps was not brought to the run: {why}")

    def _tell(self, line: str) -> None:
        self._now[0].tell(line)
