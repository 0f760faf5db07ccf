"""Who is waited for at a round, as the scheduler's rules have it."""

from __future__ import annotations

import pytest

from paceline.core.settings import Settings
from paceline.core.view import Member
from paceline.membership.orders import Come, Here, NewView
from paceline.membership.roster import Roster
from paceline.membership.seats import Rules


class Watched:
    """A roster of four whose view is formed; `now` is the time."""

    def __init__(self, *, least: int = 2) -> None:
        self.now, self.orders = 0.0, []
        rules = Rules(least=least, target=4, most=4, settings=Settings(), silence_s=3.0)
        self.roster = Roster(rules, self.now)
        for id in range(4):
            self.roster.arrive(id, Member(rank=id, host="h", pid=100 + id, id=id), 0, self.now)
        self.number = self.heard().view.number
        self.formed()

    def heard(self) -> NewView:
        self.orders += self.roster.take()
        return [order for _, order in self.orders if isinstance(order, NewView)][-1]

    def formed(self) -> None:
        view = self.heard().view
        self.number = view.number
        for member in view.members:
            self.roster.formed(member.id, view.number, self.now, 1)

    def here(self, *ids: int, round: int = 0, quorum: int = 3, grace_s: float = 2.0) -> None:
        for id in ids:
            self.roster.here(id, Here(view=self.number, round=round, quorum=quorum, grace_s=grace_s), self.now)

    def wait(self, seconds: float) -> None:
        for _ in range(round(seconds * 10)):
            self.now += 0.1
            self.roster.tick(self.now)

    @property
    def ids(self) -> list[int]:
        return [member.id for member in self.heard().view.members]


def test_once_the_quorum_is_there_the_others_have_the_grace_window() -> None:
    run = Watched()
    run.here(0, 2)
    run.wait(60.0)
    assert run.ids == [0, 1, 2, 3], "two are not three"
    run.here(3)
    run.wait(1.5)
    assert run.ids == [0, 1, 2, 3]
    run.wait(1.0)
    assert run.ids == [0, 2, 3]
    assert run.heard().late == (1,)
    assert not run.heard().planned


def test_who_comes_within_the_window_is_in() -> None:
    run = Watched()
    run.here(0, 2, 3)
    run.wait(1.5)
    run.here(1)
    run.wait(60.0)
    assert run.ids == [0, 1, 2, 3]


def test_the_window_of_a_round_is_not_that_of_the_next() -> None:
    run = Watched()
    run.here(0, 1, 2)
    run.here(3)
    run.here(0, 1, round=1)
    run.wait(60.0)
    assert run.ids == [0, 1, 2, 3]
    run.here(2, round=1)
    run.wait(3.0)
    assert run.ids == [0, 1, 2]


def test_who_was_late_is_taken_in_again_and_called_when_the_others_go() -> None:
    run = Watched()
    run.here(0, 1, 3)
    run.wait(3.0)
    run.formed()
    run.roster.ready(2, run.number, run.now)
    planned = run.heard()
    assert planned.planned
    assert run.ids == [0, 1, 3, 2]
    assert not [order for _, order in run.orders if isinstance(order, Come)]
    run.roster.going(0, planned.view.number, run.now)
    run.heard()
    assert [(to, order.view) for to, order in run.orders if isinstance(order, Come)] == [(2, planned.view.number)]


def test_with_fewer_members_than_the_quorum_nobody_is_left_out() -> None:
    run = Watched()
    run.roster.leave(3, "failed", run.now)
    run.formed()
    run.roster.leave(1, "failed", run.now)
    run.formed()
    assert run.ids == [0, 2]
    run.here(0)
    run.wait(60.0)
    assert run.ids == [0, 2]


def test_a_loss_while_others_wait_is_not_waited_for() -> None:
    run = Watched()
    run.here(0, 1)
    run.roster.leave(3, "failed", run.now)  # the third of the quorum will not come
    run.formed()
    run.here(0, 1, quorum=2)
    run.wait(3.0)
    assert run.ids == [0, 1]
    assert run.heard().late == (2,)


def test_whose_line_is_cut_may_be_there() -> None:
    run = Watched()
    run.here(0, 1, 2)
    run.roster.down(3, run.now)
    run.wait(2.5)  # less than a silence
    assert run.ids == [0, 1, 2, 3]


@pytest.mark.parametrize("view", [0, 99])
def test_what_is_said_of_another_view_counts_for_nothing(view: int) -> None:
    run = Watched()
    number, run.number = run.number, view
    run.here(0, 1, 2)
    run.number = number
    run.wait(60.0)
    assert run.ids == [0, 1, 2, 3]
