"""Slow links between hosts: measured by their senders, and who is named for them."""

from __future__ import annotations

import pytest

from paceline.testing.cluster import Cluster
from paceline.train.links import SLOWER, Links, Told, find
from paceline.train.stragglers import Pace, Stragglers
from paceline.transport.channel import Listener, connect
from paceline.transport.traffic import Traffic

FAST, SLOW = 12e6, 1e6  # bytes/s


def ring(*rates: float, busy_s: float = 0.5) -> dict[int, Told]:
    return {rank: Told(rate, busy_s, (rank + 1) % len(rates)) for rank, rate in enumerate(rates)}


def named(links: dict[int, Told], turn_s: float = 1.0) -> list[int]:
    return sorted(find(links, turn_s, SLOWER))


@pytest.mark.parametrize(
    ("links", "who"),
    [
        (ring(FAST, FAST, FAST, FAST), []),
        (ring(FAST, FAST / 2, FAST, FAST), []),
        (ring(FAST, SLOW, FAST, FAST), [1]),  # its way out
        (ring(FAST, SLOW, SLOW, FAST), [2]),  # both its ways
        (ring(SLOW, FAST, SLOW), [0]),
        (ring(FAST, SLOW), [1]),
        (ring(SLOW, SLOW), []),
        (ring(FAST, SLOW, FAST, SLOW), []),  # too many to be the exception
        (ring(FAST, SLOW, FAST, FAST, SLOW, FAST), [1, 4]),
        ({0: Told(FAST, 0.1, 2), 1: Told(), 2: Told(SLOW, 0.5, 0), 3: Told()}, [2]),  # others share a host with them
        (
            {0: Told(SLOW, 0.5, 2), 1: Told(FAST, 0.1, 0), 2: Told(FAST, 0.1, 3), 3: Told(SLOW, 0.5, 2)},
            [2],
        ),  # its way in
        ({}, []),
    ],
)
def test_who_has_a_part_in_all_slow_links_is_named(links: dict[int, Told], who: list[int]) -> None:
    assert named(links) == who


def test_links_that_hold_nobody_up_are_not_told_of() -> None:
    assert named(ring(FAST, SLOW, FAST, busy_s=0.1), turn_s=1.0) == []


def test_a_link_is_measured_by_what_arrived_while_it_was_busy() -> None:
    links, told = Links(), Told()
    for turn in range(1, 41):  # half of each second
        told = links.note({2: Traffic(1_000_000 * turn, 0.5 * turn), 3: Traffic(1_000_000 * turn, 0.1 * turn)})
    assert told.to == 2
    assert told.bytes_per_s == pytest.approx(2e6)
    assert told.busy_s == pytest.approx(0.5)
    told = links.note({2: Traffic(0, 0.0)})  # connections are new in another view
    assert told.bytes_per_s == pytest.approx(2e6)


def test_next_to_no_bytes_say_nothing_of_a_link() -> None:
    links = Links()
    assert [links.note({1: Traffic(100 * turn, 0.1 * turn)}) for turn in range(5)] == [Told()] * 5


def usual(rank: int, rate: float, wait_s: float = 0.5) -> Pace:
    return Pace(0.0, 0.1, 0.1, wait_s, Told(rate, 0.4, (rank + 1) % 3))


def test_the_network_is_named_where_own_times_are_alike_and_all_wait() -> None:
    found = Stragglers(names=[7, 8, 9])
    story = [slow for _ in range(40) for slow in found.note([usual(0, FAST), usual(1, SLOW), usual(2, FAST)])]
    assert [(slow.rank, slow.reason) for slow in story] == [(1, "network")]
    assert "its link to member 9 carries 8 Mbit/s where the others' carry 96" in story[0].text


def test_a_slow_link_is_not_blamed_for_one_that_computes_for_long() -> None:
    busy = Pace(0.0, 0.6, 0.6, 0.0, Told(SLOW, 0.4, 2))  # hardly waits: the others wait for it
    found = Stragglers()
    story = [slow.reason for _ in range(40) for slow in found.note([usual(0, FAST), busy, usual(2, FAST)])]
    assert story == ["compute"]


def test_a_channel_knows_what_has_arrived() -> None:
    listener = Listener("127.0.0.1", token="t")
    here, there = connect(listener.address, token="t", limit_s=5), listener.accept(5)
    before = here.traffic().sent_bytes
    for _ in range(10):
        here.send(bytes(100_000))
        there.recv(5)
    there.send(b"all")
    here.recv(5)
    assert here.traffic().sent_bytes - before >= 1_000_000
    assert there.traffic().sent_bytes < 100_000
    for each in here, there, listener:
        each.close()


def test_members_of_one_host_have_no_links_between_hosts() -> None:
    script = """
        import torch, paceline
        run = paceline.join(progress="off", checkpoint_keep=0)
        run.barrier()
        run.all_gather(torch.ones(3))
        print("links", run.group.traffic())
    """
    for member in Cluster(2).run(script):
        assert "links {}" in member.output
