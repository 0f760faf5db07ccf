"""Elastic runs with real processes: a scheduler that may be killed, members that come and go, and nothing left behind.

The members here do not train: they speak to the scheduler as training members do, and print the views that they get.
"""

from __future__ import annotations

import os
import re
import signal
import stat
import textwrap
import time
from pathlib import Path

import pytest

from paceline.core import lost
from paceline.core.settings import Settings
from paceline.launch import keeper, reach, record
from paceline.launch.elastic import ElasticJob
from paceline.launch.spec import Elastic, JobSpec
from paceline.membership.agent_line import look, scale
from paceline.testing.cluster import Cluster, leftovers

MEMBER = """
    import os, sys, time
    from pathlib import Path
    from paceline.core.errors import Interrupted, TimedOut
    from paceline.core.view import Member
    from paceline.environment import detect
    from paceline.membership.line import Line
    from paceline.membership.orders import Arrive

    place = detect()
    print("up", os.getpid(), "torch" in sys.modules)
    me = Member(rank=place.rank, host=place.host, pid=os.getpid(), id=place.rank)
    line = Line(place.scheduler, place.token, Arrive(id=place.rank, member=me), limit_s=20)
    if line.standing.view:
        line.ready(0)
    number = 0
    while not Path("finish").exists():
        try:
            new = line.newer(number, 0.1)
        except TimedOut:
            continue
        except Interrupted as error:
            if "cut off" in str(error):  # for a tenth of a second
                continue
            if not line.drained:
                raise
            line.leave("drained")
            print("drained")
            sys.exit(0)
        number, ids = new.view.number, [m.id for m in new.view.members]
        print("view", number, ids, "planned" if new.planned else "")
        if place.rank in ids:
            line.formed(number, 0)
        elif not line.drained:
            line.ready(number)
    line.leave("finished")
    line.close()
    print("done")
"""


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
    """A job, what its members print, and what is said of it."""

    def __init__(self, source, num_members, least, most, name="x", **options):
        Path("train.py").write_text(textwrap.dedent(source))
        elastic = Elastic(least=least, most=most, **({"standbys": 0, "silence_s": 1.0} | options))
        settings = Settings(name=name, root="runs", join_limit_s=20.0)
        spec = JobSpec(script="train.py", num_members=num_members, elastic=elastic, settings=settings, threads=1)
        self.kept, self.said = Kept(), []
        self.job = ElasticJob(spec, elastic, self.kept, notice_s=1.0, grace_s=1.0, drain_s=2.0, say=self.said.append)

    def until(self, ready, limit_s=30.0):
        deadline = time.monotonic() + limit_s
        while not ready():
            assert self.job.poll() is None or ready(), self.told()
            assert time.monotonic() < deadline, self.told()
            time.sleep(0.01)

    def told(self):
        return "\n".join([*(f"[{rank}] {text}" for rank, text in self.kept.lines), *self.said])

    def views(self, id):
        return [text for text in self.kept.of(id) if text.startswith("view")]

    def has_view(self, *members, of=None):
        """Whether these have come to a view of these, in this order."""
        return all(self.views(id) and str(list(of or members)) in self.views(id)[-1] for id in members)

    def finish(self, limit_s=20.0):
        Path("finish").touch()
        outcome = self.job.wait(limit_s)
        assert outcome is not None, self.told()
        return outcome

    @property
    def reach(self):
        where = reach.read(self.job.dir)
        return where.address, where.token


@pytest.fixture
def start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stages = []
    shared = left_in_memory()

    def make(*args, **options):
        stages.append(Stage(*args, **options))
        return stages[-1]

    yield make
    for stage in stages:
        for _ in range(2):
            if stage.job.poll() is None:
                stage.job.stop(signal.SIGINT)
                stage.job.wait(3.0)
        assert stage.job.poll() is not None
        assert leftovers(stage.job.token) == {}
        assert not (stage.job.dir / reach.FILE).exists()
    assert left_in_memory() <= shared


def left_in_memory():
    """Names in /dev/shm of processes that are gone; those of other tests may come and go."""
    return {name for name in os.listdir("/dev/shm") if not any(map(is_alive, re.findall(r"\d+", name)))}


def is_alive(pid):
    return Path(f"/proc/{int(pid)}").exists()


def test_members_meet_and_the_run_finishes(start):
    s = start(MEMBER, 3, 2, 4)
    s.until(lambda: s.has_view(0, 1, 2))
    run = record.read(s.job.dir)
    assert (run.size, run.least, [bool(pid) for pid in run.members]) == (4, 2, [True, True, True, False])
    assert run.scheduler == s.reach[0]
    assert stat.S_IMODE((s.job.dir / reach.FILE).stat().st_mode) == 0o600
    outcome = s.finish()
    assert (outcome.code, s.job.reason, s.job.met) == (0, "", True)
    assert all(s.kept.of(id)[-1] == "done" for id in range(3))
    assert record.read(s.job.dir).exit_code == 0
    assert s.said == []


