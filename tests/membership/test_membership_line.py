"""A member's and an agent's line: what is heard, what is ignored, and what a break costs."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest

from paceline.core.errors import AuthError, ConfigError, Interrupted, TimedOut
from paceline.core.settings import Settings
from paceline.core.view import Member, View
from paceline.membership.agent_line import AgentLine
from paceline.membership.line import _ANSWER_LIMIT_S, _LEAVE_LIMIT_S, Line
from paceline.membership.messages import Refused
from paceline.membership.orders import (
    Arrive,
    Beat,
    Broken,
    Drain,
    DrainHost,
    Ended,
    Host,
    Leave,
    NewView,
    Noted,
    Over,
    Ready,
    Standing,
    Start,
    Started,
    ToScheduler,
    decode,
    encode,
)
from paceline.transport.channel import Listener
from tests.membership._scheduling import TOKEN, me, until


class Desk:
    """The other end of a line, which says what the test wants."""

    def __init__(self, port=0):
        self.listener = Listener("127.0.0.1", TOKEN, port=port)
        self.address = self.listener.address
        self.term = 1
        self.channel = None

    def meet(self, kind=Arrive):
        """Take the next line; its first word."""
        self.channel = self.listener.accept(10.0)
        first = decode(self.channel.recv(10.0), ToScheduler)
        assert isinstance(first, kind)
        if kind is Arrive:
            self.say(Standing(term=self.term, settings=Settings(), least=1))
        return first

    def say(self, message):
        self.channel.send(encode(message))

    def hear(self):
        return decode(self.channel.recv(10.0), ToScheduler)

    def hear_not_a_beat(self):
        while isinstance(message := self.hear(), Beat):
            pass
        return message

    def view(self, number, term=None, members=(0, 1)):
        chosen = tuple(Member(rank=r, id=i, host="h", pid=1000 + i) for r, i in enumerate(members))
        self.say(NewView(term=term or self.term, view=View(number=number, members=chosen), planned=False))

    def close(self):
        if self.channel:
            self.channel.close()
        self.listener.close()


@contextlib.contextmanager
def met(kind=Arrive):
    """A desk, and a line to it."""
    desk = Desk()
    found = []
    host = Host(name="a", slots=2, running=(5,))
    dial = {
        Arrive: lambda: Line(desk.address, TOKEN, me(0), limit_s=10.0),
        Host: lambda: AgentLine(desk.address, TOKEN, host, 10.0),
    }[kind]
    thread = threading.Thread(target=lambda: found.append(dial()))
    thread.start()
    desk.meet(kind)
    thread.join(10.0)
    try:
        yield desk, found[0]
    finally:
        found[0].close()
        desk.close()


def test_views_are_heard_and_old_ones_are_not():
    with met() as (desk, line):
        heard = []
        line.on_view = lambda new: heard.append((new.term, new.view.number))
        desk.view(3)
        assert line.newer(0, 5.0).view.number == 3
        desk.view(2)
        desk.view(3)
        desk.view(4, term=2)
        desk.view(9, term=1)  # of a scheduler that was replaced
        desk.view(5, term=2)
        assert line.newer(4, 5.0).view.number == 5
        assert heard == [(1, 3), (2, 4), (2, 5)]
        desk.say(Drain(1))
        desk.view(6, term=2)
        line.newer(5, 5.0)
        assert not line.drained
        with pytest.raises(TimedOut, match="no view after view 6 within"):
            line.newer(6, 0.1)
        desk.say(Drain(2))
        with pytest.raises(Interrupted, match="asked to leave"):
            line.newer(6, 5.0)
        assert line.drained


def test_a_refusal_is_raised_to_who_waits_and_to_who_comes():
    with met() as (desk, line):
        desk.say(Refused("left", "too few"))
        for _ in range(2):
            with pytest.raises(Interrupted, match="too few"):
                line.newer(0, 5.0)
    desk = Desk()
    with contextlib.closing(desk):

        def refuse():
            channel = desk.listener.accept(5.0)
            channel.recv(5.0)
            channel.send(encode(Refused("config", "id 7 is wrong")))
            channel.drain(5.0)

        thread = threading.Thread(target=refuse)
        thread.start()
        with pytest.raises(ConfigError, match="id 7 is wrong"):
            Line(desk.address, TOKEN, me(0), limit_s=5.0)
        thread.join()
        with pytest.raises(AuthError):
            Line(desk.address, "another", me(0), limit_s=5.0)


def test_a_broken_line_is_dialled_again_and_what_was_said_is_said_again():
    with met() as (desk, line):
        desk.view(4)
        line.newer(0, 5.0)
        line.broken(4, 1, "it closed")
        assert desk.hear() == Broken(4, 1, "it closed")
        desk.channel.close()
        desk.term = 2
        assert desk.meet().view == 4
        assert desk.hear() == Broken(4, 1, "it closed")
        desk.view(5, members=(1,))  # without this member
        line.newer(4, 5.0)
        line.ready(5)
        assert desk.hear() == Ready(5)
        desk.view(6, members=(1, 2))
        line.newer(5, 5.0)
        desk.channel.close()
        assert desk.meet().view == 6
        assert desk.hear() == Ready(5)  # it is still not taken in; the break is of the past
        desk.view(7)
        line.newer(6, 5.0)
        desk.channel.close()
        desk.meet()
        line.formed(7, 3)
        assert desk.hear().view == 7
        assert line.standing.term == 2


def test_who_is_cut_off_is_told_so_only_when_it_needs_a_view():
    desk = Desk()
    lines = []
    thread = threading.Thread(target=lambda: lines.append(Line(desk.address, TOKEN, me(3), limit_s=5.0)))
    thread.start()
    desk.meet()
    thread.join()
    line = lines[0]
    with contextlib.closing(line):
        desk.close()
        time.sleep(0.2)
        line.formed(1, 1)  # no error
        with pytest.raises(Interrupted, match="member 3 is cut off from the scheduler") as caught:
            line.newer(0, 0.5)
        assert not isinstance(caught.value, TimedOut)
        port = int(desk.address.rpartition(":")[2])
        again = Desk(port)
        with contextlib.closing(again):
            again.meet()
            again.view(2)
            assert line.newer(0, 5.0).view.number == 2


def test_a_dead_line_is_found_out_by_dialling_again(monkeypatch):
    monkeypatch.setattr("paceline.membership.line._PROBE_S", 0.2)
    with met() as (desk, line):
        silent = desk.channel  # open, but nobody is there any more
        threading.Thread(target=lambda: (desk.meet(), desk.view(8)), daemon=True).start()
        assert line.newer(0, 5.0).view.number == 8
        silent.close()


def test_who_has_given_up_leaves_at_once(monkeypatch):
    monkeypatch.setattr("paceline.membership.line._PROBE_S", 0.2)
    with met() as (desk, line):
        silent = desk.channel  # open, and whoever dials is not answered: as behind a cut cable
        with pytest.raises(Interrupted, match="member 0 is cut off from the scheduler"):
            line.newer(0, 1.0)
        began = time.monotonic()
        line.leave("failed")
        line.close()
        assert time.monotonic() - began < min(_LEAVE_LIMIT_S, _ANSWER_LIMIT_S) / 2
        silent.close()


def test_leave_waits_until_it_is_known():
    with met() as (desk, line):
        thread = threading.Thread(target=line.leave, args=("finished",))
        thread.start()
        assert desk.hear() == Leave("finished")
        desk.channel.close()  # killed before it was written down
        desk.meet()
        assert desk.hear() == Leave("finished")
        assert thread.is_alive()
        desk.say(Noted(1))
        thread.join(5.0)
        assert not thread.is_alive()


def test_close_wakes_who_waits():
    with met() as (_desk, line):
        caught = []

        def wait():
            try:
                line.newer(0, 30.0)
            except Interrupted as error:
                caught.append(str(error))

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.05)
        line.close()
        thread.join(5.0)
        assert caught == ["the line to the scheduler was closed on this side"]


def test_garbage_from_the_scheduler_costs_a_dial():
    with met() as (desk, line):
        desk.channel.send(b"\xc1")
        desk.meet()
        desk.view(1)
        assert line.newer(0, 5.0).view.number == 1


def test_an_agent_beats_and_obeys_in_order():
    with met(Host) as (desk, line):
        line.beat([2])
        assert Beat((2,)) in (desk.hear(), desk.hear())
        assert isinstance(desk.hear(), Beat)
        desk.say(Start(2, 0))
        desk.say(Start(1, 1))  # of a scheduler that was replaced
        desk.say(Over(2, "enough"))
        assert [line.orders.get(timeout=5.0) for _ in range(2)] == [Start(2, 0), Over(2, "enough")]


def test_what_an_agent_could_not_say_it_says_later():
    with met(Host) as (desk, line):
        desk.say(Start(1, 0))
        line.orders.get(timeout=5.0)
        line.started(0, 77)
        assert desk.hear_not_a_beat() == Started(0, 77)
        desk.close()
        until(lambda: not line._tie.up)
        line.ended(0, -9)
        line.ended(5, 1)
        with contextlib.closing(Desk(int(desk.address.rpartition(":")[2]))) as again:
            assert again.meet(Host).running == (0, 5)  # until it has said that they ended
            assert [again.hear_not_a_beat(), again.hear_not_a_beat()] == [Ended(0, -9), Ended(5, 1)]
            until(lambda: not line._running)
            again.channel.close()
            back = again.meet(Host)
            assert (back.running, back.ended) == ((), (Ended(0, -9), Ended(5, 1)))  # who was told may be gone
            again.say(Start(1, 5))
            line.orders.get(timeout=5.0)
            again.channel.close()
            back = again.meet(Host)
            assert (back.running, back.ended) == ((5,), (Ended(0, -9),))


def test_an_agent_tells_each_scheduler_that_its_host_must_go():
    """What the one before was told may have been lost with it: it was stopped, and is killed."""
    with met(Host) as (desk, line):
        line.drain_host()
        assert desk.hear_not_a_beat() == DrainHost()
        desk.channel.close()
        assert desk.meet(Host).running == (5,)
        assert desk.hear() == DrainHost()


def test_a_refused_agent_is_told_why():
    with met(Host) as (desk, line):
        desk.say(Refused("config", "another version"))
        assert line.orders.get(timeout=5.0) == Over(0, "another version")
