"""The channel: framing, limits, aborts, and a listener that outlives whatever connects to it."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import AuthError, ConfigError, Interrupted, TimedOut
from paceline.testing.hosts import Hosts
from paceline.transport.address import split_address
from paceline.transport.channel import Channel, Listener, connect

TOKEN = "a token of this run"
Pair = tuple[Channel, Channel]


@contextlib.contextmanager
def pair(encrypt: bool | None = None, host: str = "127.0.0.1", **listening: int) -> Iterator[Pair]:
    with Listener(host, TOKEN, encrypt=encrypt, **listening) as listener:
        here = connect(listener.address, TOKEN, 5, encrypt=encrypt)
        there = listener.accept(5)
        try:
            yield here, there
        finally:
            here.close()
            there.close()


@pytest.fixture(params=[False, True], ids=["plain", "tls"])
def both(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with pair(encrypt=request.param) as channels:
        yield channels


def later(call: Callable[[], object], delay_s: float) -> threading.Thread:
    thread = threading.Thread(target=lambda: (time.sleep(delay_s), call()))
    thread.start()
    return thread


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


# ---- messages


@pytest.mark.parametrize("encrypt", [False, True], ids=["plain", "tls"])
@settings(max_examples=15, deadline=None)
@given(messages=st.lists(st.lists(st.binary(max_size=70_000), max_size=4), min_size=1, max_size=5))
def test_messages_arrive_whole_and_in_order(encrypt: bool, messages: list[list[bytes]]) -> None:
    with pair(encrypt) as (here, there):
        for parts in messages:
            here.send(*parts)
        for parts in messages:
            assert there.recv(5) == b"".join(parts)
        total = sum(8 + len(b"".join(parts)) for parts in messages)
        assert here.sent_bytes == there.received_bytes == total


def test_both_ways_at_once_with_more_than_the_buffers_hold(both: Pair) -> None:
    # Each side sends 24 MB while it receives as much: with TLS, two threads are inside one connection.
    data = [os.urandom(24 << 20) for _ in both]

    def talk(i: int) -> bool:
        with ThreadPoolExecutor(1) as sender:
            sending = sender.submit(both[i].send, data[i])
            got = both[i].recv(30)
            sending.result(30)
        return got == data[1 - i]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(talk, range(2))) == [True, True]


def test_bare_bytes_and_many_parts(both: Pair) -> None:
    here, there = both
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(here.send_raw, memoryview(bytes(range(256)) * 40_000))
        got = bytearray(256 * 40_000)
        there.recv_raw_into(memoryview(got), 5)
        sending.result(5)
        assert got == bytes(range(256)) * 40_000
        sending = pool.submit(there.send, *[bytes([i % 256]) * 1000 for i in range(3000)])  # buffers may hold less
        assert here.recv(5) == b"".join(bytes([i % 256]) * 1000 for i in range(3000))
        sending.result(5)
    here.send_raw(memoryview(b""))
    there.recv_raw_into(memoryview(bytearray()), 5)


def test_try_send_takes_what_fits_and_no_more(both: Pair) -> None:
    here, there = both
    chunk, taken = memoryview(bytes(1 << 20)), 0
    while count := here.try_send_raw(chunk):
        taken += count
    assert 0 < taken < 64 << 20
    there.recv_raw_into(memoryview(bytearray(taken)), 5)


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
def test_ipv6() -> None:
    with pair(host="::1") as (here, there):
        assert not here.encrypted
        here.send(b"x")
        assert there.recv(5) == b"x"


# ---- limits


def test_recv_goes_on_after_its_limit(both: Pair) -> None:
    here, there = both
    frame = (300_000).to_bytes(8, "little") + b"y" * 300_000
    for part in (frame[:3], frame[3:8], frame[8:200_000]):
        here.send_raw(memoryview(part))
        with pytest.raises(TimedOut, match=r"within 0.05 s"):
            there.recv(0.05)
    here.send_raw(memoryview(frame[200_000:]))
    assert there.recv(5) == b"y" * 300_000


def test_limit_of_a_framed_message_holds_against_a_trickle(both: Pair) -> None:
    here, there = both
    frame = memoryview((10).to_bytes(8, "little") + b"0123456789")

    def trickle() -> None:
        for i in range(len(frame)):
            here.send_raw(frame[i : i + 1])
            time.sleep(0.05)

    thread = later(trickle, 0)
    start = time.monotonic()
    with pytest.raises(TimedOut):
        there.recv(0.3)
    assert time.monotonic() - start < 0.6
    thread.join()
    assert there.recv(5) == b"0123456789"


def test_bare_bytes_that_stop_midway_close_the_channel(both: Pair) -> None:
    here, there = both
    into = memoryview(bytearray(10))
    with pytest.raises(TimedOut, match="0 of 10"):
        there.recv_raw_into(into, 0.05)
    assert not there.closed
    here.send_raw(memoryview(b"abc"))
    with pytest.raises(TimedOut, match="3 of 10"):
        there.recv_raw_into(into, 0.1)
    assert there.closed
    with pytest.raises(Interrupted):
        here.recv(5)


def test_send_to_a_member_that_takes_nothing_is_limited(both: Pair) -> None:
    here, _ = both
    here.send_limit_s = 0.2
    start = time.monotonic()
    with pytest.raises(TimedOut, match=r"took no data for 0.2 s"):
        here.send(bytes(64 << 20))
    assert time.monotonic() - start < 5
    assert here.closed


def test_a_frame_larger_than_the_bound_is_refused_on_both_sides(both: Pair) -> None:
    here, there = both
    here.max_message_bytes = there.max_message_bytes = 1000
    here.send(bytes(1000))
    assert len(there.recv(5)) == 1000
    with pytest.raises(ConfigError, match=r"1001 bytes .* max_message_bytes=1000"):
        here.send(bytes(1001))
    here.send_raw(memoryview((1 << 62).to_bytes(8, "little")))
    with pytest.raises(Interrupted, match="more than max_message_bytes=1000"):
        there.recv(5)
    assert there.closed


# ---- closing is the abort


def test_close_wakes_a_blocked_receiver_and_sender_of_this_side(both: Pair) -> None:
    here, _ = both
    with ThreadPoolExecutor(2) as pool:
        receiving = pool.submit(here.recv, 60)
        sending = pool.submit(here.send, bytes(64 << 20))
        time.sleep(0.1)
        start = time.monotonic()
        here.close()
        here.close()
        for future in (receiving, sending):
            with pytest.raises(Interrupted, match="closed on this side"):
                future.result(5)
        assert time.monotonic() - start < 1
    with pytest.raises(Interrupted):
        here.send(b"x")
    assert here._wire._sock.fileno() == -1  # the last one out closed the descriptor


def test_close_of_the_other_side_is_noticed_and_named(both: Pair) -> None:
    here, there = both
    there.name = "member 3"
    with ThreadPoolExecutor(2) as pool:
        receiving = pool.submit(there.recv, 60)
        sending = pool.submit(there.send, bytes(64 << 20))
        time.sleep(0.1)
        here.close()
        for future in (receiving, sending):
            with pytest.raises(Interrupted, match="member 3"):
                future.result(5)


def test_what_was_sent_before_a_close_still_arrives() -> None:
    with pair() as (here, there):
        here.send(b"last words")
        here.close()
        assert there.recv(5) == b"last words"
        with pytest.raises(Interrupted, match="closed the channel"):
            there.recv(5)


# ---- the listener


def bare(listener: Listener) -> socket.socket:
    return socket.create_connection(split_address(listener.address), timeout=5)


def wait_refused(listener: Listener, count: int) -> None:
    deadline = time.monotonic() + 5
    while listener.refused < count and time.monotonic() < deadline:
        time.sleep(0.01)
    assert listener.refused == count


@pytest.mark.parametrize("encrypt", [False, True], ids=["plain", "tls"])
def test_wrong_token_is_refused_and_the_listener_lives_on(encrypt: bool) -> None:
    with Listener(token=TOKEN, encrypt=encrypt) as listener:
        start = time.monotonic()
        with pytest.raises(AuthError, match=r"does not hold the same token"):
            connect(listener.address, "another token", 10, encrypt=encrypt)
        assert time.monotonic() - start < 5  # not tried again until the limit
        wait_refused(listener, 2)  # it has asked once more
        connect(listener.address, TOKEN, 5, encrypt=encrypt).close()
        listener.accept(5).close()
        with pytest.raises(TimedOut):
            listener.accept(0.05)


def test_a_listener_without_the_token_is_found_out() -> None:
    # It says yes to everyone, but cannot prove itself.
    with socket.create_server(("127.0.0.1", 0)) as server:

        def pretend() -> None:
            for _ in range(2):
                sock, _ = server.accept()
                with sock:
                    sock.sendall(b"paceln1\n\0" + bytes(32))
                    sock.recv(1000)
                    sock.sendall(b"\1" + bytes(32))
                    sock.recv(1)

        thread = later(pretend, 0)
        with pytest.raises(AuthError, match="token"):
            connect(f"127.0.0.1:{server.getsockname()[1]}", TOKEN, 5)
        thread.join()


def test_something_else_on_the_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            for _ in range(2):
                with server.accept()[0] as sock:
                    sock.sendall(b"220 mail.example.org ESMTP" + b" " * 50)

        thread = later(greet, 0)
        with pytest.raises(AuthError, match="not a Paceline listener"):
            connect(f"127.0.0.1:{server.getsockname()[1]}", TOKEN, 5)
        thread.join()


@pytest.mark.parametrize("place", [0, 20, 41, 49, 60, 90, 114, 130], ids=lambda place: f"byte {place}")
def test_a_byte_that_is_altered_in_the_greeting_is_no_wrong_token(place: int) -> None:
    """Nothing is encrypted yet; the second time it passes."""
    with Listener(token=TOKEN) as listener, socket.create_server(("127.0.0.1", 0)) as between:

        def pass_on() -> None:
            for spoilt in (True, False):
                near, _ = between.accept()
                with near, bare(listener) as far:
                    with contextlib.suppress(OSError):  # who is refused may be hung up on
                        _relay(near, far, place if spoilt else -1)

        thread = later(pass_on, 0)
        connect(f"127.0.0.1:{between.getsockname()[1]}", TOKEN, 20, encrypt=False).close()
        thread.join()
        listener.accept(5).close()


def _relay(near: socket.socket, far: socket.socket, spoil: int) -> None:
    """Both ways, until one side ends; one byte of all that pass is altered."""
    passed = 0
    while True:
        for source in select.select([near, far], [], [], 20)[0]:
            data = bytearray(source.recv(4096))
            if passed <= spoil < passed + len(data):
                data[spoil - passed] ^= 0xFF
            passed += len(data)
            if not data:
                return
            (far if source is near else near).sendall(data)


def test_one_plain_and_one_encrypted_say_so() -> None:
    with Listener(token=TOKEN, encrypt=True) as listener:
        with pytest.raises(AuthError, match=r"wants TLS, this side plain TCP: .*encrypt="):
            connect(listener.address, TOKEN, 5, encrypt=False)


def test_garbage_silent_and_slow_newcomers_delay_nobody() -> None:
    with Listener(token=TOKEN, auth_limit_s=0.5) as listener, contextlib.ExitStack() as stack:
        for _ in range(20):  # silent
            stack.enter_context(bare(listener))
        for _ in range(10):
            stack.enter_context(bare(listener)).sendall(os.urandom(4096))
        bare(listener).close()
        slow = stack.enter_context(bare(listener))
        start = time.monotonic()
        connect(listener.address, TOKEN, 5).close()
        listener.accept(5).close()
        assert time.monotonic() - start < 0.4
        with contextlib.suppress(OSError):  # one byte at a time does not win more time
            for byte in b"paceln1\n" + bytes(60):
                slow.send(bytes([byte]))
                time.sleep(0.03)
        wait_refused(listener, 32)
        connect(listener.address, TOKEN, 5).close()
        listener.accept(5).close()


def test_a_flood_of_silent_connections_keeps_no_member_out() -> None:
    with Listener(token=TOKEN, auth_limit_s=60, max_newcomers=8) as listener, contextlib.ExitStack() as stack:
        for _ in range(50):
            stack.enter_context(bare(listener))
        connect(listener.address, TOKEN, 5).close()
        listener.accept(5).close()
        assert len(listener._newcomers) <= 8


def test_a_listener_outlives_a_system_without_room_for_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    left, start = [3], threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "paceline-newcomer" and left[0]:
            left[0] -= 1
            raise RuntimeError("can't start new thread")
        start(thread)

    with Listener(token=TOKEN) as listener:
        monkeypatch.setattr(threading.Thread, "start", refuse)
        connect(listener.address, TOKEN, 20).close()
        listener.accept(5).close()
        assert not left[0]


def test_replayed_proof_is_refused() -> None:
    with Listener(token=TOKEN) as listener, socket.create_server(("127.0.0.1", 0)) as tap:
        recorded = bytearray()

        def record() -> None:
            inner, _ = tap.accept()
            with inner, bare(listener) as outer:
                inner.sendall(outer.recv(1000))
                recorded.extend(inner.recv(1000))
                outer.sendall(recorded)
                inner.sendall(outer.recv(1000))
                inner.recv(1)

        thread = later(record, 0)
        connect(f"127.0.0.1:{tap.getsockname()[1]}", TOKEN, 5).close()
        thread.join()
        listener.accept(5).close()
        with bare(listener) as replay:
            replay.recv(1000)
            replay.sendall(recorded)
            assert replay.recv(1) == b"\2"
        wait_refused(listener, 1)


def test_connect_waits_for_a_listener_that_comes_later() -> None:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    opened: list[Listener] = []
    thread = later(lambda: opened.append(Listener(token=TOKEN, port=port)), 0.3)
    connect(f"127.0.0.1:{port}", TOKEN, 10).close()
    thread.join()
    opened[0].close()


def test_connect_gives_up_at_its_limit() -> None:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
        start = time.monotonic()
        with pytest.raises(TimedOut, match=f"could not connect to {address} within 0.3 s"):
            connect(address, TOKEN, 0.3)  # it listens, but says nothing
    with pytest.raises(TimedOut, match="refused"):
        connect(address, TOKEN, 0.3)
    assert time.monotonic() - start < 2


@pytest.mark.parametrize("address", ["", "nowhere", "127.0.0.1:", "127.0.0.1:http", "127.0.0.1:70000"])
def test_bad_addresses(address: str) -> None:
    with pytest.raises(ConfigError, match="ip:port"):
        connect(address, TOKEN, 1)


def test_bad_listening() -> None:
    with pytest.raises(ConfigError, match="token"):
        Listener(token="")
    with Listener(token=TOKEN) as listener:
        with pytest.raises(ConfigError, match=r"cannot listen on host='127.0.0.1' port="):
            Listener(token=TOKEN, port=split_address(listener.address)[1])


def test_close_wakes_accept_and_leaves_nothing() -> None:
    before = threading.active_count()
    files = len(os.listdir("/proc/self/fd"))
    listener = Listener(token=TOKEN)
    unaccepted = connect(listener.address, TOKEN, 5)
    time.sleep(0.1)
    with ThreadPoolExecutor(1) as pool:
        listener.accept(5).close()
        waiting = pool.submit(listener.accept, 60)
        time.sleep(0.05)
        listener.close()
        with pytest.raises(Interrupted, match="was closed"):
            waiting.result(5)
    with pytest.raises(Interrupted):
        listener.accept(1)
    listener.close()
    with pytest.raises(Interrupted):
        unaccepted.recv(5)
    unaccepted.close()
    assert threading.active_count() == before
    assert len(os.listdir("/proc/self/fd")) == files


def test_close_hangs_up_on_channels_that_nobody_accepted() -> None:
    listener = Listener(token=TOKEN)
    here = connect(listener.address, TOKEN, 5)
    time.sleep(0.1)
    listener.close()
    with pytest.raises(Interrupted):
        here.recv(5)
    here.close()


# ---- is the other side still there?


def asks_after(channel: Channel) -> int:
    return channel._wire._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)


def test_only_who_waits_has_the_other_side_asked_often(both: Pair) -> None:
    here, there = both
    assert asks_after(here) > 10
    with ThreadPoolExecutor(1) as pool:
        message = pool.submit(here.recv, 30)
        deadline = time.monotonic() + 20
        while asks_after(here) > 1:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert asks_after(there) > 10  # where nobody waits
        there.send(b"come")
        assert bytes(message.result(20)) == b"come"
    assert asks_after(here) > 10


def test_a_wait_in_two_parts_keeps_its_limit_and_what_has_come(both: Pair) -> None:
    here, there = both
    started = time.monotonic()
    there.send_raw(memoryview((8).to_bytes(8, "little") + b"half"))
    with pytest.raises(TimedOut, match=r"1\.5 s"):
        here.recv(1.5)
    assert time.monotonic() - started >= 1.5
    there.send_raw(memoryview(b"+two"))
    assert bytes(here.recv(5)) == b"half+two"


IDLE = """
import os, sys
from pathlib import Path
from paceline.core.errors import Interrupted
from paceline.transport.channel import Listener, connect
if os.environ["HOSTS_RANK"] == "0":
    listener = Listener(os.environ["HOSTS_IP"], "t", port=7001)
    channels = [listener.accept(30) for _ in range(8)]
