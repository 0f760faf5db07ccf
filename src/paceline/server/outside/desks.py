"""All desks of a run as one outsider reaches them: asked at once, and pinned at one version where there is one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from paceline.core.errors import AuthError, Interrupted, TimedOut
from paceline.server.outside import visits as v
from paceline.server.outside.line import Line, expect
from paceline.server.placement import place

_PAUSE_S = 0.05


class Pinning(NamedTuple):
    """Copies that desks keep for this outsider, one each."""

    lines: list[Line]
    pinned: list[v.Pinned]


class Desks:
    """A line to each. Where one address is given, the desk there names the others."""

    def __init__(self, addresses: Sequence[str], token: str, limit_s: float) -> None:
        self.limit_s = limit_s
        first = Line(addresses[0], token, limit_s)
        self.welcome = first.welcome
        desks = self.welcome.desks
        if len(desks) == 1:  # it may have been reached by another name, such as that of a tunnel
            self.lines = [first]
        else:
            self.lines = [first if desk == addresses[0] else Line(desk, token, limit_s) for desk in desks]
        if first not in self.lines:
            first.close()

    @property
    def addresses(self) -> list[str]:
        return [line.address for line in self.lines]

    def standings(self, newer_than: int = -1, wait_s: float = 0.0) -> list[v.Standing]:
        """How far each is: now, or when it is further than this, for at most so long."""
        look = v.Look(newer_than=newer_than, wait_s=wait_s)
        return [expect(answer, v.Standing) for answer in self._all(look, self.lines)]

    def pin(self, newer_than: int = -1) -> Pinning | None:
        """Have them keep copies, in sync of one version; None where nothing is newer."""
        deadline = time.monotonic() + self.limit_s
        ahead, why = 0, "its script has not called run.optimizer yet"
        while True:
            standings = self.standings()
            serving = [line for line, s in zip(self.lines, standings) if s.serves]
            versions = [s.version for s in standings if s.serves]
            if versions and min(versions) <= newer_than:
                return None
            if serving:
                at = -1
                if len(serving) > 1 and all(s.sync for s in standings):
                    at = max(versions) + ahead
                wait_s = min(1.0 if at > max(versions) else 2.0, max(0.0, deadline - time.monotonic()))
                pinned = [_pinned(answer) for answer in self._all(v.Pin(at=at, limit_s=wait_s), serving)]
                if _is_whole(pinned):
                    return Pinning(serving, pinned)
                # In sync all are at the same version only for a moment; one that is to come is waited for by all.
                ahead = (2 * ahead or 1) % 64
                why = "its servers were never at the same version"
            if time.monotonic() > deadline:
                raise TimedOut(f"no weights of run {self.welcome.name!r} within {self.limit_s:g} s: {why}")
            time.sleep(_PAUSE_S)

    def fill(self, line: Line, body: torch.Tensor) -> None:
        """Bare bytes that follow an answer."""
        try:
            line.fill(body)
        except Interrupted as error:
            line.close()
            raise Interrupted(self.lost(error)) from None

    def close(self) -> None:
        for line in self.lines:
            line.close()

    def lost(self, error: Exception) -> str:
        return f"run {self.welcome.name!r} is over, or cannot be reached any more: {error}"

    def _all(self, message: v.ToDesk, lines: list[Line]) -> list[v.FromDesk]:
        """Ask several desks at once."""
        for line in lines:
            try:
                line.say(message)
            except (Interrupted, AuthError) as error:  # nobody is there any more, or another listens
                raise Interrupted(self.lost(error)) from None
        answers: list[v.FromDesk] = []
        for line in lines:
            try:
                answers.append(line.hear())
            except Interrupted as error:  # the others' answers are read all the same
                line.close()
                answers.append(v.refused(Interrupted(self.lost(error))))
        return answers


def _pinned(answer: v.FromDesk) -> v.Pinned:
    if isinstance(answer, v.Refused) and answer.kind == "TimedOut":
        return v.Pinned(version=-1)
    return expect(answer, v.Pinned)


def _is_whole(pinned: Sequence[v.Pinned]) -> bool:
    """Whether all parts of all tables are there."""
    if any(not answer.parts for answer in pinned):
        return False
    parts = [part for answer in pinned for part in answer.parts]
    for part in parts:
        here = {other.server for other in parts if other.table == part.table}
        placed = place(part.tensors, part.servers, cut=part.cut, view=part.view)
        if not {chunk.server for chunk in placed.chunks} <= here:
            return False
    return True
