"""Members that come and go at a hub: the parts of a collective are of one place in the script, and nobody hangs."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.transport.meetings import Meetings, Over, Stand

SETUP, EPOCHS, EACH = 2, 3, 2  # collectives before the first epoch, epochs, collectives at the end of each


class Member:
    """One process: where it is in the script, and what it waits for."""

    def __init__(self, rank: int, size: int, *, late: bool) -> None:
        self.rank = rank
        self.number = 0
        self.place: tuple[int, int] = (-1, 0)  # epoch (-1: before), and collectives of it that are done
        self.waits = late  # for an answer, or to be let in
        self.late = late
        self.here = tuple(range(size))  # at the last collective
        self.over = self.too_late = False


class World:
    def __init__(self, size: int, chance: random.Random) -> None:
        self.size, self.chance = size, chance
        self.meetings = Meetings(range(size))
        self.members = {rank: Member(rank, size, late=False) for rank in range(size)}
        self.finished = 0

    def take(self, said: list[tuple[int, object]]) -> None:
        for rank, word in said:
            member = self.members[rank]
            assert member.waits
            member.waits = False
            if isinstance(word, tuple):
                number, parts = word
                assert number == member.number
                assert set(parts.values()) == {repr(member.place).encode()}, parts
                member.here = tuple(parts)
                member.place = (member.place[0], member.place[1] + 1)
            elif isinstance(word, Stand):
                member.number, member.place, member.here = word.number, (word.epoch, 0), ()
            else:
                assert isinstance(word, Over)
                member.too_late = member.over = True

    def go(self, member: Member) -> None:
        """To the next collective, the next epoch, or the end."""
        epoch, done = member.place
        if done == (SETUP if epoch < 0 else EACH):
            epoch, done = member.place = epoch + 1, 0
            if epoch == EPOCHS:
                member.over = True
                self.finished += 1
                self.take(self.meetings.finish(member.rank))
                self.take(self.meetings.leave(member.rank))
                return
            if member.here[:1] == (member.rank,):
                self.take(self.meetings.stands(member.rank, Stand(epoch, 0, member.number, b"")))
        if self.chance.random() < 0.5:
            return  # it trains
        member.number += 1
        member.waits = True
        self.take(self.meetings.hand(member.rank, member.number, repr(member.place).encode()))

    def die(self, rank: int) -> None:
        del self.members[rank]
        self.take(self.meetings.leave(rank))

    def come(self, rank: int) -> None:
        self.members[rank] = Member(rank, self.size, late=True)
        self.take(self.meetings.enter(rank))

    def run(self, deaths: int) -> None:
        for _ in range(10_000):
            gone = [rank for rank in range(self.size) if rank not in self.members]
            begun = self.meetings.stand is not None
            if deaths and begun and self.members and self.chance.random() < 0.05:
                deaths -= 1
                alive = [rank for rank, member in self.members.items() if not member.over]
                if alive:
                    self.die(self.chance.choice(alive))
            elif gone and self.chance.random() < 0.2 and not self.finished:
                self.come(self.chance.choice(gone))
            able = [member for member in self.members.values() if not member.over and not member.waits]
            if able:
                self.go(self.chance.choice(able))
            if self.finished and all(member.over for member in self.members.values()):
                return
        raise AssertionError("it hangs: " + str([(m.rank, m.place, m.waits) for m in self.members.values()]))


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32), size=st.integers(1, 5), deaths=st.integers(0, 8))
def test_those_who_meet_are_at_the_same_place(seed: int, size: int, deaths: int) -> None:
    World(size, random.Random(seed)).run(deaths)


def test_nobody_comes_in_after_a_collective_of_the_epoch() -> None:
    meetings = Meetings([0, 1])
    stand = Stand(0, 0, 0, b"state")
    assert meetings.stands(0, stand) == []
    meetings.leave(1)
    assert meetings.hand(0, 1, b"a") == [(0, (1, {0: b"a"}))]
    assert meetings.enter(1) == []
    later = Stand(1, 5, 1, b"more")
    assert meetings.stands(0, later) == [(1, later)]
    assert meetings.hand(0, 2, b"b") == []  # waits for the newcomer now


def test_with_nobody_left_the_last_epoch_begins_again() -> None:
    meetings = Meetings([0, 1])
    stand = Stand(2, 9, 4, b"state")
    meetings.stands(0, stand)
    meetings.hand(0, 5, b"")
    meetings.hand(1, 5, b"")
    meetings.leave(0)
    assert meetings.enter(0) == []  # member 1 is beyond it
    assert meetings.leave(1) == [(0, stand)]
    assert meetings.hand(0, 5, b"x") == [(0, (5, {0: b"x"}))]
