"""The rules of membership, one by one and in any order of events."""

from __future__ import annotations

import contextlib
import itertools
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.core.errors import ConfigError, Interrupted, TimedOut
from paceline.core.settings import Settings
from paceline.core.view import Member
from paceline.membership.books import LEFT
from paceline.membership.orders import Drain, Ended, NewView, Over, Standing, Start, Stop
from paceline.membership.roster import Roster
from paceline.membership.seats import Rules
from tests.membership._world import World


def ids(view):
    return [m.id for m in view.members] if view else None


def formed(world, seconds=3.0):
    """Let time pass; the members of the present view, which all of them have formed."""
    world.run(seconds)
    view = world.picture().view
    assert all(p.formed == view.number for p in world.living() if p.within(view))
    return ids(view)


def process(world, id):
    return next(p for p in reversed(world.processes) if p.id == id)


def test_all_that_were_started_are_the_first_view():
    world = World({"a": 2, "b": 2}, least=2, target=3, most=4)
    assert formed(world) == [0, 1, 2]
    assert world.last.number == 1
    assert [p.host for p in world.processes] == ["a", "a", "b"]


def test_those_who_came_begin_at_the_limit_and_the_late_one_joins():
    world = World({"a": 3}, least=2, target=3, most=3)
    process(world, 1).slow_s = 19.9
    process(world, 2).slow_s = 21.0
    world.run(19.8)
    assert world.picture().view is None
    assert formed(world, 4.0) == [0, 1, 2]
    assert [ids(v) for v in world.views.values()] in ([[0, 1], [0, 1, 2]], [[0], [0, 1], [0, 1, 2]])


def test_a_run_begins_with_those_for_whom_there_is_room():
    world = World({"a": 2}, least=1, target=4, most=4, begin=2)
    assert formed(world, 4.0) == [0, 1]
    waits = World({"a": 2}, least=1, target=4, most=4)
    waits.run(4.0)
    assert waits.picture().view is None


def test_as_many_as_a_run_begins_with_are_waited_for():
    world = World({"a": 3}, least=1, target=3, most=3, begin=2)
    process(world, 0).slow_s = process(world, 1).slow_s = 4.0
    world.run(3.0)
    assert world.picture().view is None
    assert sorted(formed(world, 6.0)) == [0, 1, 2]
    with pytest.raises(ConfigError, match="begin=3: must be between least=1 and target=2"):
        Rules(least=1, target=2, most=4, begin=3)


@pytest.mark.parametrize("slow", [0, 1])
def test_a_slow_member_leaves_and_is_not_replaced(slow):
    world = World({"a": 2, "b": 2}, least=2, target=4, most=4)
    assert formed(world) == [0, 1, 2, 3]
    world.do(lambda r: r.slow(slow, "takes twice as long", world.now))
    world.do(lambda r: r.slow(2, "takes twice as long", world.now))  # one at a time
    assert formed(world, 30.0) == [id for id in range(4) if id != slow]
    assert not process(world, slow).alive
    seen = next(m for m in world.picture().members if m.id == slow)
    assert (seen.state, seen.why) == ("drained", "was asked to leave: takes twice as long")
    world.do(lambda r: r.scale(4, world.now))
    assert sorted(formed(world, 30.0)) == [0, 1, 2, 3]


def test_members_are_told_who_left_and_was_not_lost():
    roster = Roster(Rules(least=1, target=3, most=3, replacements=0), now=0.0)
    roster.host("a", 3, (), 0.0)
    for id in range(3):
        roster.arrive(id, Member(rank=id, host="a", pid=id + 1), 0, 0.1)
    roster.formed(0, 1, 0.2)
    roster.take()
    roster.slow(1, "takes twice as long", 0.3)
    (view,) = [order for to, order in roster.take() if isinstance(order, NewView) and to == 0]
    assert (ids(view.view), view.left) == ([0, 2], (1,))
    roster.formed(0, 2, 0.4)
    roster.ended("a", 1, 0, 0.5)
    roster.ended("a", 2, -9, 0.6)
    (view,) = [order for to, order in roster.take() if isinstance(order, NewView) and to == 0]
    assert (ids(view.view), view.left) == ([0], (1,))


def begun(least=1, most=3, **rules):
    """Members on one host, all in a view that was formed, and a step taken."""
    roster = Roster(Rules(least=least, target=most, most=most, **rules), now=0.0)
    roster.host("a", most, (), 0.0)
    for id in range(most):
        roster.arrive(id, Member(rank=id, host="a", pid=id + 1), 0, 0.1)
    roster.formed(0, 1, 0.2, step=1)
    return roster


def state(roster, id):
    seen = next(m for m in roster.look(9.0, 9.0).members if m.id == id)
    return seen.state, seen.why, seen.unsure


@pytest.mark.parametrize("says", [True, False], ids=["by sys.exit", "by os._exit"])
def test_a_script_that_ends_well_before_the_run_has_left_and_is_not_replaced(says):
    roster = begun()
    if says:
        roster.leave(1, "left", 0.3)
        assert ids(roster.look(0.3, 0.3).view) == [0, 2]
        assert state(roster, 1)[0] == "leaving"
    roster.ended("a", 1, 0, 0.4)
    assert state(roster, 1) == ("drained", LEFT, False)
    assert ids(roster.look(0.4, 0.4).view) == [0, 2]
    for now in (1.0, 2.0, 3.0):
        roster.tick(now)
    assert not any(isinstance(order, Start) and order.id == 1 for _, order in roster.take()[4:])
    assert "will be started" in roster.scale(3, 3.1)


