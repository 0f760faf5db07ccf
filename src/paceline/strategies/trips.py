"""A guest's calls at its run: when it may make one, what it says in it, and what becomes of its work.

begin     until there are weights to begin with
attempt   one call; where the run is not reached, the next one is put off, further each time
rest      at the end, for a limited time
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.core.errors import AuthError, Interrupted, TimedOut
from paceline.server.outside import calls as c
from paceline.server.outside.calling import Calling, Where, call_bytes
from paceline.strategies.allowance import Allowance
from paceline.strategies.exchange import Heard
from paceline.strategies.luggage import Luggage
from paceline.strategies.strategy import Tally, World

_TOLD_S = 1.6  # the pause, at the beginning, with which a person is told what is waited for
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 300.0  # between two calls, where the run is not reached


class Work:
    """What was trained since the last difference was made."""

    def __init__(self) -> None:
        self.steps = 0
        self.heard = Heard("tokens", 1)
        self._drawn = 0.0  # samples, when it began

    def samples(self, tally: Tally) -> float:
        """Where they are not drawn by run.loader, steps count as samples."""
        return tally.drawn - self._drawn or float(self.steps)

    @property
    def tokens(self) -> float:
        return self.heard.since(0)[0]

    def begin(self, tally: Tally) -> None:
        self.steps, self._drawn = 0, tally.drawn
        self.heard.sent(0)

    def state(self, tally: Tally) -> list[Any]:
        return [self.steps, tally.drawn - self._drawn, self.heard.state()]

    def load(self, state: Sequence[Any], tally: Tally) -> None:
        self.steps, seen, heard = state
        self._drawn = tally.drawn - seen
        self.heard.load(heard)


class Trips:
    """Of one guest. `model`: a digest, which must be the run's."""

    def __init__(
        self, where: Where, luggage: Luggage, allowance: Allowance, work: Work, *, world: World, name: str, model: str
    ) -> None:
        self._where, self._luggage, self._allowance, self._work = where, luggage, allowance, work
        self._world, self.name, self._model = world, name, model
        self.optimizers: list[torch.optim.Optimizer] = []
        self.clock: Callable[[], float] = time.monotonic
        self.calls = self.brought = 0
        self.brought_samples = 0.0
        self._after = 0.0  # by the clock: no call before
        self._failures = 0  # one after another
        self._sparing = False  # the allowance has been mentioned
        allowance.check(self._whole_bytes)

    @property
    def _whole_bytes(self) -> int:
        return call_bytes(self._luggage.up_bytes + self._luggage.down_bytes)

    @property
    def owes(self) -> bool:
        """Whether there is something to bring."""
        luggage = self._luggage
        return luggage.round >= 0 and bool(self._work.steps or luggage.sent or luggage.samples)

    @property
    def allowed(self) -> bool:
        """Whether there may be a call now."""
        if self.clock() < self._after:
            return False
        wait_s = self._allowance.wait_s(self._whole_bytes)
        if wait_s and not self._sparing:
            self._sparing = True
            self._world.tell(
                f"bytes_per_hour={self._allowance.bytes_per_hour:g} permits the next call in {wait_s / 60:.0f} min: "
                "training goes on, with more steps between calls"
            )
        return not wait_s

    def begin(self) -> None:
        """Fetch weights to begin with."""
        limit_s = self._world.limit_s
        deadline, pause_s = time.monotonic() + limit_s, 0.2
        while True:
            why = "it has no weights to give yet"
            if wait_s := self._allowance.wait_s(self._whole_bytes):
                why = f"bytes_per_hour={self._allowance.bytes_per_hour:g} permits no call for {wait_s / 60:.0f} min"
            else:
                try:
                    self._call(fetch=True)
                except Interrupted as error:
                    why = str(error)
            if self._luggage.round >= 0:
                break
            if time.monotonic() + pause_s > deadline:
                raise TimedOut(
                    f"the run at {self._where.at} gave no weights to begin with for {limit_s:g} s (--wait-limit-s): "
                    f"{why}"
                )
            if pause_s >= _TOLD_S > pause_s / 2:
                self._world.tell(
                    f"the run at {self._where.at} gives no weights to begin with yet, and is asked again for up to "
                    f"{limit_s:g} s: {why}"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 5.0)

    def attempt(self, *, fetch: bool = True, wait_s: float = 0.0) -> None:
        """Call; where the run is not reached, say so once, and leave it alone for a while."""
        try:
            self._call(fetch=fetch, wait_s=wait_s)
        except (Interrupted, AuthError) as error:  # another run may listen there by now
            self._failures += 1
            pause_s = min(_FIRST_PAUSE_S * 2.0 ** (self._failures - 1), _LONGEST_PAUSE_S)
            self._after = self.clock() + pause_s
            if self._failures == 1:
                self._world.tell(
                    f"the run at {self._where.at} is not reached: training goes on, with calls later ({error})"
                )
            return
        if self._failures:
            self._world.tell(f"the run at {self._where.at} is reached again")
        self._failures = 0

    def rest(self, last_s: float) -> None:
        """Training is over: bring what is left, or say that it was not."""
        deadline, pause_s = time.monotonic() + last_s, 0.2
        why = f"the run was not ready for it within {last_s:g} s"
        while self.owes:
            wait_s = self._allowance.wait_s(call_bytes(self._luggage.up_bytes))
            if wait_s > max(0.0, deadline - time.monotonic()):
                why = f"bytes_per_hour={self._allowance.bytes_per_hour:g} permits no more now"
                break
            if not wait_s:
                self.attempt(fetch=False)
            if not self.owes or time.monotonic() + pause_s > deadline:
                break
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 5.0)
        if self.owes:
            self._world.tell(f"what was learnt last, in {self._work.steps} steps, is not brought to the run: {why}")

    # ---- one call

    def _call(self, *, fetch: bool, wait_s: float = 0.0) -> None:
        world, luggage = self._world, self._luggage
        began, before = time.monotonic(), world.status.what
        world.status.set("calling the run")
        self.calls += 1
        call = c.Call(guest=self.name, model=self._model, round=luggage.round)
        number = luggage.number
        calling, came = None, None
        try:
            with Calling(self._where, call, self._allowance.spend) as calling:
                self._bring(calling)
                said = luggage.number > number
                if fetch and (said or luggage.round < 0):
                    came = calling.fetch(luggage.code, luggage.numels, luggage.round, wait_s if said else 0.0)
                if came:
                    luggage.arrive(*came)
                    self._work.begin(world.tally)
        finally:
            if luggage.number > number and luggage.round >= 0 and not came:
                luggage.anchor_here()  # the next difference must not say it again
            world.waited_s += time.monotonic() - began
            world.sent_bytes += calling.sent_bytes if calling else 0
            world.status.set(before)

    def _bring(self, calling: Calling) -> None:
        luggage, reply, tally = self._luggage, calling.reply, self._world.tally
        if luggage.sent:
            self._settle(reply.taken >= luggage.sent.number)
        elif reply.taken > luggage.number:
            luggage.number = reply.taken
            self._drop("it has brought more than its checkpoint knows")
        if luggage.round < 0:
            return
        if not luggage.sound:
            for optimizer in self.optimizers:
                optimizer.state.clear()
            self._drop("its weights have become infinite or nan")
        elif reply.stale:
            self._drop(reply.why)
        elif reply.takes and self.owes:
            sent = luggage.make(self._work.samples(tally), self._work.tokens, self._world.seed)
            self._work.begin(tally)
            bring = c.Bring(
                number=sent.number,
                round=luggage.round,
                samples=sent.samples,
                tokens=sent.tokens,
                codec=luggage.codec.words,
                sizes=sent.sizes,
            )
            thanks = calling.bring(bring, sent.data)
            if thanks.stale:
                self._drop(thanks.why)
            else:
                self._settle(thanks.taken)

    def _settle(self, taken: bool) -> None:
        sent = self._luggage.sent
        if taken and sent:
            self.brought += 1
            self.brought_samples += sent.samples
        self._luggage.settle(taken)

    def _drop(self, why: str) -> None:
        round = self._luggage.round
        if round >= 0:
            self._world.tell(
                f"what was learnt since round {round} is left out: {why}; the run's weights take its place"
            )
        self._luggage.drop()
        self._work.begin(self._world.tally)

    # ---- state

    def state(self) -> list[Any]:
        return [self.name, self.calls, self.brought, self.brought_samples]

    def load(self, state: Sequence[Any]) -> None:
        self.name, self.calls, self.brought, self.brought_samples = state
