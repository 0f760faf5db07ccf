"""Members that come and go, with real processes: orders in, reports out, standbys, and nothing left."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import time

import pytest

from paceline.launch import standby
from paceline.membership import orders
from paceline.membership.crew import Crew, Means
from paceline.membership.process import Start
from paceline.membership.watch import Watch

SLEEP = "import os, time; print('up', os.getpid()); time.sleep(60)"


class Kept:
    def __init__(self):
        self.lines = []

    def line(self, rank, stream, text):
        self.lines.append((rank, text))

    def raw(self, data):
        raise AssertionError

    def of(self, rank):
        return [text for r, text in self.lines if r == rank]


class Stage:
    """A crew and what it reports, turned by the test."""

    def __init__(self, watch, tmp_path, source, standbys=0, **options):
        self.script = tmp_path / "train.py"
        self.script.write_text(textwrap.dedent(source))
        self.kept, self.reports, self.term = Kept(), [], 1
        self.watch = watch
        means = Means(
            start=lambda id, first: Start(
                rank=id, command=(sys.executable, "-u", str(self.script)), env=os.environ | {"ID": str(id)}
            ),
            standby=Start(rank=-1, command=standby.command(sys.executable), env=os.environ, waits=True),
            order=lambda id: standby.encode(standby.Order(script=str(self.script), env={"ID": str(id)})),
            standbys=standbys,
            warm_after_s=0.2,
            logs=tmp_path / "logs",
        )
        self.crew = Crew(means, self.kept, report=self.reports.append, **options)

    def start(self, *ids):
        for id in ids:
            self.crew.obey(orders.Start(self.term, id))

    def until(self, ready, limit_s=20.0):
        deadline = time.monotonic() + limit_s
        while not ready():
            assert time.monotonic() < deadline, (self.reports[-5:], self.kept.lines)
            self.crew.turn(self.watch, self.watch.turn())

    def said(self, kind):
        return [report for report in self.reports if isinstance(report, kind)]

    def up(self, id, times=1):
        return lambda: len([text for text in self.kept.of(id) if text.startswith("up")]) >= times


@pytest.fixture
def stage(tmp_path):
    watches = []

    def make(source=SLEEP, **options):
        watches.append(Watch())
        return Stage(watches[-1], tmp_path, source, **options)

    yield make
    for watch in watches:
        watch.__exit__()


def test_members_are_started_ended_and_replaced(stage, tmp_path):
    s = stage()
    s.start(0, 2)
    s.until(lambda: s.up(0)() and s.up(2)())
    assert {r.id: r.pid for r in s.said(orders.Started)} == s.crew.running
    s.start(0)  # an order that is said again
    old = s.crew.running[2]
    s.crew.kill(2, signal.SIGKILL)
    s.until(lambda: s.said(orders.Ended))
    assert s.said(orders.Ended) == [orders.Ended(2, -9)]
    s.start(2)
    s.until(s.up(2, times=2))
    assert len(s.said(orders.Started)) == 3
    assert s.crew.running[2] != old
    assert len((tmp_path / "logs/rank-2.log").read_text().splitlines()) == 2  # both of them
    s.crew.obey(orders.Stop(1, 2))
    s.until(lambda: orders.Ended(2, -15) in s.reports)
    assert list(s.crew.running) == [0]


def test_the_end_of_a_process_is_reported_at_once(stage):
    s = stage()
    s.start(0)
    s.until(s.up(0))
    s.crew.kill(0, signal.SIGKILL)
    turns = []
    s.until(lambda: turns.append(0) or s.said(orders.Ended))
    assert len(turns) <= 6  # of at most 50 ms


def test_one_that_is_stopped_is_told_with_the_beat(stage):
    s = stage()
    s.start(0, 1)
    s.until(lambda: s.up(0)() and s.up(1)())
    s.crew.kill(1, signal.SIGSTOP)
    s.until(lambda: s.said(orders.Beat) and s.said(orders.Beat)[-1].paused == (1,))
    s.crew.kill(1, signal.SIGCONT)
    s.until(lambda: s.said(orders.Beat)[-1].paused == ())


def test_a_replacement_comes_from_a_standby_and_is_as_if_it_were_started(stage, tmp_path):
    source = """
        import os, sys, time
        print("up", os.environ["ID"], sys.argv, __name__, __file__, sys.path[0], sys.stdin.read(), end=" ")
        print("torch" in sys.modules)
        time.sleep(60)
    """
    s = stage(source, standbys=1)
    s.start(0)
    s.until(lambda: s.crew._standbys)
    (waiting,) = s.crew._standbys
    s.crew.kill(0, signal.SIGKILL)
    s.until(lambda: s.said(orders.Ended))
    s.start(0)
    s.until(s.up(0, times=2))
    assert s.crew.running[0] == waiting.pid
    cold, warm = s.kept.of(0)
    assert cold == warm.replace("  True", "  False")  # it has torch already, and differs in nothing else
    assert (tmp_path / "logs/rank-0.log").read_text().splitlines() == [cold, warm]
    s.until(lambda: len(s.crew._standbys) == 1)  # the next one waits


@pytest.mark.slow
def test_how_one_from_a_standby_fails(stage):
    source = "import os, time; print('up')\nif os.path.exists('fail'): raise ValueError('why')\ntime.sleep(60)"
    s = stage(source, standbys=1)
    s.start(0)
    s.until(lambda: s.crew._standbys)
    s.crew.kill(0, signal.SIGKILL)
    s.until(lambda: s.said(orders.Ended))
    s.script.write_text("raise ValueError('why')")
    s.start(0)
    s.until(lambda: len(s.said(orders.Ended)) == 2)
    assert s.said(orders.Ended)[-1] == orders.Ended(0, 1)
    s.until(lambda: s.kept.of(0)[-1] == "ValueError: why")
    trace = s.kept.of(0)[-4:]
    assert trace[0] == "Traceback (most recent call last):"
    assert str(s.script) in trace[1]  # and nothing of ours


def test_a_standby_that_cannot_wait_is_not_tried_again(stage):
    s = stage(standbys=1)
    s.crew._means = Means(
        start=s.crew._means.start,
        standby=Start(rank=-1, command=("false",), env=os.environ, waits=True),
        standbys=1,
        warm_after_s=0.1,
    )
    s.start(0)
    s.until(lambda: s.crew._no_standbys)
    s.crew.kill(0, signal.SIGKILL)
    s.until(lambda: s.said(orders.Ended))
    s.start(0)
    s.until(s.up(0, times=2))


def test_a_standby_that_is_killed_is_followed_by_another_one_a_few_times(stage):
    s = stage(standbys=1)
    s.crew._means = Means(
        start=s.crew._means.start,
        standby=Start(rank=-1, command=("sleep", "60"), env=os.environ, waits=True),
        standbys=1,
        warm_after_s=0.1,
    )
    s.start(0)
    pids = []
    for _ in range(3):
        s.until(lambda: s.crew._standbys)
        pids.append(s.crew._standbys[0].pid)
        os.kill(pids[-1], signal.SIGKILL)
        s.until(lambda: not s.crew._standbys)
    assert len(set(pids)) == 3
    assert s.crew._no_standbys


def test_a_run_that_finished_is_well_whoever_was_lost(stage):
    s = stage("import time; print('up'); time.sleep(0.5)")
    s.start(0, 1)
    s.until(lambda: s.up(0)() and s.up(1)())
    s.crew.kill(1, signal.SIGKILL)
    s.until(lambda: s.said(orders.Ended))
    s.crew.obey(orders.Over(1, ""))
    s.until(lambda: s.crew.gone)
    outcome = s.crew.outcome()
    assert (outcome.code, [(e.rank, e.code) for e in outcome.lost]) == (0, [(1, -9)])


def test_what_fails_after_the_run_has_finished_is_a_failure(stage):
    s = stage("import sys, time; print('up'); time.sleep(0.5); sys.exit(3)")
    s.start(0)
    s.until(s.up(0))
    s.crew.obey(orders.Over(1, ""))
    s.until(lambda: s.crew.gone)
    assert s.crew.outcome().code == 3


def test_a_run_that_is_over_is_blamed_on_what_was_not_made_good(stage):
    s = stage(notice_s=0.3)
    s.start(0, 1)
    s.until(lambda: s.up(0)() and s.up(1)())
    s.crew.kill(0, signal.SIGKILL)
    s.until(lambda: s.said(orders.Ended))
    s.start(0)  # this one was replaced
    s.until(s.up(0, times=2))
    s.crew.kill(1, signal.SIGABRT)
    s.until(lambda: len(s.said(orders.Ended)) == 2)
    s.crew.obey(orders.Over(1, "fewer than 2 are left"))
    s.start(1)  # nothing is started any more
    s.until(lambda: s.crew.gone)
    outcome = s.crew.outcome()
    assert (outcome.code, outcome.first_failed.rank) == (128 + signal.SIGABRT, 1)
    assert [(e.rank, e.asked) for e in outcome.ended] == [(0, True), (1, False)]


@pytest.mark.parametrize(("number", "drains"), [(signal.SIGTERM, True), (signal.SIGINT, False)])
def test_stopping(stage, number, drains):
    s = stage(drain_s=0.5)
    s.start(0, 1)
    s.until(lambda: s.up(0)() and s.up(1)())
    s.crew.stop(number)
    s.start(2)
    s.until(lambda: s.crew.gone)
    assert bool(s.said(orders.DrainHost)) == drains
    assert s.crew.outcome().code == 128 + number
    assert len(s.said(orders.Started)) == 2


def test_the_stubborn_are_killed(stage):
    s = stage(
        "import signal, time; signal.signal(15, lambda *_: print('asked')); print('up')\nwhile True: time.sleep(1)"
    )
    s.crew._grace_s = 0.2
    s.start(0)
    s.until(s.up(0))
    s.crew.stop(signal.SIGINT)
    s.until(lambda: s.crew.gone)
    assert "asked" in s.kept.of(0)
    assert s.said(orders.Ended) == [orders.Ended(0, -9)]


def test_an_error_that_would_come_again_is_reported_with_the_end(stage):
    s = stage(
        """
        import sys
        from paceline.core.errors import ConfigError
        print("x\\n" * 3000)
        raise ConfigError("x=1: give 2")
        """
    )
    s.start(0)
    s.until(lambda: s.said(orders.Ended))
    assert s.said(orders.Ended) == [orders.Ended(0, 1, "x=1: give 2")]


def test_where_all_followed_the_one_that_was_started_again_is_to_blame(stage):
    s = stage(
        """
        import os, sys, time
        print("up")
        if not os.path.exists(sys.argv[0] + ".again"):
            open(sys.argv[0] + ".again", "w").close()
            sys.exit(5)
        print("paceline: member 0 ends: too few")
        sys.exit(1)
        """
    )
    s.start(0)
    s.until(lambda: s.said(orders.Ended))
    s.start(0)
    s.until(lambda: len(s.said(orders.Ended)) == 2)
    s.crew.obey(orders.Over(1, "too few"))
    s.until(lambda: s.crew.gone)
    assert s.crew.outcome().first_failed.code == 5