def test_a_script_that_seemed_to_end_well_and_did_not_is_replaced():
    """sys.exit(3): the interpreter tells nobody with what it will end."""
    roster = begun()
    roster.leave(1, "left", 0.3)
    roster.ended("a", 1, 3, 0.4)
    assert state(roster, 1) == ("lost", "ended with code 3", False)
    roster.tick(1.0)
    assert state(roster, 1)[0] == "starting"
    assert instead(roster, 1, 2) == (1,)


def instead(roster, id, number):
    """Who joins the next view in a lost one's place, as the others hear."""
    roster.formed(0, number, 1.1)
    roster.arrive(id, Member(rank=id, host="a", pid=id + 11), 0, 1.2)
    roster.ready(id, 0, 1.3)
    views = [order for to, order in roster.take() if isinstance(order, NewView) and to == 0]
    assert id in ids(views[-1].view)
    return views[-1].instead


def test_who_left_and_is_wanted_again_joins():
    roster = begun()
    roster.scale(2, 0.3)
    roster.formed(0, 2, 0.4)
    roster.leave(2, "drained", 0.5)
    roster.ended("a", 2, 0, 0.6)
    roster.scale(3, 0.7)
    assert instead(roster, 2, 2) == ()


@pytest.mark.parametrize("least", [1, 3])
def test_a_run_whose_scripts_all_end_well_before_it_is_over_and_has_finished(least):
    """As where all stop early; others are on their way out while the first has gone."""
    roster = begun(least)
    for id in range(3):
        assert roster.over is None
        roster.leave(id, "left", 0.3 + id / 10)
        roster.tick(0.35 + id / 10)
    assert roster.over is None  # what they end with says so
    for id in range(3):
        roster.ended("a", id, 0, 0.7)
    assert roster.over == ""


def test_who_still_trains_when_too_few_are_left_is_told():
    roster = begun(least=3)
    roster.leave(1, "left", 0.3)
    roster.ended("a", 1, 0, 0.4)
    assert roster.over is None
    roster.formed(0, 2, 0.5)
    roster.tick(0.6)
    assert f"member 1 on a {LEFT}" in roster.over


@pytest.mark.parametrize("ends", [True, False])
def test_one_that_is_needed_and_seemed_to_end_well_is_replaced_if_it_did_not(ends):
    """The others meet without it before its process has ended."""
    roster = begun(least=2, most=2)
    roster.leave(1, "left", 0.3)
    roster.formed(0, 2, 0.35)
    roster.tick(0.4)
    assert roster.over is None
    if ends:
        roster.ended("a", 1, 3, 0.5)
        roster.tick(1.1)
        assert (roster.over, state(roster, 1)[0]) == (None, "starting")
        return
    for tenths in range(5, 100):
        roster.beat("a", (), tenths / 10)
        roster.tick(tenths / 10)
    assert f"member 1 on a {LEFT}" in roster.over


def test_how_a_member_fails_may_end_the_run_so_nobody_says_that_it_is_started_again():
    roster = begun()
    roster.leave(1, "failed", 0.3)
    assert state(roster, 1) == ("lost", "left: failed", True)
    roster.ended("a", 1, 1, 0.4)
    assert state(roster, 1) == ("lost", "ended with code 1", False)
    other = begun()
    other.leave(1, "failed", 0.3)
    other.ended("a", 1, 1, 0.4, "lr=-1: give more")
    assert "would come again: lr=-1" in other.over


@pytest.mark.parametrize("ends", [True, False])
def test_the_reason_has_how_a_process_ended_that_had_said_that_it_failed(ends):
    roster = begun(least=2, most=2, replacements=0)
    roster.leave(0, "failed", 0.3)
    roster.leave(1, "failed", 0.3)
    roster.ended("a", 1, 1, 0.4)
    assert roster.over is None
    if ends:
        roster.ended("a", 0, 1, 0.5)
        assert "member 0 on a ended with code 1; member 1 on a ended with code 1 (" in roster.over
        return
    for tenths in range(5, 100):
        roster.beat("a", (), tenths / 10)
        roster.tick(tenths / 10)
    assert "member 0 on a left: failed" in roster.over


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("least", [1, 2])
def test_a_run_without_a_step_has_not_finished_where_one_that_is_needed_failed(least, ended):
    roster = Roster(Rules(least=least, target=2, most=2), now=0.0)
    roster.host("a", 2, (), 0.0)
    for id in (0, 1):
        roster.arrive(id, Member(rank=id, host="a", pid=id + 1), 0, 0.1)
    roster.formed(0, 1, 0.2)
    roster.leave(1, "failed", 0.3)
    if ended:
        roster.ended("a", 1, 1, 0.4)
    roster.leave(0, "finished", 0.5)
    said = "member 1 failed before the first step, and 1 of at least 2 members were left"
    assert roster.over == ("" if least == 1 else said)


def test_nobody_leaves_for_being_slow_where_the_least_are_there():
    world = World({"a": 2}, least=2, target=2, most=4)
    assert formed(world) == [0, 1]
    world.do(lambda r: r.slow(1, "takes twice as long", world.now))
    world.do(lambda r: r.slow(3, "nobody knows it", world.now))
    assert formed(world, 30.0) == [0, 1]


