"""Members meet, or are told at once why they cannot."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import AuthError, ConfigError, Interrupted, TimedOut
from paceline.core.settings import Settings
from paceline.core.view import Member
from paceline.environment import Place, detect
from paceline.membership import Rendezvous, meet
from paceline.membership.messages import Hello, Refused, decode_answer, decode_hello, encode
from paceline.transport.channel import connect

TOKEN = "the run's token"


@contextlib.contextmanager
def rendezvous(size, **settings):
    with contextlib.closing(Rendezvous(size, Settings(**settings), TOKEN)) as there:
        yield there


def place(there, rank, size, token=TOKEN):
    return Place(kind="paceline", rank=rank, size=size, rendezvous=there.address, token=token)


def member(rank, pid=None):
    return Member(rank=rank, host="h", pid=1000 + rank if pid is None else pid, address=f"a{rank}")


def come(there, rank, size, pid=None, **settings):
    return meet(place(there, rank, size), member(rank, pid), Settings(**settings) if settings else None)


@contextlib.contextmanager
def waiting(there, rank, size):
    """A member that says hello, is counted, and waits; gives its future."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(come, there, rank, size)
        deadline = time.monotonic() + 5
        while rank not in there.arrived():
            assert time.monotonic() < deadline
            time.sleep(0.005)
        yield future


def test_all_get_the_same_view_and_the_launchers_settings():
    with rendezvous(5, seed=7, name="r") as there, ThreadPoolExecutor(5) as pool:
        meetings = list(pool.map(lambda rank: come(there, rank, 5, seed=99), [3, 1, 4, 0, 2]))
    for meeting in meetings:
        assert meeting.view == meetings[0].view
        assert meeting.view.members == tuple(member(rank) for rank in range(5))
        assert meeting.view.number == 1
        assert meeting.settings == Settings(seed=7, name="r")
        assert meeting.token == TOKEN


def test_alone_there_is_nobody_to_meet():
    meeting = meet(detect({}), lambda token: Member(rank=0, host="h", pid=1, address=token), Settings(seed=3))
    assert meeting.view.size == 1
    assert meeting.settings.seed == 3
    assert meeting.view.members[0].address == meeting.token != ""


def test_a_member_that_does_not_arrive_is_named_at_the_limit():
    with rendezvous(4, join_limit_s=0.5) as there:
        began = time.monotonic()
        with waiting(there, 0, 4) as first, waiting(there, 2, 4) as second:
            for future in (first, second):
                with pytest.raises(TimedOut, match=r"^members 1, 3 of 4 did not arrive within 0\.5 s.*--join-limit-s"):
                    future.result(5)
        assert 0.4 < time.monotonic() - began < 3
        with pytest.raises(TimedOut, match="members 1, 3 of 4"):  # it comes too late
            come(there, 3, 4)


def test_the_launchers_limit_counts_not_the_members_own():
    with rendezvous(2, join_limit_s=30) as there, waiting(there, 0, 2) as first:
        meeting = come(there, 1, 2, join_limit_s=0.2)
        assert first.result(5).view == meeting.view


def test_a_wrong_token():
    with rendezvous(2, join_limit_s=5) as there:
        with pytest.raises(AuthError, match="token"):
            meet(place(there, 0, 2, token="guess"), member(0))
        with waiting(there, 0, 2) as first:  # the rendezvous lives on
            assert come(there, 1, 2).view == first.result(5).view


def test_two_members_with_the_same_rank():
    with rendezvous(2, join_limit_s=5) as there, waiting(there, 1, 2) as first:
        with pytest.raises(ConfigError, match="rank 1 is taken by process 1001 on h"):
            come(there, 1, 2, pid=77)
        assert come(there, 0, 2).view == first.result(5).view
        with pytest.raises(ConfigError, match="rank 0 is taken by process 1000"):  # also once all have met
            come(there, 0, 2, pid=77)


def test_the_same_processes_may_meet_again():
    with rendezvous(2, join_limit_s=5) as there:
        for number in (1, 2, 3):
            with waiting(there, 1, 2) as first:
                meeting = come(there, 0, 2)
                assert meeting.view == first.result(5).view
                assert meeting.view.number == number