def test_a_killed_member_is_left_out_and_replaced(start):
    s = start(MEMBER, 3, 2, 4)
    s.until(lambda: s.has_view(0, 1, 2))
    s.job.kill(0, signal.SIGKILL)
    s.until(lambda: any("[1, 2]" in view for view in s.views(1)))
    s.until(lambda: s.has_view(1, 2, 0))  # it comes last, whatever its number
    assert s.views(1)[-1].endswith("planned")
    s.until(lambda: any("joined" in text for text in s.said))
    outcome = s.finish()
    assert (outcome.code, [(e.rank, e.code) for e in outcome.lost]) == (0, [(0, -9)])
    assert "member 0 was killed by signal 9; the others go on; it is started again in 0.5 s (1 of 3)" in s.said[0]
    assert s.said[1] == "member 0 joined: 3 members train now"
    assert [(e.rank, e.how) for e in lost.read(s.job.dir)] == [(0, "killed by signal 9")]
    log = (s.job.dir / "logs/rank-0.log").read_text()
    assert len(re.findall("^up", log, re.M)) == 2  # both of them, one after the other


def test_a_killed_scheduler_comes_back_and_nobody_notices(start):
    s = start(MEMBER, 2, 2, 3)
    s.until(lambda: s.has_view(0, 1))
    before = look(*s.reach)
    os.kill(record.read(s.job.dir).scheduler_pid, signal.SIGKILL)
    s.until(lambda: any("the scheduler ended (killed by signal 9)" in text for text in s.said))
    s.until(lambda: _look(s) and _look(s).term > before.term)
    after = look(*s.reach)
    assert (after.view, after.term) == (before.view, before.term + 1)
    pids = s.job.pids
    time.sleep(1.5)  # longer than a silence
    assert len(s.views(0)) == 1
    s.job.kill(1, signal.SIGKILL)  # it still replaces
    s.until(lambda: len(s.views(0)) == 3 and s.has_view(0, 1))
    assert s.job.pids[0] == pids[0]
    assert s.finish().code == 0


def test_more_members_and_fewer(start):
    s = start(MEMBER, 2, 1, 4)
    s.until(lambda: s.has_view(0, 1))
    assert "will be started" in scale(*s.reach, 4)
    s.until(lambda: sorted(_ids(s)) == [0, 1, 2, 3] and s.has_view(*_ids(s)))
    junior = _ids(s)[-1]
    assert f"member {junior} will leave" in scale(*s.reach, 3)
    s.until(lambda: "drained" in s.kept.of(junior) and s.job.pids[junior] == 0)
    s.until(lambda: s.has_view(*_ids(s)[:3]))
    outcome = s.finish()
    assert (outcome.code, outcome.lost) == (0, [])


def test_a_run_that_cannot_go_on_says_why_and_fails_as_the_member_did(start):
    s = start(MEMBER.replace("number = 0", "number = 0; place.rank == 1 and sys.exit(7)"), 2, 2, 2, replacements=1)
    outcome = s.job.wait(30)
    assert (outcome.code, outcome.first_failed.rank, outcome.first_failed.code) == (7, 1, 7)
    assert "fewer than 2 members can go on: member 1" in s.job.reason
    assert "ended with code 7" in s.job.reason
    assert record.read(s.job.dir).exit_code == 7
    assert len([text for text in s.kept.of(1) if text.startswith("up")]) == 2


@pytest.mark.parametrize("replacements", [0, 3])
def test_a_script_that_fails_on_all(start, replacements):
    s = start("raise ValueError('why')", 2, 1, 2, replacements=replacements)
    outcome = s.job.wait(30)
    assert outcome.code == 1
    assert "ValueError: why" in outcome.first_failed.tail
    assert not s.job.met


def test_a_mistake_in_the_script_ends_the_run_and_the_others_say_so_in_a_line(start):
    wrong = MEMBER.replace("place = detect()", "place = detect(); dismissal.tell_in_a_line()").replace(
        "        if place.rank in ids:",
        "        if place.rank == 1: raise ConfigError('x=1: give 2')\n        if place.rank in ids:",
    )
    wrong = "from paceline.core import dismissal\nfrom paceline.core.errors import ConfigError\n" + textwrap.dedent(
        wrong
    )
    s = start(wrong, 2, 1, 2)
    outcome = s.job.wait(30)
    assert (outcome.code, outcome.first_failed.rank, outcome.first_failed.sure) == (1, 1, "x=1: give 2")
    assert s.job.reason == "member 1 ended with an error that would come again: x=1: give 2"
    assert s.kept.of(0)[-1] == f"paceline: member 0 ends: {s.job.reason}"
    assert not any("Traceback" in text for text in s.kept.of(0))
    assert sum("ConfigError: x=1" in text for _, text in s.kept.lines) == 1