def test_too_few_at_the_limit_are_told_who_is_missing():
    world = World({"a": 1}, least=2, target=2, most=2)
    world.run(25)
    assert isinstance(world.refusals[0].error(), TimedOut)
    assert "only 1 of at least 2" in world.refusals[0].message
    assert "member 1" in world.over["a"]


def test_survivors_go_on_at_once_and_the_lost_one_is_replaced():
    world = World({"a": 4}, least=2, target=4, most=4)
    formed(world)
    world.kill(process(world, 0))
    assert ids(world.last) == [1, 2, 3]  # before any time has passed
    assert formed(world) == [1, 2, 3, 0]
    assert [v.size for v in world.views.values()] == [4, 3, 4]
    seen = world.picture().members[0]
    assert (seen.replaced, seen.why, seen.state) == (1, "was killed by signal 9", "in")


def test_two_lost_with_their_host_make_one_view():
    world = World({"a": 2, "b": 2}, least=2, target=4, most=4)
    formed(world)
    world.lose_host("a")
    world.run(2.5)
    assert ids(world.last) == [0, 1, 2, 3]
    world.run(1.0)
    assert [ids(v) for v in world.views.values()] == [[0, 1, 2, 3], [2, 3]]
    assert "silent" in world.picture().members[0].why


def test_a_silent_host_that_comes_back_keeps_its_processes():
    world = World({"a": 2, "b": 2}, least=2, target=4, most=4)
    formed(world)
    before = {p.pid for p in world.living()}
    world.silence("a")
    assert formed(world, 5.0) == [2, 3]
    world.sound("a")
    assert formed(world) == [2, 3, 0, 1]
    assert {p.pid for p in world.living()} == before


def test_a_silent_host_is_replaced_elsewhere_and_its_zombies_are_stopped():
    world = World({"a": 2, "b": 4}, least=2, target=4, most=4)
    formed(world)
    world.silence("a")
    assert formed(world, 8.0) == [2, 3, 0, 1]
    assert {p.host for p in world.living() if p.within(world.last)} == {"b"}
    world.sound("a")
    world.run(2.0)
    assert [p for p in world.living() if p.host == "a"] == []
    assert formed(world) == [2, 3, 0, 1]


@pytest.mark.parametrize("away_s", [1.0, 2.8])
def test_a_short_silence_is_no_loss(away_s):
    world = World({"a": 2, "b": 1}, least=1, target=3, most=3)
    formed(world)
    world.silence("a")
    world.hang_up(process(world, 2))
    process(world, 2).cut = True
    world.run(away_s)
    world.sound("a")
    process(world, 2).cut = False
    world.run(5)
    assert len(world.views) == 1


def test_a_stopped_process_is_left_out_and_rejoins():
    world = World({"a": 3}, least=1, target=3, most=3)
    formed(world)
    process(world, 1).paused = True
    assert formed(world, 4.0) == [0, 2]
    seen = world.picture().members[1]
    assert seen.state == "lost"
    assert seen.again_at - seen.since == pytest.approx(3 * world.rules.silence_s)  # it may go on until then
    process(world, 1).paused = False
    assert formed(world) == [0, 2, 1]
    assert world.picture().members[1].replaced == 0


def test_a_process_that_stays_stopped_is_ended_and_replaced():
    world = World({"a": 2}, least=1, target=2, most=2)
    formed(world)
    process(world, 1).paused = True
    assert formed(world, 20.0) == [0, 1]
    assert world.picture().members[1].replaced == 1


def test_a_break_with_one_silent_suspect_leaves_it_out():
    world = World({"a": 3}, least=1, target=3, most=3)
    formed(world)
    for id in (0, 2):
        world.do(lambda r, id=id: r.broken(id, 1, 1, world.now))
    assert len(world.views) == 1  # a loss may explain it
    world.run(3.2)
    assert ids(world.views[2]) == [0, 2]
    assert formed(world) == [0, 2, 1]  # it was alive, and came back


def test_a_break_that_all_report_is_a_passing_fault():
    world = World({"a": 3}, least=1, target=3, most=3)
    formed(world)
    for id, blamed in (0, 1), (1, 0), (2, -1):
        world.do(lambda r, id=id, blamed=blamed: r.broken(id, 1, blamed, world.now))
    assert ids(world.last) == [0, 1, 2]
    assert world.last.number == 2


def test_after_three_breaks_in_a_row_the_most_blamed_is_left_out():
    world = World({"a": 3}, least=1, target=3, most=3)
    formed(world)
    for number in range(1, 5):
        for id, blamed in (0, 2), (1, 0), (2, 0):
            world.do(lambda r, id=id, number=number, blamed=blamed: r.broken(id, number, blamed, world.now))
    assert [ids(v) for v in world.views.values()] == [[0, 1, 2]] * 4 + [[1, 2]]


def test_an_old_views_break_is_ignored():
    world = World({"a": 3}, least=1, target=3, most=3)
    formed(world)
    world.kill(process(world, 2))
    world.do(lambda r: r.broken(0, 1, 1, world.now))
    world.run(0.4)
    assert ids(world.last) == [0, 1]
    world.run(4)
    assert len(world.views) == 3  # the replacement's


def test_a_planned_view_that_breaks_takes_the_newcomers_out_again():
    world = World({"a": 3}, least=1, target=3, most=3)
    formed(world)
    world.kill(process(world, 2))
    while world.last.number != 3:  # planned, and not formed
        world.now += 0.05
        world.run(0.1)
    assert ids(world.last) == [0, 1, 2]
    world.kill(process(world, 1))
    assert ids(world.last) == [0]
    assert sorted(formed(world)) == [0, 1, 2]