@pytest.mark.parametrize(
    ("rank", "size", "message"),
    [(0, 3, "believes in 3 members, the launcher started 2"), (2, 2, "rank 2 is not one of 0 to 1")],
)
def test_a_member_that_does_not_fit(rank, size, message):
    with rendezvous(2) as there, pytest.raises(ConfigError, match=message):
        come(there, rank, size)


def test_a_member_that_leaves_early_is_told_at_once():
    with rendezvous(3, join_limit_s=30) as there, waiting(there, 0, 3) as first:
        with contextlib.closing(connect(there.address, TOKEN, 5)) as channel:
            channel.send(encode(Hello(size=3, member=member(2))))
            channel.recv(5)
        with pytest.raises(Interrupted, match="member 2 left before all 3 members had arrived"):
            first.result(2)


def test_a_process_that_ends_before_it_arrives_is_told_at_once():
    with rendezvous(2, join_limit_s=30) as there:
        with waiting(there, 0, 2) as first:
            there.gone(1, "ended with exit code 3")
            with pytest.raises(Interrupted, match="member 1 ended with exit code 3"):
                first.result(2)


def test_who_comes_after_another_has_ended_is_told_at_once():
    with rendezvous(2, join_limit_s=30) as there:
        there.gone(1, "ended with exit code 0")
        began = time.monotonic()
        with pytest.raises(Interrupted, match="member 1 ended with exit code 0"):
            come(there, 0, 2)
        assert time.monotonic() - began < 2


def test_the_launcher_goes_away():
    with rendezvous(2, join_limit_s=30) as there, waiting(there, 0, 2) as first:
        there.close()
        with pytest.raises(Interrupted, match="the launcher went away while member 0 joined"):
            first.result(2)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "malformed hello"),
        (b"\xff\xfe garbage", "malformed hello"),
        (
            msgspec.msgpack.encode({"type": "hello", "protocol": 1, "size": "two", "member": {}}),
            "malformed hello",
        ),
        (
            msgspec.msgpack.encode({"type": "hello", "protocol": 99, "new": True}),
            "speaks protocol 99, the others 1",
        ),
        (encode(Refused("config", "x")), "malformed hello"),
    ],
)
def test_malformed_hellos_are_refused_and_the_rendezvous_lives_on(data, message):
    with rendezvous(2, join_limit_s=5) as there, waiting(there, 0, 2) as first:
        with contextlib.closing(connect(there.address, TOKEN, 5)) as channel:
            channel.send(data)
            answer = decode_answer(channel.recv(5))
        assert isinstance(answer, Refused)
        assert message in answer.message
        assert come(there, 1, 2).view == first.result(5).view


@given(st.binary(max_size=200))
def test_no_bytes_do_more_than_be_refused(data):
    for decode in (decode_hello, decode_answer):
        with contextlib.suppress(ConfigError):
            decode(data)


def test_closing_leaves_no_thread():
    before = set(threading.enumerate())
    with rendezvous(2) as there:
        with pytest.raises(ConfigError):
            come(there, 5, 2)
    deadline = time.monotonic() + 5
    while names := [t.name for t in set(threading.enumerate()) - before]:
        assert time.monotonic() < deadline, names
        time.sleep(0.01)


def test_one_in_the_place_of_a_lost_member_gets_the_view_as_it_is():
    with contextlib.closing(Rendezvous(2, Settings(), TOKEN, replaces=True)) as there, ThreadPoolExecutor(2) as pool:
        first = list(pool.map(lambda rank: come(there, rank, 2), [0, 1]))
        assert [(meeting.replaces, meeting.late) for meeting in first] == [(True, False)] * 2
        with pytest.raises(ConfigError, match="rank 1 is taken by process 1001"):
            come(there, 1, 2, pid=7)
        for pid in (7, 8):  # one after the other
            there.gone(1, "was killed")
            meeting = come(there, 1, 2, pid=pid)
            assert meeting.late
            assert meeting.view.number == first[0].view.number
            assert [m.pid for m in meeting.view.members] == [1000, pid]
        with pytest.raises(ConfigError, match="rank 1 is taken by process 8"):
            come(there, 1, 2, pid=9)


def test_where_nobody_is_replaced_a_lost_members_place_stays_empty():
    with rendezvous(2) as there, ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda rank: come(there, rank, 2), [0, 1]))
        there.gone(1, "was killed")
        with pytest.raises(ConfigError, match="rank 1 is taken"):
            come(there, 1, 2, pid=7)
