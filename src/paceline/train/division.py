"""How the rest of an epoch is divided among members that train apart, and how much of it counts.

Each member has a seat: a queue of batches for each loader (`data.sampler`). It draws from its own at its own pace, and
at each round tells how far it is: that much counts. So what a lost member had drawn since its last round is still
there, in its queue, and is dealt out again when the epoch is divided anew: when somebody without a seat has come, or
when those who are there have no more batches.

The same on all members, and part of the state that a newcomer gets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from paceline.data import Loader
from paceline.data.sampler import APART

Seat = tuple[int, str]  # a member's number for life, and its process: another one may sit there later


class Division(msgspec.Struct, kw_only=True):
    """One division.

    >>> division = Division(number=1, seats=[(0, "a"), (1, "b")], states=[{"history": [[3, 4, 2]]}], drawn=[[0, 0]])
    >>> division.count(1, (5,))
    >>> division.history(0, batch_size=4)
    [[3, 4, 2], [2, 4, -1, 0, 5]]
    """

    number: int  # rises with each
    seats: list[Seat]
    states: list[dict[str, Any]]  # of each loader, where it was divided
    drawn: list[list[int]]  # of each loader, the batches of each seat that count

    @classmethod
    def among(
        cls, seats: Sequence[Seat], number: int, states: Sequence[dict[str, Any]], loaders: Sequence[Loader]
    ) -> Division:
        """Divide anew what these states leave."""
        opened, drawn = [], []
        for state, loader in zip(states, loaders):
            history, begun = list(state.get("history", [])), 0
            if history and history[-1][:2] == [len(seats), loader.batch_size] and len(history[-1]) == 3:
                begun = history.pop()[2]  # the sampler goes on with a division like this one
            opened.append({**state, "history": history})
            drawn.append([begun] * len(seats))
        return cls(number=number, seats=list(seats), states=opened, drawn=drawn)

    def seat(self, me: Seat) -> int:
        """-1: none."""
        return self.seats.index(me) if me in self.seats else -1

    def count(self, seat: int, drawn: Sequence[int]) -> None:
        """So much of a seat's batches counts, of each loader."""
        for mine, number in zip(self.drawn, drawn):
            mine[seat] = number

    def history(self, loader: int, batch_size: int) -> list[list[int]]:
        """As `data.sampler` has it."""
        drawn, before = self.drawn[loader], self.states[loader].get("history", [])
        if not any(drawn):
            return list(before)
        if len(set(drawn)) == 1:
            return [*before, [len(self.seats), batch_size, drawn[0]]]
        return [*before, [len(self.seats), batch_size, APART, *drawn]]

    def state(self, number: int, loader: Loader) -> dict[str, Any]:
        """Of a loader, as far as it counts."""
        state = {**self.states[number], "history": self.history(number, loader.batch_size)}
        return {**state, "consumed": loader.consumed(state)}

    def plain(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "seats": [list(seat) for seat in self.seats],
            "states": self.states,
            "drawn": self.drawn,
        }

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Division:
        seats = [(id, process) for id, process in plain["seats"]]
        return cls(number=plain["number"], seats=seats, states=plain["states"], drawn=plain["drawn"])