def test_a_newcomer_that_waits_too_long_leaves_nobody_out_but_itself():
    world = World({"a": 3}, least=1, target=3, most=3)
    formed(world)
    world.kill(process(world, 2))
    while world.last.number != 3:  # planned; the others are still in a step
        world.now += 0.05
        world.run(0.1)
    world.do(lambda r: r.broken(2, 3, 0, world.now))
    for _ in range(31):  # and nobody else has anything to say
        world.now += 0.1
        world.do(lambda r: r.beat("a", (), world.now))
        world.do(lambda r: r.tick(world.now))
    assert (world.last.number, ids(world.last)) == (4, [0, 1])
    assert formed(world) == [0, 1, 2]


def test_with_nobody_left_the_next_ones_begin_anew():
    world = World({"a": 2}, least=2, target=2, most=2)
    formed(world)
    for id in (0, 1):
        world.kill(process(world, id))
    assert formed(world) == [0, 1]
    assert [ids(v) for v in world.views.values()] == [[0, 1], [1], [0, 1]]


def test_a_scheduler_that_was_cut_off_from_all_finds_them_in_their_view():
    world = World({"a": 2, "b": 2}, least=2, target=4, most=4)
    formed(world)
    for host in "ab":
        world.silence(host)
    world.run(15)
    world.sound("a")
    world.run(1.0)
    world.sound("b")
    world.run(5)
    assert len(world.views) == 1
    assert [m.state for m in world.picture().members] == ["in"] * 4


def test_replacements_end_with_the_budget_and_the_run_with_them():
    world = World({"a": 2}, least=2, target=2, most=2, replacements=2)
    formed(world)
    for _ in range(3):
        world.kill(process(world, 1))
        world.run(8)
    assert world.starts[1] == 3
    assert "member 1 on a was killed by signal 9" in world.over["a"]
    assert isinstance(world.refusals[0].error(), Interrupted)


def test_the_pause_between_starts_doubles_while_no_view_forms():
    world = World({"a": 2}, least=1, target=2, most=2, replacements=4)
    world.run(0.1)
    begun = []
    for _ in range(4):
        begun.append(process(world, 1).begun)
        world.kill(process(world, 1))
        while process(world, 1).begun == begun[-1]:
            world.run(0.1)
    begun.append(process(world, 1).begun)
    assert [round(b - a, 1) for a, b in itertools.pairwise(begun)] == pytest.approx([0.5, 1.0, 2.0, 4.0], abs=0.31)


def test_a_host_that_keeps_failing_is_quarantined_unless_it_is_the_last():
    world = World({"a": 3, "b": 4}, least=1, target=4, most=4)
    formed(world)
    for id in (0, 1, 2):
        world.kill(process(world, id))
    assert world.picture().quarantined == ("a",)
    assert sorted(formed(world)) == [0, 1, 2, 3]
    assert {p.host for p in world.living()} == {"b"}
    alone = World({"a": 2}, least=1, target=2, most=2, replacements=9)
    formed(alone)
    for _ in range(4):
        alone.kill(process(alone, 1))
        assert formed(alone) == [0, 1]
    assert alone.picture().quarantined == ()


def test_scale_up_and_down():
    world = World({"a": 4}, least=1, target=2, most=4)
    formed(world)
    with pytest.raises(ConfigError, match="size=5: must be between 1 and 4"):
        world.roster.scale(5, world.now)
    world.do(lambda r: r.scale(4, world.now))
    assert formed(world) == [0, 1, 2, 3]
    before = world.last.number
    world.do(lambda r: r.scale(1, world.now))
    assert formed(world) == [0]
    assert world.last.number == before + 1  # one planned view for all three
    assert [p.id for p in world.living()] == [0]
    world.do(lambda r: r.scale(2, world.now))
    assert formed(world) == [0, 1]
    assert all(m.replaced == 0 for m in world.picture().members)


def test_who_comes_back_to_a_run_that_was_to_have_fewer_members_leaves():
    world = World({"a": 3}, least=1, target=3, most=3)
    formed(world)
    away = process(world, 2)
    away.paused = True
    while world.picture().members[2].state != "lost":
        world.run(0.1)
    world.do(lambda r: r.scale(2, world.now))
    away.paused = False
    assert formed(world) == [0, 1]
    assert not away.alive
    world.do(lambda r: r.scale(3, world.now))
    assert formed(world) == [0, 1, 2]


def test_who_was_being_started_when_there_were_to_be_fewer_members_leaves():
    world = World({"a": 2, "b": 1}, least=1, target=2, most=3)
    formed(world)
    world.do(lambda r: r.scale(3, world.now))
    assert process(world, 2).host == "b"
    world.dead.add("b")  # that it shall end does not come through
    world.do(lambda r: r.scale(2, world.now))
    world.run(1.0)
    world.dead.discard("b")
    assert formed(world) == [0, 1]
    assert not process(world, 2).alive


def test_a_host_that_must_go_is_drained_and_its_members_go_on_elsewhere():
    world = World({"a": 2, "b": 4}, least=1, target=4, most=4)
    formed(world)
    world.do(lambda r: r.drain_host("a", world.now))
    assert formed(world, 5.0) == [2, 3, 0, 1]
    assert {p.host for p in world.living()} == {"b"}
    assert not any(m.replaced for m in world.picture().members)


