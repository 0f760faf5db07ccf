"""The rounds of one run: what the local strategy does between two agreements and at one.

    stepped    count; mix in what is due, send what is due
    together   wait until all are here, and take part in what others still send

Everything here runs in the training thread but `_carry`, which is the exchange's. One exchange is under way at a time.
`Place` says where in its round a member is; with the anchors, the outer optimizer, what codecs have left unsaid and
this member's own weights, buffers and optimizers it is all there is to save.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

import torch

from paceline.core.errors import ConfigError, Interrupted, PacelineError, TimedOut
from paceline.strategies.anchors import SKETCH, Anchors
from paceline.strategies.averaging import Seen
from paceline.strategies.exchange import MEET, Alone, Exchange, Heard, Meeting, Note, Outcome
from paceline.strategies.movers import Movers
from paceline.strategies.plan import Plan
from paceline.strategies.reducers import Coder, load
from paceline.strategies.schedule import Place
from paceline.strategies.sites import Sites
from paceline.strategies.strategy import Stand, World
from paceline.strategies.unsaid import handed_on, tell_lost
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
        self.drift = 0.0  # of members from their mean in the last round, by the norm of the weights
        self._plan, self._world, self._cuts = plan, world, plan.overlap.cuts
        self._place = Place()
        self._drawn = [0.0] * self._cuts  # samples, when each fragment was sent
        self._spread = self._size = 0.0  # squares, of the fragments of this round so far
        self._under = False  # an exchange is
        self._sent_before = 0  # bytes, with groups that are gone
        self._told_bytes = 0  # to the world
        self._saved: dict[str, Any] = {}  # by all alike, until models and optimizers are loaded
        self._sites = sites
        self._group: Group | None = None  # for our exchanges alone; None: there is one member, or one site
        self._meeting: Meeting = Alone(plan.average)
        self.formed = False  # with the group that the world has now
        size = sites.count if sites else world.group.size
        if not world.elastic:
            plan.average.check(size)
            self.form()
            if size == 1 and plan.method.codec:
                one = "site" if sites and world.group.size > 1 else "member"
                world.tell(f"codec {plan.method.words} has no effect: this run has one {one}")
        self._heard = Heard(plan.average.hears, self._cuts) if plan.average.hears else None
        if self._heard:
            world.listen = self._heard

    def form(self) -> None:
        """Exchange with the group that the world has now; by all of its members together."""
        world, average = self._world, self._plan.average
        if (self._sites.count if self._sites else world.group.size) > 1:
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
        self._group, self._meeting, self.formed, self._under = None, Alone(self._plan.average), False, False

    @property
    def _held(self) -> list[Anchors | Movers]:
        return [*self.parts, self.movers]

    @property
    def elastic(self) -> bool:
        return self._world.elastic

    @property
    def alone(self) -> bool:
        return self._group is None

    @property
    def sent_bytes(self) -> int:
        sent = self._sent_before + (self._group.sent_bytes if self._group else 0)
        return sent + (self._sites.sent_bytes if self._sites else 0)

    @property
    def idle(self) -> bool:
        """One member that takes the average as it is trains plainly."""
        return self.alone and self._plan.outer.plain and not self._world.elastic

    def adopt(self, named: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        """Parameters that are equal on all members."""
        named = [(name, p) for name, p in named if p.is_floating_point() or p.is_complex()]
        if not named or self.idle:
            return
        if self._under:
            self._collect()  # of those that were there when it was sent
        plan, coder = self._plan, None
        if self._world.elastic and self.formed:
            self.unform()  # there is room for them in the next round
        sites = self._sites if self._group else None
        group = sites.leaders if sites else self._group
        if (group or self._world.elastic) and (plan.method.codec or plan.average.combine):
            for device in {p.device for _, p in named}:
                load(plan.method, device)
            seed, combine = self._world.seed * 1009 + len(self.parts), plan.average.combine
            coder = Coder(plan.method, feedback=plan.feedback, seed=seed, tell=self._world.tell, combine=combine)
        near = sites.near if sites else None
        self.parts.append(Anchors(named, plan.outer, self._cuts, group, coder, plan.decay, near))

    def reset(self) -> None:
        """All members are equal: rounds begin now."""
        for part in self._held:
            part.reset()
        for fragment in range(self._cuts):
            self._seen_from_now(fragment)

    # ---- while training

    def stepped(self) -> None:
        """This member has taken a step."""
        if self.idle:
            return
        place = self._place
        place.since += 1
        place.moved += 1
        if self._world.elastic:  # see `attending`
            return
        if place.arriving >= 0:
            place.left -= 1
            if place.left <= 0:
                self._mix()
        if place.since >= self._sent_at(place.next):
            place.arriving, place.left = place.next, self._plan.overlap.steps
            self._begin(self._note(place.next))
            self._advance(place.next)
            if not place.left:
                self._mix()

    def together(self, *, end: bool) -> None:
        """Wait for all; at the end, close the round."""
        if self.idle:
            return
        place = self._place
        while True:
            if self._under:
                self._collect()  # anchors are the same everywhere then; weights follow when it is time
            self._begin(self._note(place.next)._replace(fragment=MEET))
            outcome = self._collect()
            if outcome.fragment == MEET:
                break
            self._mix()  # what came before
            place.arriving = outcome.fragment
            self._mix()
            self._advance(outcome.fragment)
        if end and any(note.steps or note.squares for note in outcome.notes):
            schedule = (self.length, self.drift)  # which a round that is cut short tells nothing of
            for fragment in range(self._cuts):
                self._mix()
                place.arriving = fragment
                self._begin(self._note(fragment))
                self._advance(fragment)
                self._mix(1.0)
            place.moved = 0
            self.length, self.drift = schedule

    @property
    def due(self) -> bool:
        return self._place.since >= self.length

    def hold(self, stand: Stand) -> Outcome:
        """One round, with whoever is in the group; or not yet, where it `waits`. Interrupted where it breaks."""
        if not self.formed:
            self.form()
        self._begin(self._note(0)._replace(stand=stand))
        outcome = self._collect()
        if outcome.waits:
            return outcome
        self.commits += 1
        if not outcome.empty:
            self._place.arriving = 0
            self._mix(1.0)
        self._advance(0)
        return outcome

    def skip(self) -> None:
        """The others have held a round without this member, who trains on for as long again."""
        self._place.since = 0

    def show(self) -> None:
        """Put what the run has agreed on in the place of what this member has."""
        for part in self._held if not self.idle else ():
            part.show()

    def hide(self) -> None:
        for part in self._held if not self.idle else ():
            part.hide()

    def close(self) -> None:
        self._meeting.close()

    # ---- one exchange

    def _sent_at(self, fragment: int) -> int:
        """Steps into the round."""
        return self.length * (fragment + 1) // self._cuts

    def _advance(self, fragment: int) -> None:
        """A fragment was sent."""
        place, last = self._place, fragment == self._cuts - 1
        place.next = 0 if last else fragment + 1
        place.since = 0 if last else self._sent_at(fragment)
        self._seen_from_now(fragment)

    def _seen_from_now(self, fragment: int) -> None:
        self._drawn[fragment] = self._world.tally.drawn
        if self._heard:
            self._heard.sent(fragment)

    def _note(self, fragment: int) -> Note:
        """Put what this member has learnt into the buckets, and what it has to say of it."""
        world = self._world
        squares = sum(part.differ(fragment) for part in self.parts)
        sketch = sum((part.sketch(fragment) for part in self.parts), torch.zeros(SKETCH, dtype=torch.float64))
        changed = self.movers.note() if fragment == self._cuts - 1 else [False] * len(self.movers.now)
        total, count = self._heard.since(fragment) if self._heard else (0.0, 0)
        seen = Seen(
            sound=math.isfinite(squares),
            samples=world.tally.drawn - self._drawn[fragment],
            tokens=total,
            loss=total / count if count else math.nan,
        )
        return Note(
            fragment=fragment,
            seen=seen,
            steps=self._place.moved,
            squares=squares,
            sketch=tuple(sketch.tolist()),
            wish=world.wish,
            turn=world.tally.nominal,
            pace=world.pace,
            changed=tuple(changed),
        )

    def _begin(self, note: Note) -> None:
        self._under = True
        self._meeting.begin(note)

    def _carry(self, outcome: Outcome) -> None:
        """In the thread of the exchange."""
        assert self._group is not None
        sites, weights = self._sites, outcome.weights
        try:
            if sites:
                weights = sites.fold(weights)
            for part in self.parts:
                part.carry(outcome.fragment, weights[self._group.rank])
            self.movers.carry(self._group, outcome.changed, weights, self._plan.average.combine)
        except Interrupted as error:
            for group in (sites.leaders, sites.near) if sites else ():
                if group:
                    group.abort(error)
            raise

    def _collect(self) -> Outcome:
        """Wait for what is under way, and move the anchors."""
        world, began = self._world, time.monotonic()
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
        return outcome

    def _take_in(self, outcome: Outcome) -> None:
        world, fragment, notes = self._world, outcome.fragment, outcome.notes
        last = fragment == self._cuts - 1
        if self.alone and last:
            self.movers.alone()
        for part in self.parts:
            self._size += part.apply(fragment)
        self._spread += outcome.spread
        # A checkpoint is taken before everyone's next batch, which has to be the same one.
        # Where members come and go, a round is where everything is the same anyway; at the end of an epoch one follows.
        same = all(note.fragment != MEET and note.turn == notes[0].turn for note in notes)
        if not all(note.stand.out for note in notes) if world.elastic else same:
            world.granted = world.granted or (len(notes) == world.group.size and any(note.wish for note in notes))
        world.paces = [] if self.alone else [number for note in notes for number in note.pace]
        if last:
            self.movers.apply()
            self.count += 1
            drift = math.sqrt(self._spread / self._size) if self._size else 0.0
            self.drift = self.drift if outcome.short else drift
            self._spread = self._size = 0.0
            if not outcome.short:
                self.length = self._plan.every.next(self.length, self.drift)
        if bad := [rank for rank, note in enumerate(notes) if not note.seen.sound]:
            self._heal(bad)

    def _heal(self, bad: list[int]) -> None:
        """A member that was left out takes over all of what the others have, and begins anew."""
        told = f"weights of member {', '.join(map(str, bad))} have become infinite or nan since the last round"
        if self._world.check_finite:
            raise PacelineError(f"{told}: lower the learning rate, clip, or look at its data")
        self._world.tell(f"{told}: they are left out, and it goes on with those of the others")
        if self._world.group.rank in bad:
            for part in self.parts:
                for fragment in range(self._cuts):
                    part.mix(fragment, 1.0)
            self.movers.mix(1.0)
            for optimizer in self.optimizers:
                optimizer.state.clear()

    def _mix(self, merge: float | None = None) -> None:
        """Weights go on from what was agreed, if something was."""
        if self._under:
            self._collect()
        place, overlap = self._place, self._plan.overlap
        if place.arriving < 0:
            return
        if merge is None:
            merge = overlap.merge if overlap.steps else 1.0
        for part in self.parts:
            part.mix(place.arriving, merge)
        if place.arriving == self._cuts - 1:
            self.movers.mix(merge)
        place.arriving = -1
        place.moved = 0 if self._cuts == 1 and merge == 1.0 else place.moved

    # ---- where members come and go

    def work(self) -> dict[str, Any]:
        """What this member has learnt and seen since the last round that it was in."""
        return {
            "differences": [part.work() for part in self.parts],
            "buffers": self.movers.state(),
            "moved": self._place.moved,
            "drawn": list(self._drawn),
            "heard": self._heard.state() if self._heard else [],
        }

    def take_over(self, work: Mapping[str, Any] | None) -> None:
        """Models and `load_common` hold what others have agreed on meanwhile: go on from there, with this member's
        own work on top, if it has any."""
        saved, self._saved = self._saved, {}
        self.reset()
        for part, common in zip(self.parts, saved["parts"]):
            part.load_common(common)
        self.count, self.length, self.drift, self._spread, self._size = saved["round"]
        self.commits = saved["commits"]
        self._place = Place(since=saved["place"][0])
        if work:
            for part, differences in zip(self.parts, work["differences"]):
                part.put_work(differences)
            self.movers.load(work["buffers"])
            self._place.moved, self._drawn = work["moved"], work["drawn"]
            if self._heard:
                self._heard.load(work["heard"])

    def take_own(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Of a checkpoint: what was this member's own, and of those that the run has no more."""
        self._load_coders([state["coders"] for state in states if state["coders"]])
        self._load_optimizers(states)

    # ---- state: what all members have alike, and this member's own

    def common(self) -> dict[str, Any]:
        return {
            "schedule": [str(self._plan.every.words), self._cuts],
            "round": [self.count, self.length, self.drift, self._spread, self._size],
            "place": list(astuple(self._place)),
            "commits": self.commits,
            "parts": [part.common() for part in self.parts],
        }

    def load_common(self, state: Mapping[str, Any]) -> None:
        """Models and optimizers are loaded later: see `load`."""
        self._saved = dict(state)

    def state(self) -> dict[str, Any]:
        """The first member's optimizers are the run's, and saved as such."""
        first = self._world.group.rank == 0
        elastic = self._world.elastic  # as of the last round: what was drawn since then will be drawn again
        return {
            "place": list(astuple(Place() if elastic else self._place)),
            "weights": [] if elastic else [part.weights() for part in self.parts],
            "buffers": {"coming": torch.zeros(0, dtype=torch.int64)} if elastic else self.movers.state(),
            "optimizers": [] if first else [optimizer.state_dict()["state"] for optimizer in self.optimizers],
            "coders": [part.coder.state() for part in self.parts if part.coder],
            "seen": [0.0 if elastic else self._world.tally.drawn - drawn for drawn in self._drawn],
            "heard": self._heard.state() if self._heard and not elastic else [],
        }

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Models hold what was agreed on: go on from there, as the member that this one was, if it was one."""
        saved, self._saved = self._saved, {}
        self.reset()
        for part, common in zip(self.parts, saved.get("parts", [])):
            if told := part.load_common(common):
                self._world.tell(told)
        self._load_unsaid(states)
        goes_on = saved.get("schedule") == [str(self._plan.every.words), self._cuts]
        if goes_on:
            self.count, self.length, self.drift, self._spread, self._size = saved["round"]
        if any(weights for state in states[1:] for weights in state["weights"]):
            self._world.tell("what members that are gone had learnt since the last round is left out")
        if self.idle:
            return
        if self._world.elastic:
            self._place, self.commits = Place(), saved.get("commits", 0)
            self._load_optimizers(states)
            return
        if not states:  # a member that the saved run did not have: it begins where the first one is
            first = Place(*saved["place"]) if goes_on else Place()
            self._place = Place(since=first.since, next=first.next)
            return
        mine = states[0]
        self._place = Place(*mine["place"]) if goes_on else Place(moved=mine["place"][-1])
        for part, weights in zip(self.parts, mine["weights"]):
            part.load_weights(weights)
        self.movers.load(mine["buffers"])
        self._load_optimizers(states)
        if goes_on:
            self._drawn = [self._world.tally.drawn - seen for seen in mine["seen"]]
            if self._heard:
                self._heard.load(mine["heard"])

    def _load_optimizers(self, states: Sequence[Mapping[str, Any]]) -> None:
        for optimizer, state in zip(self.optimizers, states[0]["optimizers"] if states else ()):
            optimizer.load_state_dict({**optimizer.state_dict(), "state": state})

    def _load_unsaid(self, states: Sequence[Mapping[str, Any]]) -> None:
        """By all members: those for whom another one encodes now hand it on."""
        kept = [state["coders"] for state in states if state["coders"]]
        coded = bool(self._plan.method.codec or self._plan.average.combine)
        if not coded or (self.alone and not self._world.elastic):
            tell_lost(kept, self._world)
        elif not self._plan.average.combine and not self._world.elastic:
            kept = handed_on(kept, self._world.group, self._sites.speakers if self._sites else None)
        self._load_coders(kept)

    def _load_coders(self, kept: Sequence[Sequence[dict[str, Any]]]) -> None:
        for i, coder in enumerate(part.coder for part in self.parts if part.coder):
            coder.load([each[i] for each in kept if len(each) > i])


def refuse_threads(rounds: Rounds | None) -> None:
    """Passes of threads that overlap would see weights change under their feet."""
    if rounds and not rounds.alone:
        raise ConfigError(
            "members that train apart change all weights at each round, under the feet of threads: use --strategy "
            "async or bounded, or several members in place of threads"
        )
