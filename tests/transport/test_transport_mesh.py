"""The mesh: lanes in any order of asking, views that do not mix, faults that get their name."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from paceline.core.errors import ConfigError, Interrupted, TimedOut
from paceline.core.view import Member, View
from paceline.transport.channel import Listener
from paceline.transport.mesh import Fault, Mesh

TOKEN = "a token of this run"


def view_of(listeners: list[Listener], number: int = 1) -> View:
    members = [Member(rank=r, host="h", pid=1, address=x.address) for r, x in enumerate(listeners)]
    return View(number=number, members=tuple(members))


@contextlib.contextmanager
def listening(count: int) -> Iterator[list[Listener]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Listener(token=TOKEN)) for _ in range(count)]


@contextlib.contextmanager
def meshes(count: int, limit_s: float = 10) -> Iterator[list[Mesh]]:
    with listening(count) as listeners, contextlib.ExitStack() as stack:
        made = [Mesh(view_of(listeners), r, TOKEN, x, limit_s) for r, x in enumerate(listeners)]
        for mesh in made:
            stack.callback(mesh.close)
        yield made


@pytest.mark.parametrize("seed", range(5))
def test_any_order_of_asking_gives_one_channel_per_lane(seed: int) -> None:
    with meshes(4) as made, ThreadPoolExecutor(4) as pool:
        start = threading.Barrier(4)

        def ask(mesh: Mesh) -> None:
            wanted = [(r, lane) for r in range(4) if r != mesh.rank for lane in ("a", "b")]
            random.Random(seed * 10 + mesh.rank).shuffle(wanted)
            start.wait(5)
            for rank, lane in wanted:
                mesh.channel(rank, lane).send(f"{mesh.rank} to {rank} on {lane}".encode())
            for rank, lane in wanted:
                got = mesh.channel(rank, lane).recv(5)
                assert got == f"{rank} to {mesh.rank} on {lane}".encode()

        list(pool.map(ask, made, timeout=20))
        assert [len(mesh._channels) for mesh in made] == [6, 6, 6, 6]
        assert made[0].sent_bytes >= 6 * (8 + len("0 to 1 on a"))


def test_many_threads_of_one_member_get_the_same_channel() -> None:
    with meshes(2) as (here, there), ThreadPoolExecutor(8) as pool:
        channels = set(pool.map(lambda _: here.channel(1, "a"), range(8)))
        assert len(channels) == 1
        channels.pop().send(b"x")
        assert there.channel(0, "a").recv(5) == b"x"


def test_first_message_goes_through_before_the_other_side_asks() -> None:
    for sender, receiver in ((0, 1), (1, 0)):
        with meshes(2) as made:
            made[sender].channel(receiver, "a").send(b"early bird")
            time.sleep(0.1)
            assert made[receiver].channel(sender, "a").recv(5) == b"early bird"


def test_an_old_view_is_refused_and_a_new_one_waited_for() -> None:
    with listening(2) as listeners:
        old = Mesh(view_of(listeners, number=1), 0, TOKEN, listeners[0], 10)
        new = Mesh(view_of(listeners, number=2), 1, TOKEN, listeners[1], 10)
        with pytest.raises(Interrupted, match=r"member 1 refused .*view 1 is over"):
            old.channel(1, "a")
        with ThreadPoolExecutor(1) as pool:
            dialing = pool.submit(new.channel, 0, "a")
            time.sleep(0.2)
            assert not dialing.done()
            late = Mesh(view_of(listeners, number=2), 0, TOKEN, listeners[0], 10)
            old.close()  # after the next one took over: that one keeps the listener
            dialing.result(5).send(b"new")
        assert late.channel(1, "a").recv(5) == b"new"
        for mesh in (late, new):
            mesh.close()


def test_a_connection_that_came_before_the_mesh_is_not_lost() -> None:
    with listening(2) as listeners, ThreadPoolExecutor(1) as pool:
        first = Mesh(view_of(listeners), 0, TOKEN, listeners[0], 10)
        dialing = pool.submit(first.channel, 1, "a")
        time.sleep(0.2)
        second = Mesh(view_of(listeners), 1, TOKEN, listeners[1], 10)
        dialing.result(5).send(b"x")
        assert second.channel(0, "a").recv(5) == b"x"
        first.close()
        second.close()


def test_close_aborts_every_wait_on_both_sides() -> None:
    with meshes(3, limit_s=60) as made, ThreadPoolExecutor(4) as pool:
        here = made[0].channel(1, "a")
        there = made[1].channel(0, "a")
        made[2]._listener.hand_to(lambda _: None)  # member 2 answers nobody
        waits = [
            pool.submit(here.recv, 60),
            pool.submit(there.recv, 60),
            pool.submit(made[0].channel, 2, "a"),
        ]
        time.sleep(0.1)
        start = time.monotonic()
        made[0].close()
        for wait in waits:
            with pytest.raises(Interrupted):
                wait.result(5)
        assert time.monotonic() - start < 1
        with pytest.raises(Interrupted, match="closed on this side"):
            made[0].channel(1, "b")


def test_a_member_that_cannot_be_reached_is_named() -> None:
    with meshes(2, limit_s=0.3) as made:
        made[1]._listener.close()
        with pytest.raises(TimedOut, match="member 1 cannot be reached"):
            made[0].channel(1, "a")
        with pytest.raises(ConfigError, match=r"rank=5: member 0 has channels to \[1\]"):
            made[0].channel(5, "a")
        with pytest.raises(ConfigError, match="rank=0"):
            made[0].channel(0, "a")
        with pytest.raises(ConfigError, match="rank=7 is not in view 1"):
            Mesh(made[0].view, 7, TOKEN, made[0]._listener, 1)


def test_garbage_after_the_token_harms_nobody() -> None:
    from paceline.transport.channel import connect

    with meshes(2) as made:
        for words in (b"", b"\xc1garbage", b"\x81\xa4wish\xa4join"):
            with connect(made[0]._listener.address, TOKEN, 5) as channel:
                channel.send(words)
                with pytest.raises(Interrupted):
                    channel.recv(5)
        made[1].channel(0, "a").send(b"x")
        assert made[0].channel(1, "a").recv(5) == b"x"


# ---- who is at fault


def test_the_chain_of_waits_leads_to_the_member_that_waits_for_nobody() -> None:
    with meshes(4) as made:
        made[0].waiting["a"], made[3].waiting["a"], made[2].waiting["b"] = 3, 2, 0
        seen = Fault(0, "sent nothing for 1 s", True)
        assert made[1].trace("a", seen) == Fault(2, "sent nothing for 1 s", True)
        assert made[0].trace("a", Fault(3, "x", False)) == Fault(2, "x", False)  # 2 waits in another lane
        made[2].waiting["a"] = 0
        assert "circle (0 → 3 → 2 → 0)" in made[1].trace("a", seen).reason
        made[2].close()
        assert made[1].trace("a", seen).rank == 2
        made[2]._listener.close()
        assert made[1].trace("a", seen).rank == 2


MEMBER = """
import sys, threading
from paceline.core.view import Member, View
from paceline.transport.channel import Listener
from paceline.transport.mesh import Mesh
listener = Listener(token=sys.argv[1])
print(listener.address, flush=True)
members = [Member(rank=r, host="h", pid=1, address=a) for r, a in enumerate(sys.stdin.readline().split())]
mesh = Mesh(View(number=1, members=tuple(members)), 1, sys.argv[1], listener, 10)
print("ready", flush=True)
sys.stdin.readline()
"""


def test_a_stopped_member_is_the_culprit() -> None:
    with listening(2) as listeners:
        process = subprocess.Popen(
            [sys.executable, "-c", MEMBER, TOKEN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            addresses = [listeners[0].address, process.stdout.readline().strip(), listeners[1].address]
            process.stdin.write(" ".join(addresses) + "\n")
            process.stdin.flush()
            assert process.stdout.readline() == "ready\n"
            members = [Member(rank=r, host="h", pid=1, address=a) for r, a in enumerate(addresses)]
            view = View(number=1, members=tuple(members))
            first, last = (Mesh(view, r, TOKEN, x, 10) for r, x in zip((0, 2), listeners))
            last.waiting["a"] = 1
            process.send_signal(signal.SIGSTOP)
            start = time.monotonic()
            assert first.trace("a", Fault(2, "x", True)).rank == 1
            assert time.monotonic() - start < 4
            first.close()
            last.close()
        finally:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()


def test_who_waits_in_a_lane_that_broke_is_woken_wherever_it_is() -> None:
    with meshes(3) as made, ThreadPoolExecutor(2) as pool:
        for lane in ("a", "b"):
            made[0].channel(1, lane).send(b"x")
            assert made[1].channel(0, lane).recv(5) == b"x"
        waiting = [pool.submit(made[0].channel(1, lane).recv, 3) for lane in ("a", "b")]
        time.sleep(0.1)
        start = time.monotonic()
        made[2].tell("a", Fault(1, "x", False), range(3))
        with pytest.raises(Interrupted, match="closed on this side"):
            waiting[0].result(5)
        assert time.monotonic() - start < 2
        assert not waiting[1].done()  # another lane goes on
        made[1].channel(0, "b").send(b"y")
        assert waiting[1].result(5) == b"y"
        with pytest.raises(Interrupted):
            made[2].channel(0, "a")


def test_a_fault_is_told_to_the_others_and_the_first_one_stands() -> None:
    with meshes(4) as made:
        made[3].tell("a", Fault(2, "did not answer for 1 s", True), range(4))
        for rank in (0, 1, 3):
            fault = made[rank].fault("a")
            assert fault is not None
            assert isinstance(fault.error("all_reduce"), TimedOut)
            assert str(fault.error("all_reduce")) == "all_reduce: member 2 did not answer for 1 s"
        stands = made[1].tell("a", Fault(3, "closed the channel", False), range(4))
        assert stands.rank == 2
        assert made[0].fault("a") == stands
        assert made[0].fault("b") is None
        assert made[2].trace("a", Fault(0, "x", False)) == stands  # what is known ends the chain