else:
    channels = [connect(os.environ["HOSTS_FIRST_IP"] + ":7001", "t", 30) for _ in range(8)]
print("there", flush=True)
for line in sys.stdin:
    if line == "count\\n":
        print(Path("/proc/net/dev").read_text().split("eth0:")[1].split()[9], flush=True)
    else:
        try:
            channels[0].recv(60)
        except Interrupted as error:
            print(type(error).__name__, error, flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(bool(Hosts.missing()), reason=Hosts.missing())
def test_idle_connections_between_hosts_send_next_to_nothing_and_a_cut_is_learnt() -> None:
    with Hosts(2, rate="1gbit") as hosts:
        pipe = subprocess.PIPE
        programs = [hosts.popen(i, [sys.executable, "-c", IDLE], stdin=pipe, stdout=pipe, text=True) for i in range(2)]

        def ask(word: str) -> str:
            programs[0].stdin.write(word + "\n")
            programs[0].stdin.flush()
            return programs[0].stdout.readline()

        for program in programs:
            assert program.stdout.readline() == "there\n"
        time.sleep(1)
        before = int(ask("count"))
        time.sleep(6)
        assert int(ask("count")) - before < 40  # asked every second it was 96
        hosts.cut(1)
        started = time.monotonic()
        assert ask("wait").startswith("Interrupted")
        assert time.monotonic() - started < 30  # of the 60 that it would have waited
        for program in programs:
            program.stdin.close()
            program.stdout.close()
