"""Rounds where members come and go: held by whoever is there, or not at all.

    gather   this member is at the round, and there are enough others
    hold     notes, differences, outer step: `rounds`
    commit   what each has drawn since the last round counts

Where the group breaks in the middle, a round comes to nothing: the anchors have not moved yet, differences are reckoned
anew, and what a codec had said is unsaid, so it can be held again by those who are left. Where another member had ended
it before the group broke, it counts, and this one is given the outcome; it had said all it had to say by then.
"""

from __future__ import annotations

from typing import Any

from paceline.core.errors import Interrupted
from paceline.strategies.exchange import Outcome
from paceline.strategies.rounds import Rounds
from paceline.strategies.strategy import Stand, World


class Attending:
    """Of one member."""

    def __init__(self, rounds: Rounds, world: World) -> None:
        self._rounds, self._world = rounds, world
        self._before: list[Any] = []  # the round under way, what codecs had left unsaid before it

    def attend(self, *, between: bool) -> None:
        """Hold a round; returns when it is committed, or when the others go on without this member.

        `between`: two turns of the loop. Within one, what the script does after its step is still to come, so others
        are not let in: the round is left to the end of the turn where somebody is to come first.
        """
        rounds, commits, status = self._rounds, self._world.commits, self._world.status
        assert commits is not None
        count, doing = rounds.commits, status.what
        status.set("averaging")
        while rounds.commits == count:
            if not commits.gather(count):
                rounds.place.since = 0  # it trains on for as long again
                break
            if not between and commits.short:
                break
            if between:
                commits.muster()
            if rounds.commits != count:
                break
            self._before = [part.unsaid() for part in rounds.parts]
            try:
                outcome = self._hold(commits.stand())
            except Interrupted as error:
                commits.mend(error)
                self.end(counted=False)
                continue
            if outcome.waits:
                self._before = []  # nothing was said
                if not between:
                    break
                commits.go()
                continue
            self.end(counted=True)
            commits.committed([note.stand for note in outcome.notes])
        status.set(doing)

    @property
    def due(self) -> bool:
        """Whether this member has taken the steps of a round."""
        return self._rounds.place.since >= self._rounds.length

    def _hold(self, stand: Stand) -> Outcome:
        """With whoever is in the group; or not yet, where it `waits`."""
        rounds = self._rounds
        if not rounds.formed:
            rounds.form()
        rounds.begin(rounds.note(0)._replace(stand=stand))
        outcome = rounds.collect()
        if outcome.waits:
            return outcome
        rounds.commits += 1
        if not outcome.empty:
            rounds.place.arriving = 0
            rounds.mix(1.0)
        rounds.advance(0)
        return outcome

    def end(self, *, counted: bool) -> None:
        """The round under way, if there still is one, counts with this member in it; or what it said in it does not."""
        for part, kept in zip(self._rounds.parts, self._before if not counted else ()):
            part.put_unsaid(kept)
        self._before = []