def test_when_all_members_must_go_they_are_told_that_nobody_stays():
    world = World({"a": 2, "b": 2}, least=1, target=2, most=2)
    formed(world)
    told = []
    world.do(lambda r: r.drain_host("a", world.now))
    for process_ in world.living():
        told += [order for order in process_.inbox if isinstance(order, NewView)]
    assert [(order.view.members, order.view.number, order.planned) for order in told] == [((), 2, True)] * 2
    assert sorted(formed(world, 5.0)) == [0, 1]  # elsewhere, from the last checkpoint
    assert {p.host for p in world.living()} == {"b"}
    assert world.last.number == 3


def test_a_run_that_is_stopped_ends_on_all_hosts():
    world = World({"a": 2, "b": 2}, least=1, target=3, most=3)
    formed(world)
    world.do(lambda r: r.end_run(True, world.now))
    assert (world.last.number, world.last.members) == (2, ())  # all go home, and nobody is to go on without others
    world.run(2.0)
    assert world.living() == []
    assert world.over == {"a": "the run was stopped", "b": "the run was stopped"}
    at_once = World({"a": 2, "b": 2}, least=1, target=3, most=3)
    formed(at_once)
    at_once.do(lambda r: r.end_run(False, at_once.now))
    assert at_once.over == world.over


@pytest.mark.parametrize(("code", "found"), [(0, ("drained", LEFT)), (-9, ("lost", "was killed by signal 9"))])
def test_an_end_that_a_killed_scheduler_never_read_is_told_to_the_next(code, found):
    roster = begun()
    roster.host("a", 3, (0, 1, 2), 0.3)
    for _ in range(2):  # the second time it is known
        roster.host("a", 3, (0, 2), 0.4, ended=(Ended(1, code),))
        assert state(roster, 1)[:2] == found


def test_where_other_hosts_may_join_one_is_waited_for():
    world = World({"a": 2}, least=1, target=2, most=2, open=True)
    formed(world)
    world.do(lambda r: r.drain_host("a", world.now))
    world.run(10.0)
    assert not world.over
    world.hosts["b"] = 2
    world.do(lambda r: r.host("b", 2, (), world.now))
    assert sorted(formed(world)) == [0, 1]
    world.do(lambda r: r.drain_host("b", world.now))
    world.run(world.rules.settings.join_limit_s + 2.0)
    assert "no host has a free slot" in world.over["b"]


def test_a_host_that_left_may_come_back_with_another_agent():
    world = World({"a": 2, "b": 1}, least=1, target=2, most=2)
    formed(world)
    world.do(lambda r: r.drain_host("a", world.now))
    world.run(3.0)
    world.do(lambda r: r.host("a", 2, (), world.now))
    assert [site.state for site in world.picture().hosts] == ["leaving", "up"]  # the same agent, on a new line
    world.do(lambda r: r.host("a", 2, (), world.now, "another"))
    assert [site.state for site in world.picture().hosts] == ["up", "up"]
    assert sorted(formed(world, 5.0)) == [0, 1]


def test_when_all_have_finished_the_run_is_over():
    world = World({"a": 2}, least=1, target=2, most=2)
    formed(world)
    for id in (0, 1):
        assert not world.over
        world.leave(process(world, id), "finished")
    assert world.over == {"a": ""}
    assert len(world.views) == 1
    with pytest.raises(Interrupted, match="has finished"):
        world.roster.arrive(0, Member(rank=0, host="a", pid=9), 0, world.now)


def one_of_two_lost():
    roster = Roster(Rules(least=1, target=2, most=2), now=0.0)
    roster.host("a", 2, (), 0.0)
    for id in (0, 1):
        roster.arrive(id, Member(rank=id, host="a", pid=id + 1), 0, 0.1)
    roster.formed(0, 1, 0.2)
    roster.ended("a", 1, -9, 0.3)
    return roster


def test_one_that_starts_when_the_run_finishes_is_not_lost():
    roster = one_of_two_lost()
    roster.tick(5.0)
    assert roster.look(5.0, 5.0).members[1].state == "starting"
    roster.leave(0, "finished", 5.1)
    assert roster.over == ""
    roster.ended("a", 1, -15, 5.2)
    seen = roster.look(5.3, 5.3).members[1]
    assert (seen.state, seen.again_at) == ("drained", 0.0)


def test_one_that_was_to_join_when_the_others_finished_is_sent_home():
    roster = one_of_two_lost()
    roster.formed(0, 2, 0.4)
    roster.tick(5.0)
    roster.arrive(1, Member(rank=1, host="a", pid=9), 0, 5.1)
    roster.ready(1, 0, 5.2)
    assert ids(roster.look(5.2, 5.2).view) == [0, 1]  # which the first one never comes to
    roster.take()
    roster.leave(0, "finished", 5.3)
    assert roster.over == ""
    assert (1, Drain) in [(to, type(order)) for to, order in roster.take()]


def test_a_restarted_scheduler_makes_no_new_view():
    world = World({"a": 2, "b": 1}, least=1, target=3, most=3)
    formed(world)
    for away_s in (0.1, 100.0, 5.0):
        world.restart(away_s)
        world.run(5)
    assert len(world.views) == 1
    assert world.terms == [1, 2, 3, 4]
    world.kill(process(world, 0))
    assert ids(world.last) == [1, 2]


