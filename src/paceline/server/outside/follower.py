"""One who follows a run's weights from version to version. Only what changed travels; see `changes`.

    with paceline.connect("digits").follow() as follower:
        update = follower.next(wait_s=10.0)          # waits for a newer version; None: there was none in that time
        update.tensors, update.version               # what changed, by name; the first time all
        follower.weights()                           # all of them

It has lines of its own, so that a wait holds up nobody who uploads or watches. Where a line is lost, `next` raises
Interrupted, the next call connects again, and what is held need not travel again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from paceline.core.errors import Interrupted
from paceline.server.outside import visits as v
from paceline.server.outside.bodies import Bodies, Key, Weights, weights_of
from paceline.server.outside.calls import make_code
from paceline.server.outside.desks import Desks, Pinning
from paceline.server.outside.line import expect


class Update(NamedTuple):
    """A version, and what is new in it."""

    version: int
    mixed: bool  # not of one version; see Weights
    made_at: float  # time.time() where it was made
    tensors: dict[str, torch.Tensor]  # those that changed, by name
    whole: bool  # whether that is all of them
    nbytes: int  # that came for it


class Follower:
    """A context manager; iterating over it gives update after update, for as long as the run goes on."""

    def __init__(self, desks: Desks, *, codec: str = "", held: Bodies | None = None) -> None:
        if codec:
            make_code(codec)  # ConfigError here rather than over there
        self.held = held or Bodies()
        self._codec = codec
        self._desks = desks
        self._pinned: list[v.Pinned] = []  # of the last update
        self._version = -1

    def next(self, wait_s: float = 10.0) -> Update | None:
        """The newest version, as soon as there is one that is newer than the last; None after `wait_s` without."""
        standings = self._desks.standings(self._version, min(max(wait_s, 0.0), 10.0))
        if any(s.serves and s.version < self._version for s in standings):
            self._version = -1  # the run was started again
        found = self._desks.pin(self._version)
        try:
            return self._take(found) if found else None
        except BaseException:  # what desks believe that this one has, it may not have: they are to forget it
            self._desks.close()
            raise

    def weights(self) -> Weights:
        """All weights as of the last update."""
        if not self._pinned:
            raise Interrupted("nothing has been followed yet: next() first")
        return weights_of(self.held.tensors(), self._pinned)

    def close(self) -> None:
        self._desks.close()

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Update]:
        while True:
            update = self.next()
            if update:
                yield update

    def _take(self, found: Pinning) -> Update:
        """Ask all for what is not held; nothing is changed here before all of it has come."""
        for line, answer in zip(found.lines, found.pinned):
            have = [] if self._codec else self.held.digests(answer.parts)
            line.say(v.Changes(have=have, codec=self._codec))
        came: list[tuple[v.Part, v.Difference, torch.Tensor]] = []
        for line, answer in zip(found.lines, found.pinned):
            try:
                changed = expect(line.hear(), v.Changed)
            except Interrupted as error:
                raise Interrupted(self._desks.lost(error)) from None
            if len(changed.parts) != len(answer.parts):
                raise Interrupted(f"the run said what changed in {len(changed.parts)} parts of {len(answer.parts)}")
            for part, difference in zip(answer.parts, changed.parts):
                data = torch.empty(self.held.size(part, difference), dtype=torch.uint8)
                self._desks.fill(line, data)
                came.append((part, difference, data))
        whole = not self._pinned
        keys: set[Key] = set()
        for part, difference, data in came:
            keys |= self.held.change(part, difference, data, self._codec)
        self.held.keep_only([part for part, _, _ in came])
        self._pinned = found.pinned
        self._version = min(answer.version for answer in found.pinned)
        weights = weights_of(self.held.tensors(None if whole else keys), found.pinned)
        made_at = max(answer.made_at for answer in found.pinned)
        nbytes = sum(data.numel() for _, _, data in came)
        return Update(self._version, weights.mixed, made_at, dict(weights), whole, nbytes)
