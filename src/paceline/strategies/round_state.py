"""What of a member's rounds a checkpoint holds, and what one member takes over from another.

    common    what all members have alike: anchors and the outer optimizer, the schedule, the place in the round
    own       this member's: weights and optimizer since the last round, buffers, what its codec has left unsaid
    work      what it has learnt since the last round that it was in, to be put on top of other anchors

Where members come and go, a checkpoint is as of the last round: what was drawn since then is drawn again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

import torch

from paceline.strategies.rounds import Rounds
from paceline.strategies.schedule import Place
from paceline.strategies.strategy import World
from paceline.strategies.unsaid import handed_on, tell_lost


class RoundState:
    """Of the rounds of one member."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._saved: dict[str, Any] = {}  # by all alike, until models and optimizers are loaded

    def common(self) -> dict[str, Any]:
        r = self._rounds
        return {
            "schedule": [str(r.plan.every.words), r.cuts],
            "round": [r.count, r.length, r.drift, r.spread, r.size],
            "place": list(astuple(r.place)),
            "commits": r.commits,
            "parts": [part.common() for part in r.parts],
        }

    def load_common(self, state: Mapping[str, Any]) -> None:
        """Models and optimizers are loaded later: see `load`."""
        self._saved = dict(state)

    def own(self) -> dict[str, Any]:
        """The first member's optimizers are the run's, and saved as such."""
        r = self._rounds
        first, elastic = r.world.group.rank == 0, r.world.elastic
        return {
            "place": list(astuple(Place() if elastic else r.place)),
            "weights": [] if elastic else [part.weights() for part in r.parts],
            "buffers": {"coming": torch.zeros(0, dtype=torch.int64)} if elastic else r.movers.state(),
            "optimizers": [] if first else [optimizer.state_dict()["state"] for optimizer in r.optimizers],
            "coders": [part.coder.state() for part in r.parts if part.coder],
            "seen": [0.0 if elastic else r.world.tally.drawn - drawn for drawn in r.drawn],
            "heard": r.heard.state() if r.heard and not elastic else [],
        }

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Models hold what was agreed on: go on from there, as the member that this one was, if it was one."""
        r = self._rounds
        saved, self._saved = self._saved, {}
        r.reset()
        for part, common in zip(r.parts, saved.get("parts", [])):
            if told := part.load_common(common):
                r.world.tell(told)
        self._load_unsaid(states)
        goes_on = saved.get("schedule") == [str(r.plan.every.words), r.cuts]
        if goes_on:
            r.count, r.length, r.drift, r.spread, r.size = saved["round"]
        gone = states if r.world.elastic else states[1:]
        if any(weights for state in gone for weights in state["weights"]):
            whose = "members" if r.world.elastic else "members that are gone"
            r.world.tell(f"what {whose} had learnt since the last round is left out")
        if r.idle:
            return
        if r.world.elastic:
            r.place, r.commits = Place(), saved.get("commits", 0)
            self._load_optimizers(states)
            return
        if not states:  # a member that the saved run did not have: it begins where the first one is
            first = Place(*saved["place"]) if goes_on else Place()
            r.place = Place(since=first.since, next=first.next)
            return
        mine = states[0]
        r.place = Place(*mine["place"]) if goes_on else Place(moved=mine["place"][-1])
        for part, weights in zip(r.parts, mine["weights"]):
            part.load_weights(weights)
        r.movers.load(mine["buffers"])
        self._load_optimizers(states)
        if goes_on:
            r.drawn = [r.world.tally.drawn - seen for seen in mine["seen"]]
            if r.heard:
                r.heard.load(mine["heard"])

    # ---- where members come and go

    def load_own(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Of a checkpoint: what was this member's own, and of those that the run has no more; the rest it has."""
        self._load_coders([state["coders"] for state in states if state["coders"]])
        self._load_optimizers(states)

    def work(self) -> dict[str, Any]:
        """What this member has learnt and seen since the last round that it was in."""
        r = self._rounds
        return {
            "differences": [part.work() for part in r.parts],
            "buffers": r.movers.state(),
            "moved": r.place.moved,
            "drawn": list(r.drawn),
            "heard": r.heard.state() if r.heard else [],
        }

    def take_over(self, work: Mapping[str, Any] | None) -> None:
        """Models and `load_common` hold what others have agreed on meanwhile: go on from there, with this member's
        own work on top, if it has any."""
        r = self._rounds
        saved, self._saved = self._saved, {}
        r.reset()
        for part, common in zip(r.parts, saved["parts"]):
            part.load_common(common)
        r.count, r.length, r.drift, r.spread, r.size = saved["round"]
        r.commits = saved["commits"]
        r.place = Place(since=saved["place"][0])
        if work:
            for part, differences in zip(r.parts, work["differences"]):
                part.put_work(differences)
            r.movers.load(work["buffers"])
            r.place.moved, r.drawn = work["moved"], work["drawn"]
            if r.heard:
                r.heard.load(work["heard"])

    # ---- inside

    def _load_optimizers(self, states: Sequence[Mapping[str, Any]]) -> None:
        for optimizer, state in zip(self._rounds.optimizers, states[0]["optimizers"] if states else ()):
            optimizer.load_state_dict({**optimizer.state_dict(), "state": state})

    def _load_unsaid(self, states: Sequence[Mapping[str, Any]]) -> None:
        """By all members: those for whom another one encodes now hand it on."""
        r = self._rounds
        kept = [state["coders"] for state in states if state["coders"]]
        coded = bool(r.plan.method.codec or r.plan.average.combine)
        if not coded or (r.alone and not r.world.elastic):
            tell_lost(kept, r.world)
        elif not r.plan.average.combine and not r.world.elastic:
            kept = handed_on(kept, r.world.group, r.sites.speakers if r.sites else None)
        self._load_coders(kept)

    def _load_coders(self, kept: Sequence[Sequence[dict[str, Any]]]) -> None:
        for i, coder in enumerate(part.coder for part in self._rounds.parts if part.coder):
            coder.load([each[i] for each in kept if len(each) > i])


def learnt_apart(own: Mapping[str, Any]) -> bool:
    """Whether what a strategy has saved of a member, perhaps of its parts, holds weights since the last round."""
    return any(own.get("own", own).get("rounds", {}).get("weights", ()))


def tell_left_out(world: World) -> None:
    """A checkpoint holds what members had learnt apart, and nobody can go on from there."""
    world.tell(
        "the checkpoint was taken within a round of local steps: this run goes on from the weights of the last round, "
        "and what members had learnt since is left out. Resume by local steps, on the same mesh, to keep it"
    )
