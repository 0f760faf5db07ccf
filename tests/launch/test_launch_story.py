"""What is said of an elastic run, read off two pictures of it."""

from __future__ import annotations

import msgspec
import pytest

from paceline.core.view import Member, View
from paceline.launch.story import has_met, tell, waiting
from paceline.membership.books import LEFT
from paceline.membership.orders import Picture, Seen, Site


def picture(*members, ids=(0, 1), quarantined=(), least=1, over=None):
    view = View(number=1, members=tuple(Member(rank=r, host="h", pid=1, id=i) for r, i in enumerate(ids)))
    hosts = tuple(Site(name=name, slots=1, running=0, state="quarantined") for name in quarantined)
    shown = view if ids else None
    return Picture(term=1, view=shown, least=least, target=2, most=4, members=members, hosts=hosts, over=over)


def seen(id, state="in", **more):
    return Seen(id=id, host="h", pid=1, state=state, since=100.0, **more)


WELL = picture(seen(0), seen(1))


@pytest.mark.parametrize(
    ("after", "lines"),
    [
        (WELL, []),
        (
            picture(seen(0), seen(1, "lost", why="was killed by signal 9", again_at=100.5), ids=(0,)),
            ["member 1 was killed by signal 9; the others go on; it is started again in 0.5 s (1 of 3)"],
        ),
        (
            picture(seen(0), seen(1, "starting", why="was killed by signal 9", replaced=1), ids=(0,)),
            ["member 1 was killed by signal 9; the others go on; it was started again (1 of 3)"],
        ),
        (
            picture(seen(0), seen(1, "lost", why="ended with code 1", replaced=3), ids=(0,)),
            ["member 1 ended with code 1; the others go on without it: it was started again 3 times already"],
        ),
        (picture(seen(0), seen(1, "drained"), ids=(0,)), ["member 1 has left: 1 member trains now"]),
        (picture(seen(0, "draining"), seen(1, "drained")), ["member 1 has left"]),
        (picture(seen(0), seen(1, "leaving"), ids=(0,)), []),  # what its process ends with says how
        (
            picture(seen(0), seen(1, "drained", why=LEFT), ids=(0,)),
            ["member 1 left: its script ended before the run did; 1 member trains now"],
        ),
        (  # not before it is: how it ends may end the run
            picture(seen(0), seen(1, "lost", why="left: failed", again_at=100.5, unsure=True), ids=(0,)),
            [],
        ),
        (
            picture(seen(0), seen(1, "lost", why="ended with code 1", unsure=True), ids=(0,), over="it would again"),
            ["member 1 ended with code 1"],
        ),
        (picture(seen(0), seen(1, "drained"), ids=(0,), over="too few"), []),
        (
            picture(seen(0), seen(1, "lost", why="ended with code 1", replaced=3), ids=(0,), over="too few"),
            ["member 1 ended with code 1: it was started again 3 times already"],
        ),
        (
            picture(seen(0), seen(1, "lost", why="ended with code 1", again_at=100.5), ids=(0,), least=2),
            ["member 1 ended with code 1; the others wait; it is started again in 0.5 s (1 of 3)"],
        ),
        (picture(seen(0), seen(1), seen(2), ids=(0, 1, 2)), ["member 2 joined: 3 members train now"]),
        (
            picture(seen(0), seen(1), quarantined=("h",)),
            ["host h is quarantined: it keeps losing members, and none is started there any more"],
        ),
    ],
)
def test_what_has_happened(after, lines):
    assert tell(WELL, after, replacements=3) == lines
    assert tell(after, after, replacements=3) == []
    losses = [line for line in lines if "joined" not in line and "left" not in line]
    assert tell(None, after, replacements=3) == losses  # some may be lost before anybody looks


def test_who_failed_is_said_to_be_started_again_when_it_is():
    unsure = picture(seen(0), seen(1, "lost", why="ended with code 1", again_at=100.5, unsure=True), ids=(0,))
    again = picture(seen(0), seen(1, "starting", why="ended with code 1", replaced=1), ids=(0,))
    said = ["member 1 ended with code 1; the others go on; it was started again (1 of 3)"]
    assert (tell(WELL, unsure, 3), tell(unsure, again, 3)) == ([], said)
    sure = picture(seen(0), seen(1, "lost", why="ended with code 1", again_at=100.5), ids=(0,))
    said = ["member 1 ended with code 1; the others go on; it is started again in 0.5 s (1 of 3)"]
    assert (tell(unsure, sure, 3), tell(sure, again, 3)) == (said, [])


@pytest.mark.parametrize(("number", "lines"), [(15, ["member 1 was killed by signal 9"]), (2, [])])
def test_nobody_is_said_to_be_started_again_by_a_run_that_is_being_stopped(number, lines):
    lost = picture(seen(0), seen(1, "lost", why="was killed by signal 9", again_at=100.5), ids=(0,))
    assert tell(WELL, lost, 3, stopped_by=number) == lines
    left = picture(seen(0), seen(1, "drained"), ids=(0,))
    assert tell(WELL, left, 3, stopped_by=number) == ["member 1 has left: 1 member trains now"]


def test_a_first_view_is_not_told():
    assert tell(picture(seen(0, "arrived"), seen(1, "starting"), ids=()), WELL, replacements=3) == []


def test_whether_anybody_came():
    assert not has_met(picture(seen(0, "starting"), seen(1, "lost"), ids=()))
    assert not has_met(picture(seen(0, "finished"), ids=()))
    assert has_met(picture(seen(0, "arrived"), ids=()))


@pytest.mark.parametrize(("others", "end"), [("up", ", and are started elsewhere if there is room"), ("leaving", "")])
def test_a_host_that_leaves(others, end):
    def hosts(one, other):
        sites = tuple(Site(name=n, slots=1, running=1, state=s) for n, s in (("a", one), ("b", other)))
        return msgspec.structs.replace(WELL, hosts=sites)

    assert tell(hosts("up", others), hosts("leaving", others), 3) == [f"host a leaves: its members go{end}"]


def up(**slots):
    return tuple(Site(name=name, slots=count, running=0, state="up") for name, count in slots.items())


@pytest.mark.parametrize(
    ("hosts", "wanted", "begin", "line"),
    [
        (up(a=1), "ab", 0, "host b (reached 1 of 2; needs at least 1 member, and has room for 1 of 2; begins without"),
        ((), "ab", 0, "hosts a, b (reached 0 of 2; needs at least 1 member, and has room for 0 of 2)"),
        (up(here=1), "", 0, "a host with free slots (needs at least 1 member, and has room for 1 of 2; begins without"),
        (
            up(a=1),
            "a",
            0,
            "a host with free slots (reached 1 of 1; needs at least 1 member, and has room for 1 of 2; begins without",
        ),
        (up(a=1, b=1), "ab", 0, ""),
        (up(a=1), "ab", 1, ""),  # the run begins without b, as was said before it
        ((), "ab", 1, "hosts a, b (reached 0 of 2; needs at least 1 member, and has room for 0 of 1)"),
    ],
)
def test_for_whom_a_run_waits_that_has_not_begun(hosts, wanted, begin, line):
    shown = msgspec.structs.replace(picture(seen(0, "starting"), ids=()), hosts=hosts)
    said = waiting(shown, list(wanted), begin, 30.0)
    assert said.startswith(f"waiting for {line}") if line else said == ""
    assert said.endswith("; begins without after 30 s)") == line.endswith("begins without")
    assert waiting(msgspec.structs.replace(WELL, hosts=hosts), list(wanted), begin, 30.0) == ""