def test_the_first_cause_is_named_although_its_process_was_killed_after_others_had_failed(start):
    slow_end = """
        import os, sys, time
        from pathlib import Path
        from paceline.core.status import Status
        rank = os.environ["PACELINE_RANK"]
        if rank == "1":
            Status(Path(f"runs/x/status/rank-{rank}")).set("failed: ValueError: why")
            Path("failed").touch()
            time.sleep(60)
        while not Path("failed").exists():
            time.sleep(0.01)
        time.sleep(0.2)
        sys.exit(7)
    """
    s = start(slow_end, 2, 2, 2, replacements=0)
    outcome = s.job.wait(30)
    assert (outcome.code, outcome.first_failed.rank, outcome.first_failed.error) == (1, 1, "ValueError: why")


def test_a_script_that_never_joins_runs_once_on_each(start):
    s = start("print('hello')", 3, 2, 3)
    outcome = s.job.wait(30)
    assert (outcome.code, outcome.lost, s.job.met, s.job.reason) == (0, [], False, "")
    assert sorted(s.kept.lines) == [(id, "hello") for id in range(3)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopping_it(start, number):
    s = start(MEMBER, 2, 1, 2)
    s.until(lambda: s.has_view(0, 1))
    s.job.stop(number)
    outcome = s.job.wait(15)
    assert outcome.code == 128 + number
    drained = [id for id in (0, 1) if "drained" in s.kept.of(id)]
    assert drained == ([0, 1] if number == signal.SIGTERM else [])
    assert not any("started again" in line for line in s.said)


def test_one_that_stands_still_is_left_out_and_comes_back(start):
    s = start(MEMBER, 3, 2, 3)
    s.until(lambda: s.has_view(0, 1, 2))
    s.job.kill(1, signal.SIGSTOP)
    s.until(lambda: s.has_view(0, 2))
    s.job.kill(1, signal.SIGCONT)
    s.until(lambda: s.has_view(0, 2, 1))
    assert s.finish().code == 0


def test_a_run_of_the_same_name_begins_with_a_journal_of_its_own(start):
    s = start(MEMBER, 2, 2, 2)
    s.until(lambda: s.has_view(0, 1))
    assert s.finish().code == 0
    Path("finish").unlink()
    s = start(MEMBER, 2, 2, 2)
    s.until(lambda: s.has_view(0, 1))
    assert look(*s.reach).term == 1
    assert s.finish().code == 0


@pytest.mark.slow
def test_a_replacement_from_a_standby(start):
    s = start(MEMBER, 2, 1, 2, standbys=1)
    s.until(lambda: s.has_view(0, 1))
    s.until(lambda: len(s.job._crew._standbys) == 1)
    (waiting,) = s.job._crew._standbys
    time.sleep(3)
    s.job.kill(1, signal.SIGKILL)
    s.until(lambda: len(s.views(0)) == 3 and s.has_view(0, 1))
    ups = [text.split() for text in s.kept.of(1) if text.startswith("up")]
    assert [up[2] for up in ups] == ["False", "True"]
    assert int(ups[1][1]) == waiting.pid
    assert s.finish().code == 0


@pytest.mark.slow
def test_many_deaths_of_members_and_scheduler(start):
    s = start(MEMBER, 3, 1, 3, replacements=9)
    s.until(lambda: s.has_view(0, 1, 2))
    for turn in range(6):
        if turn % 2:
            os.kill(record.read(s.job.dir).scheduler_pid, signal.SIGKILL)
        s.job.kill(turn % 3, signal.SIGKILL)
        s.until(lambda turn=turn: _replaced(s) == turn + 1)
        s.until(lambda: (ids := _ids(s)) and len(ids) == 3 and s.has_view(*ids))
    outcome = s.finish()
    assert outcome.code == 0
    assert len(outcome.lost) == 6


def _look(stage):
    try:
        return look(*stage.reach, limit_s=1.0)
    except Exception:
        return None


def _replaced(stage):
    picture = _look(stage)
    return sum(seen.replaced for seen in picture.members) if picture else 0


def _ids(stage):
    picture = _look(stage)
    return [member.id for member in picture.view.members] if picture and picture.view else []


def test_in_a_cluster():
    with Cluster(2, elastic=Elastic(least=1, most=3, standbys=0)).start(textwrap.dedent(MEMBER)) as running:
        running.wait_for(0, "[0, 1]")
        running.kill(1)
        running.wait_for(0, "view 3 [0, 1]")
        assert "member 1 was killed by signal 9" in running.said[0]


@pytest.mark.slow
def test_members_finish_without_a_scheduler_that_cannot_be_kept(start, monkeypatch):
    monkeypatch.setattr(keeper, "_RESTARTS", 1)
    s = start(MEMBER, 2, 2, 2)
    s.until(lambda: s.has_view(0, 1))
    first = record.read(s.job.dir).scheduler_pid
    os.kill(first, signal.SIGKILL)
    s.until(lambda: record.read(s.job.dir).scheduler_pid != first)
    os.kill(record.read(s.job.dir).scheduler_pid, signal.SIGKILL)
    s.until(lambda: any("it is not started again" in text for text in s.said))
    assert all(s.job.pids)
    assert s.finish(limit_s=40).code == 0  # members wait for a while for the answer to their Leave
