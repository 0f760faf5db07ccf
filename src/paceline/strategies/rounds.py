"""The rounds of one run: what the local strategy does between two agreements and at one.

    stepped    count; mix in what is due, send what is due
    together   wait until all are here, and take part in what others still send

Everything here runs in the training thread but `_carry`, which is the exchange's. One exchange is under way at a time.
`Place` says where in its round a member is; with the anchors, the outer optimizer, what codecs have left unsaid and
this member's own weights, buffers and optimizers it is all there is to save (`round_state`). Where members come and go,
`attending` says when a round is held.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch

from paceline.core.errors import ConfigError, Interrupted, PacelineError, TimedOut
from paceline.strategies.anchors import SKETCH, Anchors
from paceline.strategies.averaging import Seen
from paceline.strategies.exchange import MEET, Alone, Exchange, Heard, Meeting, Note, Outcome
from paceline.strategies.hosting import make_hosting, share_of
from paceline.strategies.movers import Movers
from paceline.strategies.plan import Plan
from paceline.strategies.reducers import Coder, load
from paceline.strategies.schedule import Place
from paceline.strategies.sites import Sites
from paceline.strategies.strategy import World
from paceline.transport.group import Group


class Rounds:
    """Of one member, with the others of the world's group. All members make one with the same plan.

    `sites`: members of one site take the same steps, and count as one; None: each takes its own.
    """

    def __init__(self, plan: Plan, world: World, sites: Sites | None = None) -> None:
        self.parts: list[Anchors] = []
        self.movers = Movers()
        self.optimizers: list[torch.optim.Optimizer] = []
        self.count = 0
        self.commits = 0  # of those, and of times that members only met, where they come and go
        self.length = plan.every.least  # of the round under way
        self.hosting = make_hosting(plan.guests, world, plan.average)
        self.drift = 0.0  # of members from their mean in the last round, by the norm of the weights
        self.plan, self.world, self.cuts = plan, world, plan.overlap.cuts
        self.place = Place()
        self.drawn = [0.0] * self.cuts  # samples, when each fragment was sent
        self.spread = self.size = 0.0  # squares, of the fragments of this round so far
        self._under = False  # an exchange is
        self._sent_before = 0  # bytes, with groups that are gone
        self._told_bytes = 0  # to the world
        self.sites = sites
        self._group: Group | None = None  # for our exchanges alone; None: there is one member, or one site
        self._meeting: Meeting = Alone(plan.average, uneven=world.elastic)
        self.formed = False  # with the group that the world has now
        size = sites.count if sites else world.group.size
        if not world.elastic:
            try:
                plan.average.check(size)
            except ConfigError as error:
                if sites is None:
                    raise
                counted = f"the {world.group.size} members are {size} sites, each of which counts as one"
                raise ConfigError(f"{error}; {counted}") from None
            self.form()
            if size == 1 and plan.method.codec:
                one = "site" if sites and world.group.size > 1 else "member"
                world.tell(f"codec {plan.method.words} has no effect: this run has one {one}")
        self.heard = Heard(plan.average.hears, self.cuts) if plan.average.hears else None
        if self.heard:
            world.listen = self.heard

    def form(self) -> None:
        """Exchange with the group that the world has now; by all of its members together."""
        world, average = self.world, self.plan.average
        if (self.sites.count if self.sites else world.group.size) > 1:
            self._group = world.group.subgroup(range(world.group.size))
            assert self._group is not None
            self._group.barrier()  # what it stands on is made here, not in the thread of the exchange
            self._group.all_gather(torch.zeros(1))
            self._meeting = Exchange(self._group, average, self._carry, uneven=world.elastic)
        for part in self.parts:
            part.lay_out(self._group)
        self.formed = True

    def unform(self) -> None:
        """The world has another group."""
        self._meeting.close()
        for part in self.parts:
            part.let_go()
        self._sent_before = self.sent_bytes
        self._group, self._meeting = None, Alone(self.plan.average, uneven=self.elastic)
        self.formed = self._under = False

    @property
    def _held(self) -> list[Anchors | Movers]:
        return [*self.parts, self.movers]

    @property
    def elastic(self) -> bool:
        return self.world.elastic

    @property
    def alone(self) -> bool:
        return self._group is None

    @property
    def sent_bytes(self) -> int:
        sent = self._sent_before + (self._group.sent_bytes if self._group else 0)
        return sent + (self.sites.sent_bytes if self.sites else 0)

    @property
    def idle(self) -> bool:
        """One member that takes the average as it is trains plainly."""
        return self.alone and self.plan.outer.plain and not self.world.elastic and not self.hosting

    def adopt(self, named: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        """Parameters that are equal on all members."""
        named = [(name, p) for name, p in named if p.is_floating_point() or p.is_complex()]
        if not named or self.idle:
            return
        if self._under:
            self.collect()  # of those that were there when it was sent
        plan, coder = self.plan, None
        if self.world.elastic and self.formed:
            self.unform()  # there is room for them in the next round
        sites = self.sites if self._group else None
        group = sites.leaders if sites else self._group
        if (group or self.world.elastic) and (plan.method.codec or plan.average.combine):
            for device in {p.device for _, p in named}:
                load(plan.method, device)
            seed, combine = self.world.seed * 1009 + len(self.parts), plan.average.combine
            coder = Coder(plan.method, feedback=plan.feedback, seed=seed, tell=self.world.tell, combine=combine)
        near = sites.near if sites else None
        self.parts.append(Anchors(named, plan.outer, self.cuts, group, coder, plan.decay, near))
        if self.hosting:
            self.hosting.adopt(self.parts[-1])

    def reset(self) -> None:
        """All members are equal: rounds begin now."""
        for part in self._held:
            part.reset()
        for fragment in range(self.cuts):
            self._seen_from_now(fragment)

    # ---- while training

    def stepped(self) -> None:
        """This member has taken a step."""
        if self.idle:
            return
        place = self.place
        place.since += 1
        place.moved += 1
        if self.world.elastic:  # see `attending`
            return
        if place.arriving >= 0:
            place.left -= 1
            if place.left <= 0:
                self.mix()
        if place.since >= self._sent_at(place.next):
            place.arriving, place.left = place.next, self.plan.overlap.steps
            self.begin(self.note(place.next))
            self.advance(place.next)
            if not place.left:
                self.mix()
        if self.hosting:
            self.hosting.look(self.count)

    def together(self, *, end: bool) -> None:
        """Wait for all; at the end, close the round."""
        if self.idle:
            return
        place = self.place
        while True:
            if self._under:
                self.collect()  # anchors are the same everywhere then; weights follow when it is time
            self.begin(self.note(place.next)._replace(fragment=MEET))
            outcome = self.collect()
            if outcome.fragment == MEET:
                break
            self.mix()  # what came before
            place.arriving = outcome.fragment
            self.mix()
            self.advance(outcome.fragment)
        if end and any(note.steps or note.squares for note in outcome.notes):
            schedule = (self.length, self.drift)  # which a round that is cut short tells nothing of
            for fragment in range(self.cuts):
                self.mix()
                place.arriving = fragment
                self.begin(self.note(fragment))
                self.advance(fragment)
                self.mix(1.0)
            place.moved = 0
            self.length, self.drift = schedule

    def show(self) -> None:
        """Put what the run has agreed on in the place of what this member has."""
        for part in self._held if not self.idle else ():
            part.show()

    def hide(self) -> None:
        for part in self._held if not self.idle else ():
            part.hide()

    def close(self) -> None:
        self._meeting.close()
        if self.hosting:
            self.hosting.close()

    # ---- one exchange

    def _sent_at(self, fragment: int) -> int:
        """Steps into the round."""
        return self.length * (fragment + 1) // self.cuts

    def advance(self, fragment: int) -> None:
        """A fragment was sent."""
        place, last = self.place, fragment == self.cuts - 1
        place.next = 0 if last else fragment + 1
        place.since = 0 if last else self._sent_at(fragment)
        self._seen_from_now(fragment)

    def _seen_from_now(self, fragment: int) -> None:
        self.drawn[fragment] = self.world.tally.drawn
        if self.heard:
            self.heard.sent(fragment)

    def note(self, fragment: int) -> Note:
        """Put what this member has learnt into the buckets, and what it has to say of it."""
        world = self.world
        squares = sum(part.differ(fragment) for part in self.parts)
        sketch = sum((part.sketch(fragment) for part in self.parts), torch.zeros(SKETCH, dtype=torch.float64))
        changed = self.movers.note() if fragment == self.cuts - 1 else [False] * len(self.movers.now)
        total, count = self.heard.lately(fragment) if self.heard else (0.0, 0)
        seen = Seen(
            sound=math.isfinite(squares) and (not any(changed) or self.movers.sound),
            samples=world.tally.drawn - self.drawn[fragment],
            tokens=total,
            loss=total / count if count else math.nan,
        )
        return Note(
            fragment=fragment,
            seen=seen,
            steps=self.place.moved,
            squares=squares,
            sketch=tuple(sketch.tolist()),
            wish=world.wish,
            turn=world.tally.nominal,
            pace=world.pace,
            changed=tuple(changed),
            guests=self.hosting.close_round(squares) if self.hosting else (0.0, 0.0),
        )

    def begin(self, note: Note) -> None:
        self._under = True
        self._meeting.begin(note)

    def _carry(self, outcome: Outcome) -> None:
        """In the thread of the exchange."""
        assert self._group is not None
        sites, weights = self.sites, outcome.weights
        try:
            if sites:
                weights = sites.fold(weights)
            share = share_of(outcome.notes, self.plan.average.words == "tokens")
            for i, part in enumerate(self.parts):
                add = self.hosting.add(i, share) if self.hosting and share else None
                part.carry(outcome.fragment, weights[self._group.rank] * (1 - share), add)
            self.movers.carry(self._group, outcome.changed, weights, self.plan.average.combine)
        except Interrupted as error:
            for group in (sites.leaders, sites.near) if sites else ():
                if group:
                    group.abort(error)
            raise

    def collect(self) -> Outcome:
        """Wait for what is under way, and move the anchors."""
        world, began = self.world, time.monotonic()
        self._under = False
        try:
            outcome = self._meeting.end()
        except TimedOut as error:
            late = TimedOut(
                f"{error}. Members wait for the slowest one at each round of {self.length} steps: give them the time "
                "with --wait-limit-s, or fewer steps"
            )
            late.rank = error.rank
            raise late from None
        finally:
            world.waited_s += time.monotonic() - began
        world.sent_bytes += self.sent_bytes - self._told_bytes
        self._told_bytes = self.sent_bytes
        if outcome.fragment != MEET and not outcome.waits and not (outcome.empty and world.elastic):
            self._take_in(outcome)
        if self.hosting:
            self.hosting.settle(self.count, outcome.notes if outcome.fragment != MEET else None)
        return outcome

    def _take_in(self, outcome: Outcome) -> None:
        world, fragment, notes = self.world, outcome.fragment, outcome.notes
        last = fragment == self.cuts - 1
        if self.alone and last:
            self.movers.alone()
        if self.alone and self.hosting and (share := share_of(notes, self.plan.average.words == "tokens")):
            for i, part in enumerate(self.parts):
                part.blend(1 - share, self.hosting.add(i, share))
        for part in self.parts:
            self.size += part.apply(fragment)
        self.spread += outcome.spread
        # A checkpoint is taken before everyone's next batch, which has to be the same one.
        # Where members come and go, a round is where everything is the same anyway; at the end of an epoch one follows.
        same = all(note.fragment != MEET and note.turn == notes[0].turn for note in notes)
        if not all(note.stand.out for note in notes) if world.elastic else same:
            world.granted = world.granted or (len(notes) == world.group.size and any(note.wish for note in notes))
        world.paces = [] if self.alone else [number for note in notes for number in note.pace]
        if last:
            self.movers.apply()
            self.count += 1
            drift = math.sqrt(self.spread / self.size) if self.size else 0.0
            self.drift = self.drift if outcome.short else drift
            self.spread = self.size = 0.0
            if not outcome.short:
                self.length = self.plan.every.next(self.length, self.drift)
        if bad := [rank for rank, note in enumerate(notes) if not note.seen.sound]:
            self._heal(bad)

    def _heal(self, bad: list[int]) -> None:
        """A member that was left out takes over all of what the others have, and begins anew."""
        told = (
            f"weights or buffers of member {', '.join(map(str, bad))} have become infinite or nan since the last round"
        )
        if self.world.check_finite:
            raise PacelineError(f"{told}: lower the learning rate, clip, or look at its data")
        self.world.tell(f"{told}: they are left out, and it goes on with those of the others")
        if self.world.group.rank in bad:
            for part in self.parts:
                for fragment in range(self.cuts):
                    part.mix(fragment, 1.0)
            self.movers.mix(1.0)
            for optimizer in self.optimizers:
                optimizer.state.clear()

    def mix(self, merge: float | None = None) -> None:
        """Weights go on from what was agreed, if something was."""
        if self._under:
            self.collect()
        place, overlap = self.place, self.plan.overlap
        if place.arriving < 0:
            return
        if merge is None:
            merge = overlap.merge if overlap.steps else 1.0
        for part in self.parts:
            part.mix(place.arriving, merge)
        if place.arriving == self.cuts - 1:
            self.movers.mix(merge)
        place.arriving = -1
        place.moved = 0 if self.cuts == 1 and merge == 1.0 else place.moved


def refuse_threads(rounds: Rounds | None) -> None:
    """Passes of threads that overlap would see weights change under their feet."""
    if rounds and (not rounds.alone or rounds.hosting):
        raise ConfigError(
            "members that train apart change all weights at each round, under the feet of threads: use --strategy "
            "async or bounded, or several members in place of threads"
        )
