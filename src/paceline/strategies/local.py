"""Local steps: every member trains by itself and agrees with the others every H steps (a round).

    step          the optimizer's own, on this member's gradients: nothing travels
    every H       difference = weights of the last round − weights now
                  → codec, with what it left unsaid before → average over the members
                  → gradient of the outer optimizer, on the weights of the last round → weights of this round
    with overlap  fragment by fragment, while training goes on; see `schedule`
    with inner    all-reduce at each step between the members of a site, which count as one member here; see `sites`

    local SGD     outer SGD at rate 1 without momentum: weights become the members' average           [1]
    post-local    all-reduce for the first `warmup` steps, local SGD then                              [2]
    DiLoCo        AdamW inside, Nesterov's momentum outside                                            [3]
    SparseLoCo    e ← 0.95·e + difference; chunked top-k of e in two bits, e keeps the rest; rate 1    [4]

Between rounds the run's weights are those of the last round: they are what `run.evaluate` measures and what the model
in a checkpoint has. What members have learnt since is each one's own, and so is the state of their optimizers; both are
in checkpoints too. When the last epoch ends, a round is closed early, so that nothing of it is lost.

[1] Stich, Local SGD converges fast and communicates little, 2018. [2] Lin and others, Don't use large mini-batches, use
local SGD, 2018. [3] Douillard and others, DiLoCo, 2023. [4] Sarfi and others, SparseLoCo, 2025.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from paceline.codecs import Codec
from paceline.core.errors import ConfigError
from paceline.core.words import finite, split, whole
from paceline.strategies.allreduce import FEEDBACK, AllReduce, check_feedback
from paceline.strategies.attending import Attending
from paceline.strategies.averaging import Averaging, make_average
from paceline.strategies.hosting import Guests, make_guests
from paceline.strategies.outer import Make, Outer, make_outer
from paceline.strategies.plan import Plan
from paceline.strategies.reducers import Auto, LowRank, Method
from paceline.strategies.replicas import has_thawed, is_trained, make_equal, names_of
from paceline.strategies.round_state import RoundState
from paceline.strategies.rounds import Rounds, refuse_threads
from paceline.strategies.schedule import Every, Overlap, make_every, make_overlap
from paceline.strategies.sites import Sites, inner_words, make_inner
from paceline.strategies.strategy import World
from paceline.strategies.unsaid import readings_of


class Local:
    """Members agree every H steps of the first optimizer.

    Args:
        every: H; a number, "50..400" for one that grows, or "drift(0.01)" for one that follows how far members come
            apart (`paceline.strategies.schedule`).
        outer: what is done with the average difference: "none" takes it as it is, "nesterov(lr=0.7, momentum=0.9)"
            (DiLoCo), any other of torch.optim in words, or a function of parameters.
        average: mean, samples, tokens, loss(temperature=1), trimmed(count=1), median (`paceline.strategies.averaging`).
        codec: what travels instead of the differences; behind it, back=, feedback= and decay= (by which what is unsaid
            is multiplied before each round) may be said: "topk(0.015625, values=2bit), decay=0.95".
        overlap: so many steps after its sending a fragment is mixed in, 0: everyone waits; or an `Overlap`.
        warmup: so many first steps are taken together, by all-reduce.
        inner: "allreduce", or an `AllReduce`: members of one site (a host, or those that have the same label site-NAME)
            take their steps together; "none": every member takes its own.
        quorum: with -n MIN:MAX, once so many members are at a round, the others have `grace_s` to come; who does not is
            left out of it, trains on, and brings what it has learnt to the next. 0: all are waited for.
        grace_s: seconds.
        guests: at most so many at a time may call, and 0: none; or "guests(8, at='10.0.0.1:7000')"
            (`paceline.strategies.hosting`).
    """

    forgives = False
    owes = False

    def __init__(
        self,
        every: Every | int | str = 100,
        outer: Outer | Make | str | None = "none",
        average: Averaging | str = "mean",
        codec: Codec | LowRank | str | None = "none",
        overlap: Overlap | int | str = 0,
        warmup: int = 0,
        inner: AllReduce | str | None = "none",
        quorum: int = 0,
        grace_s: float = 10.0,
        guests: Guests | int | str = 0,
    ) -> None:
        if not whole(quorum) or quorum < 0:
            raise ConfigError(f"quorum={quorum!r}: a whole number of members is needed, such as 3, or 0 for all")
        if not finite(grace_s) or grace_s < 0:
            raise ConfigError(f"grace_s={grace_s!r}: seconds are needed, such as 10")
        if not whole(warmup) or warmup < 0:
            raise ConfigError(f"warmup={warmup!r}: a whole number of steps is needed, such as 1000, or 0")
        self.plan = Plan(
            every=make_every(every),
            outer=make_outer(outer),
            average=make_average(average),
            overlap=make_overlap(overlap),
            method=Method(),
            quorum=quorum,
            grace_s=float(grace_s),
            guests=make_guests(guests),
        )
        self.plan.overlap.check(self.plan.every)
        self.plan.guests.check(self.plan.average, self.plan.overlap)
        self.take(codec)
        self.warmup = warmup
        self._warm: AllReduce | None = AllReduce() if warmup else None  # None: members train apart
        self._inner = make_inner(inner)
        self._inner_words = inner_words(self._inner)
        self._sites: Sites | None = None  # with an inner strategy
        self._steps = 0  # until they do
        self._world: World | None = None
        self._rounds: Rounds | None = None
        self._state: RoundState | None = None
        self._attending: Attending | None = None  # where members come and go
        self._shown = False  # models hold what the run has agreed on
        self._models: list[torch.nn.Module] = []  # each once
        self._pairs: list[tuple[torch.nn.Module, torch.optim.Optimizer]] = []
        self._owned: set[int] = set()  # ids of parameters
        self._drawn = 0.0  # samples, at the last step
        self._waited_s = 0.0  # within the site, until then

    def take(self, codec: Codec | LowRank | Auto | str | None) -> None:
        """Send differences by this codec."""
        feedback, decay, back = None, 1.0, None
        if isinstance(codec, str):
            codec, said = split(codec, ("back", "feedback", "decay"), "codec")
            back = said.get("back")
            feedback = check_feedback(FEEDBACK.get(said.get("feedback", "None"), said.get("feedback")))
            try:
                decay = float(said.get("decay", 1.0))
            except ValueError:
                decay = math.nan
            if not finite(decay) or not 0 <= decay <= 1:
                raise ConfigError(f"codec {codec}, decay={said['decay']}: from 0 to 1, such as 0.95")
        method = Method.of(codec, back)
        if decay != 1.0 and method.codec is None:
            raise ConfigError(f"codec {codec}, decay={decay}: without a codec nothing is left unsaid that could decay")
        if isinstance(method.codec, Auto):
            raise ConfigError("codec auto tries step after step, and rounds are far apart: name a codec")
        if getattr(method.codec, "momentum", 0.0):
            raise ConfigError(
                f"codec {method.words} is for gradients, whose momentum it keeps: use topk for differences"
            )
        if self.plan.average.combine and (isinstance(method.codec, LowRank) or method.back):
            words = self.plan.average.words
            raise ConfigError(
                f"average={words} looks at each member's values, and with codec {method.words} only sums travel: use "
                "another codec, without back="
            )
        self.plan = replace(self.plan, method=method, feedback=feedback, decay=decay)

    @property
    def options(self) -> dict[str, Any]:
        """In words, as a user would give them."""
        return {**self.plan.options, "warmup": self.warmup, "inner": self._inner_words}

    # ---- the contract

    def attach(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, world: World) -> None:
        if self._rounds is None:
            self._world = world
            mine = ", ".join(f"{key}={value}" for key, value in self.options.items())
            for rank, words in enumerate(world.do(lambda group: group.exchange(mine.encode()))):
                if words != mine.encode():
                    raise ConfigError(
                        f"member {world.group.rank} trains by {mine}, but member {rank} by {words.decode()}"
                    )
            self._sites = Sites(world) if self._inner else None
            self._refuse_guests_of_one_site(world)
            self._rounds = Rounds(self.plan, world, self._sites)
            self._state = RoundState(self._rounds)
            self._say_of_sites(world)
            if world.elastic:
                self._attending = Attending(self._rounds, world)
        new = not any(m is model for m in self._models)
        if self._warm:
            self._warm.attach(model, optimizer, world)
        self._adopt(model, optimizer, dict(model.named_buffers()) if new else {})
        if new:
            self._models.append(model)
            self._rounds.movers.add(model, len(self._models))
        self._pairs.append((model, optimizer))
        self._rounds.optimizers.append(optimizer)
        if self._inner and self._sites and not self._warm:
            self._inner.attach(model, optimizer, self._sites.inside)

    def extend(self, optimizer: torch.optim.Optimizer) -> None:
        if self._warm:
            self._warm.extend(optimizer)
        for model, known in self._pairs:
            if known is optimizer:
                self._adopt(model, optimizer, {})
        if self._sums and not self._warm:
            self._sums.extend(optimizer)

    def reduced(self) -> None:
        if self._sums:
            self._sums.reduced()

    def finish(self, optimizer: torch.optim.Optimizer) -> bool:
        """A batch of fillers, which only keeps this member in step, teaches nothing."""
        self._take_thawed()
        if self._warm:
            return self._warm.finish(optimizer)
        if self._inner and self._sites and self._sites.inside.group.size > 1:
            return self._inner.finish(optimizer) and self._sites.inside.weighed > 0  # of the site
        tally = self._now[0].tally
        return tally.weight > 0 or tally.drawn > self._drawn

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        world, rounds = self._now
        if optimizer is not rounds.optimizers[0]:
            return
        self._drawn = world.tally.drawn
        if self._warm is None:
            if self._sites and self._sites.inside is not world:
                world.waited_s += self._sites.inside.waited - self._waited_s
                self._waited_s = self._sites.inside.waited
                world.sent_bytes = rounds.sent_bytes
            rounds.stepped()
            if self.due:
                self.attend(between=False)
            return
        self._steps += 1
        if self._steps >= self.warmup:
            self._part(rounds)

    def together(self, *, keep: bool = False, end: bool = False) -> None:
        if self._rounds and not self._warm and not self._rounds.elastic:
            self._rounds.together(end=end)

    @contextmanager
    def showing(self) -> Iterator[None]:
        rounds = None if self._warm or self._shown else self._rounds
        if rounds:
            rounds.show()
            self._shown = True
        try:
            yield
        finally:
            if rounds:
                rounds.hide()
                self._shown = False

    def cleared(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        if self._sums:
            self._sums.cleared(optimizer)

    def reading(self) -> Mapping[int, Sequence[int]]:
        refuse_threads(self._rounds)
        return self._inner.reading() if self._inner else {}

    def rest(self) -> None:
        pass  # it is always dealt as much as the others

    def wake(self) -> None:
        pass  # it never rests

    def regroup(self) -> None:
        if self._rounds:
            self._rounds.unform()

    # ---- where members come and go

    def attend(self, *, between: bool = True) -> None:
        """Hold a round, or have its outcome from others who did; see `attending`."""
        assert self._attending is not None
        self._attending.attend(between=between)

    def work(self) -> dict[str, Any]:
        """What this member has learnt since the last round that it was in."""
        rounds = self._now[1]
        assert self._state is not None
        if self._shown:
            rounds.hide()
        work = self._state.work()
        if self._shown:
            rounds.show()
        return work

    def take_over(self, work: Mapping[str, Any] | None, *, included: bool) -> None:
        """Go on from what was loaded, which others have agreed on: with this member's part in it, or without."""
        assert self._state is not None
        assert self._attending is not None
        self._take_thawed(loaded=True)
        self._state.take_over(work)
        self._attending.end(counted=included)
        if self._shown:
            self._now[1].show()

    def take_own(self, states: Sequence[dict[str, Any]]) -> None:
        """As `load_own_state`, after others' state was taken over."""
        assert self._state is not None
        self._state.load_own([state["rounds"] for state in states if state.get("rounds")])

    @property
    def due(self) -> bool:
        """Whether this member has taken the steps of a round."""
        return bool(self._attending and self._attending.due)

    @property
    def rounds(self) -> int:
        """So many were held, or came to nothing but a meeting."""
        return self._rounds.commits if self._rounds else 0

    def refuse_elastic(self, least: int, most: int) -> None:
        """Say what of this is not for members that come and go, as few and as many as these."""
        self.plan.refuse_elastic(least, most, warmup=self.warmup, inner=self._inner_words)

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        return {
            "steps": self._steps,
            "warm": self._warm.state_dict() if self._warm else {},
            "inner": self._inner.state_dict() if self._inner else {},
            "rounds": self._state.common() if self._state else {},
            "guests": self._rounds.hosting.state() if self._rounds and self._rounds.hosting else {},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """One that another strategy has saved begins rounds, and warm-up, anew."""
        self._steps = state.get("steps", 0)
        if self._warm and state.get("warm"):
            self._warm.load_state_dict(state["warm"])
        if self._inner and state.get("inner"):
            self._inner.load_state_dict(state["inner"])
        if self._state:
            self._state.load_common(state.get("rounds", {}))
        if self._rounds and self._rounds.hosting:
            self._rounds.hosting.load(state.get("guests", {}))

    def own_state(self) -> dict[str, Any]:
        return {
            "warm": self._warm.own_state() if self._warm else {},
            "inner": self._inner.own_state() if self._inner else {},
            "rounds": self._state.own() if self._state else {},
        }

    def load_own_state(self, states: Sequence[dict[str, Any]]) -> None:
        if self._rounds is None or self._state is None:
            return
        self._take_thawed(loaded=True)
        if self._warm and self._steps >= self.warmup:
            self._part(self._rounds)
        if self._warm:
            self._warm.load_own_state([state["warm"] for state in states if state.get("warm")])
        if self._inner and not self._warm:
            self._inner.load_own_state([state["inner"] for state in states if state.get("inner")])
        self._state.load([state["rounds"] for state in states if state.get("rounds")])

    def readings(self) -> dict[str, Any]:
        rounds = self._rounds
        if rounds is None or rounds.idle:
            return {}
        coders = [part.coder for part in rounds.parts if part.coder and part.coder.method.codec]
        guests = rounds.hosting.readings() if rounds.hosting else {}
        return {**readings_of(coders), "rounds": rounds.count, "every": rounds.length, "drift": rounds.drift, **guests}

    def close(self, *, failed: bool = False) -> None:
        for sums in (self._warm, self._inner):
            if sums:
                sums.close(failed=failed)
        if self._rounds:
            self._rounds.close()

    # ---- inside

    @property
    def _now(self) -> tuple[World, Rounds]:
        assert self._world is not None
        assert self._rounds is not None
        return self._world, self._rounds

    def _part(self, rounds: Rounds) -> None:
        """Warm-up is over, and all are equal: from now on each trains by itself."""
        if self._warm:
            self._warm.detach()
            self._warm = None
            for model, optimizer in self._pairs if self._inner and self._sites else ():
                self._inner.attach(model, optimizer, self._sites.inside)  # type: ignore[union-attr]
        rounds.reset()

    @property
    def _sums(self) -> AllReduce | None:
        """What adds up gradients now."""
        return self._warm or self._inner

    def _refuse_guests_of_one_site(self, world: World) -> None:
        """There are no rounds between sites then, in which the first member could tell the others what guests bring."""
        if self.plan.guests.most and self._sites and self._sites.count == 1 < world.group.size:
            raise ConfigError(
                f"guests={self.plan.guests.words} with inner={self._inner_words}: all {world.group.size} members are "
                "one site, so that there are no rounds in which guests could take part; leave inner out, or make two "
                "sites with --label site-NAME"
            )

    def _say_of_sites(self, world: World) -> None:
        if self._sites and self._sites.count == 1 < world.group.size:
            world.tell(
                f"inner={self._inner_words}: all {world.group.size} members are one site, so they only all-reduce, and "
                "there are no rounds for every=, outer= and codec= to act on. Make two sites with --label site-NAME"
            )
        elif self._sites and self._sites.count == world.group.size > 1:
            world.tell(
                f"inner={self._inner_words} has no effect: each member is a site of its own. Several on a host are one "
                "site, and so are those with the same --label site-NAME"
            )

    def _take_thawed(self, *, loaded: bool = False) -> None:
        """Take over what is trained and was frozen; `loaded`: it is equal on all who have loaded it."""
        for model, optimizer in self._pairs:
            if has_thawed(optimizer, self._owned):
                self._adopt(model, optimizer, {}, equal=loaded)

    def _adopt(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        buffers: dict[str, torch.Tensor],
        *,
        equal: bool = False,
    ) -> None:
        """Take over the parameters that are new; all start as on the first member."""
        world, rounds = self._now
        names, new = names_of(model), {}
        for i, group in enumerate(optimizer.param_groups):
            for j, p in enumerate(group["params"]):
                if id(p) not in self._owned and is_trained(p):  # what is frozen is the same on all, until it thaws
                    new[names.get(id(p), f"optimizer.{i}.{j}")] = p
        mine = {id(p) for p in new.values()}
        others = {names[id(p)]: p for p in model.parameters() if id(p) not in self._owned | mine}
        if not self._warm and not equal:  # which has made them equal
            world.do(lambda group: make_equal(group, new | others, buffers))
        self._owned |= mine
        rounds.adopt(list(new.items()))
        if rounds.hosting:
            rounds.hosting.keep_frozen(new | others)
