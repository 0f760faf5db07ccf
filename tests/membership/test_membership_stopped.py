"""Who is stopped for too long: by the state of its process, and not by what it does or fails to do."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import threading
import time

from hypothesis import given
from hypothesis import strategies as st

from paceline.membership.agent import Agent
from paceline.membership.process import Start
from paceline.membership.stopped import Stopped


class One:
    """A process that is stopped or not."""

    def __init__(self, pid: int, paused: bool = True) -> None:
        self.pid, self.paused = pid, paused


def looks(stopped: Stopped, one: One, times: list[float]) -> list[float]:
    """The times at which it is found to be stopped for too long."""
    return [now for now in times if stopped.too_long([one], now)]


def test_the_time_counts_from_the_first_look() -> None:
    assert looks(Stopped(3.0), One(7), [100.0 + 0.25 * i for i in range(14)])[:1] == [103.0]


@given(st.lists(st.tuples(st.floats(0.25, 1.4), st.booleans()), max_size=60))
def test_only_who_was_stopped_at_every_look_for_so_long_is_lost(steps: list[tuple[float, bool]]) -> None:
    stopped, one, now, since = Stopped(3.0), One(7), 50.0, None
    for step_s, paused in steps:
        now += step_s
        one.paused = paused
        found = stopped.too_long([one], now)
        if paused:
            since = now if since is None else since
        else:
            since = None
        assert not found or (since is not None and now - since >= 3.0)


def test_one_who_is_started_again_begins_anew() -> None:
    stopped = Stopped(1.0)
    assert looks(stopped, One(7), [10.0, 10.4, 10.8]) == []
    assert looks(stopped, One(8), [11.2, 11.6, 12.0]) == []
    assert looks(stopped, One(8), [12.4]) == [12.4]


def test_a_sleep_of_our_own_is_nobodys_silence() -> None:
    """The launcher was stopped together with the members, or the machine slept."""
    stopped = Stopped(3.0)
    assert looks(stopped, One(7), [10.0, 10.5, 11.0, 60.0, 60.5, 61.0]) == []


def test_nobody_is_lost_while_the_others_cannot_do_without() -> None:
    can = [False]
    stopped = Stopped(1.0, lambda: can[0])
    times = [10.0 + 0.25 * i for i in range(20)]
    assert looks(stopped, One(7), times) == []
    can[0] = True
    assert looks(stopped, One(7), [times[-1] + 0.25 * i for i in range(1, 6)])[:1] == [times[-1] + 1.0]


class Show:
    def __init__(self) -> None:
        self.seen = threading.Event()

    def line(self, rank: int, stream: str, text: str) -> None:
        self.seen.set()

    def raw(self, data: bytes) -> None:
        raise AssertionError


def run(source: str, for_s: float | None, silence_s: float = 0.8) -> tuple[list[tuple[int, str]], list[int]]:
    """A member that is losable is stopped for so long; who was lost, and how all ended."""
    sources = ["import time; time.sleep(2.5)", source]
    command = [(sys.executable, "-u", "-c", textwrap.dedent(each)) for each in sources]
    starts = [Start(rank=rank, command=each, env=os.environ) for rank, each in enumerate(command)]
    show, lost = Show(), []
    agent = Agent(
        starts,
        show,
        losable=[1],
        stopped=[Stopped(silence_s, ranks=[1])],
        on_lost=lambda rank, how: lost.append((rank, how)),
    )

    def stop() -> None:
        assert show.seen.wait(20.0)
        if for_s is not None:
            agent.kill(1, signal.SIGSTOP)
            time.sleep(for_s)
            agent.kill(1, signal.SIGCONT)

    thread = threading.Thread(target=stop)
    thread.start()
    outcome = agent.run()
    thread.join()
    return lost, [e.code for e in outcome.ended]


SLEEPS = "import time; print('here'); time.sleep(1.5)"


def test_a_stopped_member_is_ended_for_good() -> None:
    assert run(SLEEPS, 2.0) == ([(1, "stopped for 0.8 s")], [0, -signal.SIGKILL])


def test_a_short_stop_is_no_loss() -> None:
    assert run(SLEEPS, 0.3) == ([], [0, 0])


def test_whoever_only_computes_is_not_suspected() -> None:
    """In one call that gives neither the interpreter nor any word to anybody."""
    busy = "print('here'); import ctypes; ctypes.PyDLL(None).usleep(900_000)"
    assert run(busy, None, silence_s=0.3) == ([], [0, 0])