def test_who_does_not_come_back_to_a_restarted_scheduler_is_lost():
    world = World({"a": 2}, least=1, target=2, most=2)
    formed(world)
    process(world, 1).cut = True
    world.restart(1.0)
    world.run(2.8)
    assert len(world.views) == 1
    world.run(0.5)
    assert ids(world.last) == [0]


def test_a_scheduler_that_slept_accuses_nobody():
    world = World({"a": 2, "b": 1}, least=1, target=3, most=3)
    formed(world)
    world.now += 60.0  # it was stopped, and wakes; it reads what one host has said, and not yet the other
    world.do(lambda r: r.beat("a", (), world.now))
    world.do(lambda r: r.tick(world.now))
    world.run(5)
    assert len(world.views) == 1


def test_a_scheduler_that_slept_does_not_take_those_for_silent_whose_words_it_has_not_read():
    world = World({"a": 3}, least=1, target=3, most=3)
    formed(world)
    world.do(lambda r: r.broken(0, 1, 1, world.now))
    world.now += 60.0
    world.do(lambda r: r.tick(world.now))
    for id, blamed in (1, 0), (2, -1):
        world.do(lambda r, id=id, blamed=blamed: r.broken(id, 1, blamed, world.now))
    assert ids(world.last) == [0, 1, 2]


def test_a_number_that_the_journal_lost_is_not_used_again():
    roster = Roster(Rules(least=1, target=1, most=1), 0.0)
    roster.arrive(0, Member(rank=0, host="h", pid=1), 0, 0.0)
    before = roster.dump()
    roster = Roster.load(before, Rules(least=1, target=1, most=1), 0.0)
    roster.arrive(0, Member(rank=0, host="h", pid=1), 7, 0.1)
    for tick in range(1, 50):
        roster.tick(tick / 10)
    assert [o.view.number for _, o in roster.take() if isinstance(o, NewView)][-1] == 8


@pytest.mark.parametrize("back", [(0, 1, 2), (1, 2, 0), (2, 0, 1)])
def test_who_was_replaced_after_the_journals_end_is_followed_by_the_one_in_its_place(back):
    """A full disk: the scheduler that is started again knows nothing of the last replacement."""
    world = World({"a": 3}, least=2, target=3, most=3)
    formed(world)
    journal = world.roster.dump()
    world.kill(process(world, 1))
    assert formed(world) == [0, 2, 1]
    there = world.living()
    world.roster.dump = lambda: journal
    for id, slow_s in zip(back, (0.1, 0.3, 0.5)):  # the order in which they dial again
        process(world, id).begun, process(world, id).slow_s = world.now, 0.2 + slow_s
    world.restart(0.2)
    assert sorted(formed(world, 8.0)) == [0, 1, 2]
    assert world.living() == there


@pytest.mark.parametrize("away_s", [0.2, 4.0], ids=["in", "lost"])  # what the journal's end takes the old one for
@pytest.mark.parametrize("back", [(0, 1, 2), (1, 2, 0), (2, 0, 1)])
def test_who_was_started_after_the_journals_end_is_followed_before_its_first_view(back, away_s):
    world = World({"a": 3}, least=2, target=3, most=3)
    formed(world)
    journal = world.roster.dump()
    world.kill(process(world, 1))
    world.run(0.7)  # enough for a start, and too short for a view
    there = world.living()
    assert (len(there), ids(world.last)) == (3, [0, 2])
    world.roster.dump = lambda: journal
    for id, slow_s in zip(back, (0.1, 0.3, 0.5)):  # the order in which they dial again
        process(world, id).begun, process(world, id).slow_s = world.now, 0.2 + slow_s
    process(world, 1).slow_s += away_s - 0.2
    world.restart(0.2)
    assert sorted(formed(world, 8.0)) == [0, 1, 2]
    assert world.living() == there
    assert world.over == {}


def test_who_was_followed_so_does_not_come_back():
    """It was cut off when another one was started in its place."""
    before = begun()
    roster = Roster.load(before.dump(), Rules(least=1, target=3, most=3), now=5.0)
    roster.arrive(1, Member(rank=1, host="b", pid=9), 0, 5.1)
    with pytest.raises(Interrupted, match="this process ends"):
        roster.arrive(1, Member(rank=1, host="a", pid=2), 1, 5.2)
    with pytest.raises(ConfigError, match="id 1 is taken by process 9"):
        roster.arrive(1, Member(rank=1, host="b", pid=10), 0, 5.3)


def test_a_second_process_is_refused_while_the_first_lives():
    world = World({"a": 1}, least=1, target=1, most=1)
    formed(world)
    with pytest.raises(ConfigError, match="id 0 is taken by process"):
        world.roster.arrive(0, Member(rank=0, host="a", pid=9), 0, world.now)
    with pytest.raises(ConfigError, match="id 1 is not one of 0 to 0"):
        world.roster.arrive(1, Member(rank=1, host="a", pid=9), 0, world.now)


def test_who_is_wanted_again_before_it_has_left_is_started_when_it_has():
    world = World({"a": 3}, least=1, target=3, most=3)
    formed(world)
    said: list[str] = []
    for size in (2, 3, 3):
        world.do(lambda r, size=size: said.append(r.scale(size, world.now)))
    assert said == [
        "3 to 2 members: member 2 will leave",
        "2 to 3 members: member 2 will be started; 1 of them wait for a free slot",
        "3 members, as before",
    ]
    assert sorted(formed(world, 10.0)) == [0, 1, 2]


