"""A scheduler's process that ends is started again, and given up where that does not help."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest

from paceline.launch import keeper
from paceline.launch.keeper import Keeper
from paceline.membership.process import Start
from paceline.membership.watch import Watch

UP = '{"address": "127.0.0.1:9", "term": 1}'


class Nobody:
    def line(self, rank, stream, text):
        raise AssertionError(text)  # the log is enough

    raw = line


def make(source, log, said, pids, **options):
    start = Start(rank=-1, command=(sys.executable, "-u", "-c", source), env=os.environ)
    return Keeper(start, Nobody(), log, on_started=lambda address, pid: pids.append(pid), say=said.append, **options)


def turn(watch, kept, ready, limit_s=20.0):
    deadline = time.monotonic() + limit_s
    while not ready():
        assert time.monotonic() < deadline
        kept.turn(watch, watch.turn())


def test_it_is_started_again(tmp_path):
    said, pids, log = [], [], tmp_path / "scheduler.log"
    with Watch() as watch:
        kept = make(f"import time; print({UP!r}); time.sleep(60)", log, said, pids)
        turn(watch, kept, lambda: len(pids) == 1)
        for number in (2, 3):
            os.kill(pids[-1], signal.SIGKILL)
            turn(watch, kept, lambda number=number: len(pids) == number)
        turn(watch, kept, lambda: log.read_text() == f"{UP}\n" * 3)
        kept.end(watch)
        assert not watch.processes
    assert len(set(pids)) == 3
    assert "the scheduler ended (killed by signal 9); it is started again in 0.1 s" in said[0]
    assert "in 0.2 s" in said[1]


def test_one_that_is_stopped_is_started_again(tmp_path):
    said, pids = [], []
    with Watch() as watch:
        kept = make(f"import time; print({UP!r}); time.sleep(60)", tmp_path / "log", said, pids, silence_s=0.3)
        turn(watch, kept, lambda: len(pids) == 1)
        os.kill(pids[0], signal.SIGSTOP)
        turn(watch, kept, lambda: len(pids) == 2)
        kept.end(watch)
    assert "the scheduler ended (stopped for 0.3 s); it is started again in 0.1 s" in said[0]


def test_it_is_given_up_where_it_cannot_run(tmp_path, monkeypatch):
    monkeypatch.setattr(keeper, "_FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(keeper, "_LONGEST_WAIT_S", 0.01)
    said, pids = [], []
    with Watch() as watch:
        kept = make("raise SystemExit('no such journal')", tmp_path / "scheduler.log", said, pids)
        turn(watch, kept, lambda: kept.gave_up)
        kept.turn(watch, watch.turn())
    assert pids == []
    assert "the scheduler ended 11 times within 60 s (last: exit code 1, its last line: no such journal)" in said[-1]
    assert "scheduler.log" in said[-1]


@pytest.mark.parametrize("before", ["import time", "import signal, time; signal.signal(15, signal.SIG_IGN)"])
def test_it_ends_when_it_is_told(tmp_path, monkeypatch, before):
    monkeypatch.setattr(keeper, "_END_S", 0.3)
    said, pids = [], []
    with Watch() as watch:
        kept = make(f"{before}; print({UP!r}); time.sleep(60)", tmp_path / "scheduler.log", said, pids)
        turn(watch, kept, lambda: pids)
        kept.end(watch)
        assert not watch.processes
    assert said == []