def test_a_late_newcomer_hears_of_the_present_view_and_that_it_drains():
    world = World({"a": 2}, least=1, target=2, most=2)
    formed(world)
    world.do(lambda r: None)
    roster = world.roster
    roster.scale(1, world.now)
    assert any(isinstance(o, Drain) for _, o in roster.take())
    one = process(world, 1)
    roster.arrive(1, Member(rank=1, host="a", pid=one.pid), 1, world.now)
    kinds = [type(o) for _, o in roster.take()]
    assert kinds == [Standing, NewView, Drain]


def test_rules_are_checked():
    for wrong in ({"least": 0}, {"target": 5}, {"silence_s": 0.0}, {"replacements": -1}):
        with pytest.raises(ConfigError):
            Rules(**({"least": 1, "target": 2, "most": 4} | wrong))
    with pytest.raises(ConfigError, match="journal"):
        Roster.load({"run": "[]"}, Rules(least=1, target=1, most=1), 0.0)


OPS = (
    "kill",
    "pause",
    "resume",
    "cut",
    "mend",
    "silence",
    "sound",
    "restart",
    "break",
    "scale",
    "drain",
    "slow",
    "wait",
    "host",
    "sleep",
)


def disturb(world, op, pick):
    living = world.living()
    one = living[pick % len(living)] if living else None
    host = list(world.hosts)[pick % len(world.hosts)]
    if world.roster.over is not None:
        return
    if op == "restart":
        world.restart(0.1 + pick % 7, living[:1] if pick % 3 == 0 else ())
    elif op == "sleep":
        world.sleep(pick % 41 / 10, ticks_first=pick % 2 == 0)
    elif op == "scale" and world.now >= world.awake_at:
        world.do(lambda r: r.scale(world.rules.least + pick % (world.rules.most - world.rules.least + 1), world.now))
    elif op == "drain" and len(world.hosts) > 1 and host not in world.silent | world.dead:
        world.do(lambda r: r.drain_host(host, world.now))
    elif op == "silence":
        world.silence(host)
    elif op == "sound" and host in world.silent:
        world.sound(host)
    elif op == "host" and pick % 5 == 0:
        world.lose_host(host)
    elif op == "wait":
        world.run(pick % 60 / 10)
    elif one and op == "kill":
        world.kill(one)
    elif one and op in ("pause", "resume"):
        one.paused = op == "pause"
    elif one and op == "slow":
        world.do(lambda r: r.slow(one.id, "is slow", world.now))
    elif one and op == "cut":
        one.cut = True
        world.hang_up(one)
    elif one and op == "mend":
        one.cut = False
    elif one and op == "break" and one.line and one.view:
        blamed = living[pick // 7 % len(living)].id
        world.do(lambda r: r.broken(one.id, one.view.number, blamed, world.now))


def well(world):
    view = world.picture().view
    here = {p.name for p in world.living() if p.formed and p.formed == view.number} if view else set()
    waiting = any(m.state in ("starting", "lost", "draining") for m in world.picture().members)
    return (
        bool(here) and here == {(m.id, m.pid) for m in view.members} == {p.name for p in world.living()} and not waiting
    )


def calm(world):
    """No more faults: who lives is well, and enough time passes."""
    for host in list(world.silent):
        world.sound(host)
    for each in world.living():
        each.paused = each.cut = False
    for _ in range(24):
        world.run(5)
        if well(world):
            break
    living = world.living()
    if world.roster.over is None:
        view = world.picture().view
        assert view is not None, "nobody has a view, and nobody was told so"
        assert {(m.id, m.pid) for m in view.members} == {p.name for p in living}
        assert all(p.formed == view.number for p in living)
        picture = world.picture()
        slots = sum(site.slots for site in picture.hosts if site.state == "up" and site.name not in world.dead)
        spent = sum(m.replaced >= world.rules.replacements for m in picture.members)
        assert min(picture.target, slots) - spent <= view.size <= picture.target, "not as many as were asked for"
    else:
        assert not any(p.line for p in living if p.host not in world.dead), "somebody waits although the run is over"
    assert all(m.replaced <= world.rules.replacements for m in world.picture().members)


def play(hosts, rules, story):
    world = World(hosts, **rules)
    world.run(1.0)
    for op, pick in story:
        disturb(world, op, pick)
        world.run(pick % 11 / 10)
    calm(world)
    return world


RULES = st.sampled_from([(1, 2, 3), (1, 4, 4), (2, 3, 4), (3, 4, 5), (1, 1, 1)]).map(
    lambda sizes: dict(zip(("least", "target", "most"), sizes))
)
HOSTS = st.sampled_from([{"a": 4}, {"a": 2, "b": 2}, {"a": 1, "b": 4, "c": 1}])
STORY = st.lists(st.tuples(st.sampled_from(OPS), st.integers(0, 1000)), max_size=12)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(hosts=HOSTS, rules=RULES, story=STORY)
def test_whatever_happens_nobody_waits_for_ever(hosts, rules, story):
    play(hosts, rules, story)


@pytest.mark.parametrize(
    ("rules", "story"),
    [
        # Its host is silent, it is replaced elsewhere, and that one is killed: where the first may run it cannot start.
        ((1, 1, 1), [("silence", 334), ("pause", 0), ("wait", 388), ("restart", 1), ("kill", 7)]),
        # All are sent home; one of them is lost meanwhile, comes back, and is to go nevertheless.
        ((1, 2, 3), [("pause", 0), ("restart", 185), ("drain", 556), ("kill", 161), ("kill", 185)]),
    ],
)
def test_stories_that_ended_badly(rules, story):
    world = play({"a": 2, "b": 2}, dict(zip(("least", "target", "most"), rules)) | {"replacements": 20}, story)
    assert {p.host for p in world.living()} == {"b"}


@pytest.mark.slow
@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(hosts=HOSTS, rules=RULES, story=st.lists(st.tuples(st.sampled_from(OPS), st.integers(0, 1000)), max_size=40))
def test_long_stories_end_well(hosts, rules, story):
    play(hosts, rules | {"replacements": 20}, story)


def word(roster, rng, number, now):
    """Something that somebody might say, whether it makes sense or not."""
    id, host = rng.randrange(4), rng.choice("ab")
    member = Member(rank=id, host=host, pid=rng.randrange(3))
    view = rng.randrange(max(1, number - 2), number + 1) if number else 0
    events = [
        (6, lambda: roster.arrive(id, member, rng.choice([0, view]), now)),
        (2, lambda: roster.down(id, now)),
        (4, lambda: roster.ready(id, view, now)),
        (3, lambda: roster.broken(id, view, rng.randrange(-1, 4), now)),
        (6, lambda: roster.formed(id, view, now)),
        (1, lambda: roster.leave(id, rng.choice(["finished", "drained", "failed", "?"]), now)),
        (2, lambda: roster.host(host, 2, rng.sample(range(4), 2), now)),
        (3, lambda: roster.beat(host, [id], now)),
        (1, lambda: roster.started(host, id, 5, now)),
        (2, lambda: roster.ended(host, id, rng.choice([0, 1, -9]), now)),
        (0.1, lambda: roster.drain_host(host, now)),
        (1, lambda: roster.scale(rng.randrange(1, 5), now)),
        (1, lambda: roster.slow(id, "is slow", now)),
        (6, lambda: roster.tick(now)),
    ]
    with contextlib.suppress(ConfigError, Interrupted):
        rng.choices([e for _, e in events], weights=[w for w, _ in events])[0]()


def test_random_words_change_nothing_that_is_promised():
    """Any order of any events, also those that no well-behaved member would send."""
    rng = random.Random(5)
    rules = Rules(least=1, target=2, most=4, settings=Settings(join_limit_s=5.0))
    for _ in range(150):
        roster, now, number, term = Roster(rules, 0.0), 0.0, 0, 1
        for _ in range(60):
            now += rng.random()
            word(roster, rng, number, now)
            for to, order in roster.take():
                assert isinstance(to, str) == isinstance(order, Start | Stop | Over)
                if isinstance(order, NewView) and order.view.number < number:  # to one that has come again
                    assert order.view == roster.look(now, now).view
                elif isinstance(order, NewView) and order.view.number != number:
                    going = [m.state for m in roster.look(now, now).members if m.id == to]
                    assert order.view.members or going == ["draining"]  # one that is sent home, where nobody stays
                    assert len({m.id for m in order.view.members}) == order.view.size
                    number = order.view.number
            if rng.random() < 0.05:
                roster, term = Roster.load(roster.dump(), rules, now), term + 1
                assert roster.term == term
        assert all(m.replaced <= 3 for m in roster.look(now, now).members)


def test_an_error_that_would_come_again_ends_the_run_at_once():
    world = World({"a": 3}, least=1, target=3, most=3)
    formed(world)
    gone = process(world, 1)
    gone.alive = False
    world.do(lambda r: r.ended("a", 1, 1, world.now, "lr=-1: give more"))
    world.run(3)
    assert world.over["a"] == "member 1 ended with an error that would come again: lr=-1: give more"
    assert world.starts[1] == 1


def test_a_host_that_joins_with_a_mistake_does_not_end_a_run_that_trains():
    world = World({"a": 2, "b": 2}, least=2, target=3, most=3, replacements=9)
    formed(world)
    world.do(lambda r: r.formed(0, world.picture().view.number, world.now, 1))
    world.kill(process(world, 2))
    while not process(world, 2).alive:
        world.run(0.1)
    again = process(world, 2)
    again.alive = False
    world.do(lambda r: r.ended(again.host, 2, 1, world.now, "no such device"))
    assert len(formed(world, 8.0)) == 3
    assert not world.over


def test_a_script_that_fails_on_all_before_the_first_step_is_not_started_again():
    world = World({"a": 2}, least=1, target=2, most=2)
    formed(world)
    for id in (0, 1):
        assert not world.over
        world.end(process(world, id), 1)
    world.run(5)
    assert "every member failed before the first step" in world.over["a"]
    assert world.starts == {0: 1, 1: 1}


@pytest.mark.parametrize("codes", [(-9, -9), (1, -9)])
def test_who_is_killed_or_has_taken_a_step_is_started_again(codes):
    world = World({"a": 2}, least=1, target=2, most=2)
    formed(world)
    for id, code in enumerate(codes):
        world.end(process(world, id), code)
    assert len(formed(world, 5.0)) == 2
    world.do(lambda r: r.formed(0, world.picture().view.number, world.now, 1))
    for id in (0, 1):
        world.end(process(world, id), 1)
    assert len(formed(world, 8.0)) == 2
