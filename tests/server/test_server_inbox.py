"""The input queue: every sample is trained once whatever happens, and never more is held than allowed."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import ConfigError
from paceline.server.outside.inbox import Inbox, Tray
from paceline.server.outside.samples import check, pack, unpack
from paceline.server.outside.visits import Soon, Take

SAMPLES = [
    torch.randn(2, 3),
    torch.tensor(True),
    torch.tensor([], dtype=torch.float16),
    (torch.arange(3), 5),
    {"x": torch.randn(4).bfloat16(), "words": ["a", None, 2.5]},
    torch.randn(4, 6).t(),
]


def alike(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == two.dtype and torch.equal(one, two)
    if isinstance(one, dict):
        return bool(one.keys() == two.keys() and all(alike(one[key], two[key]) for key in one))
    if isinstance(one, tuple | list):
        return type(one) is type(two) and len(one) == len(two) and all(map(alike, one, two))
    return bool(one == two)


@pytest.mark.parametrize("sample", SAMPLES, ids=range(len(SAMPLES)))
def test_samples_come_back_as_they_were(sample: Any) -> None:
    assert alike(unpack(pack(sample)), sample)


def test_what_is_no_sample_is_refused() -> None:
    with pytest.raises(ConfigError, match="holds a set"):
        pack((1, {2}))
    with pytest.raises(ConfigError, match="cannot be read"):
        unpack(b"\x80\x04K\x01.")
    whole = bytearray(pack((torch.randn(3), 1)))
    with pytest.raises(ConfigError, match=r"float32\[3\], int.*float32\[4\], int"):
        check(pack((torch.randn(4), 1)), bytes(whole))
    chance = random.Random(1)
    for _ in range(500):
        bad = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            bad[chance.randrange(len(bad))] = chance.randrange(256)
        try:
            unpack(bytes(bad))
        except ConfigError:
            continue


def ask(number: int = 0, *, batch_size: int = 2, size: int = 1, limit: int = 0, course: str = "0") -> Take:
    return Take(course=course, number=number, batch_size=batch_size, size=size, limit=limit)


ACTS = st.tuples(st.sampled_from(["put", "put", "take", "train", "lose"]), st.integers(0, 2))


@settings(max_examples=200, deadline=None)
@given(acts=st.lists(ACTS, max_size=60), limit=st.sampled_from([0, 5]))
def test_every_sample_is_trained_once_whatever_happens(acts: list[tuple[str, int]], limit: int) -> None:
    inbox = Inbox(max_bytes=40, max_samples=9)
    ranks, fresh = [0, 1, 2], 3
    lent: dict[int, list[list[bytes]]] = {}  # not trained yet
    told: Counter[int] = Counter()
    trained: list[bytes] = []
    put = 0
    over: set[int] = set()

    def do(act: str, which: int) -> None:
        nonlocal put, fresh
        rank = ranks[which]
        if act == "put" and not inbox.finished:
            put += inbox.put(b"%04d" % put)
        elif act == "take" and rank not in over:
            given_ = inbox.take(rank, ask(limit=limit))
            if given_ is not None and given_.samples:
                lent.setdefault(rank, []).append(given_.samples)
            elif given_ is not None:
                assert not any(lent.values())  # while anything is lent, it may come back
                over.add(rank)
        elif act == "train" and lent.get(rank):
            trained.extend(lent[rank].pop(0))
            told[rank] += 1
            inbox.done(rank, "0", told[rank])
        elif act == "lose":
            ranks[which], fresh = fresh, fresh + 1  # another takes its place
            lent.pop(rank, None)
            inbox.lost(rank)
        assert inbox.count <= 9
        assert inbox.count == inbox.waiting + sum(len(batch) for batches in lent.values() for batch in batches)
        assert inbox.nbytes == 4 * inbox.count <= 40

    for act, which in acts:
        do(act, which)
    inbox.finish()
    for _ in range(20):  # to the end
        for which in range(3):
            do("take", which)
            do("train", which)
    assert set(ranks) <= over
    assert sorted(trained) == [b"%04d" % i for i in range(min(put, limit or put))]


@settings(max_examples=100, deadline=None)
@given(
    count=st.integers(1, 30),
    size=st.integers(2, 4),
    batch_size=st.integers(1, 4),
    limit=st.sampled_from([0, 7]),
    seed=st.integers(0, 9),
)
def test_rounds_share_the_samples_out_in_step(count: int, size: int, batch_size: int, limit: int, seed: int) -> None:
    inbox = Inbox()
    for i in range(count):
        assert inbox.put(b"%d" % i)
    inbox.finish()
    chance = random.Random(seed)
    rounds, seen = [0] * size, [list[bytes]() for _ in range(size)]
    going = set(range(size))
    while going:
        rank = chance.choice(sorted(going))
        got = inbox.take(rank, ask(rounds[rank], batch_size=batch_size, size=size, limit=limit))
        assert got is not None
        if not got.samples:
            going.discard(rank)
            continue
        rounds[rank] += 1
        assert got.real <= batch_size
        assert got.samples
        seen[rank] += got.samples[: got.real]
    assert len(set(rounds)) == 1  # all keep step
    everything = sorted((sample for each in seen for sample in each), key=int)
    assert everything == [b"%d" % i for i in range(min(count, limit or count))]
    assert inbox.count == inbox.waiting == count - len(everything)


def test_a_worker_waits_for_a_full_batch_and_out_of_turn_is_refused() -> None:
    inbox = Inbox()
    inbox.put(b"a")
    assert inbox.take(0, ask()) is None
    assert inbox.take(0, ask(size=2)) is None
    with pytest.raises(ConfigError, match="asks for round 3"):
        inbox.take(0, ask(3, size=2))
    with pytest.raises(ConfigError, match="part of a round of 2"):
        inbox.take(5, ask(size=2))
    inbox.finish()
    with pytest.raises(ConfigError, match="takes no more samples"):
        inbox.put(b"b")


def test_a_course_that_was_left_gives_its_room_back() -> None:
    inbox = Inbox()
    for _ in range(8):
        inbox.put(b"a")
    assert inbox.take(0, ask(size=2)) is not None  # member 1 never fetches its part of this round
    assert inbox.take(0, ask(size=2, course="1")) is not None
    assert inbox.take(1, ask(size=2, course="1")) is not None
    assert inbox.count == inbox.waiting == 0
    inbox.put(b"a")
    inbox.finish()
    assert inbox.take(0, ask(course="2")) is not None  # lent, and its worker goes on to another course
    assert inbox.take(0, ask(course="3")) is not None
    assert inbox.count == 0


def test_an_upload_waits_for_room_and_for_a_run_that_wants_it() -> None:
    tray, sample = Tray(Inbox(max_samples=2)), pack(1)
    assert tray.put([sample], 0.01).why.startswith("its script has not asked")
    assert isinstance(tray.take(0, ask(), 0.01), Soon)
    taken = tray.put([sample] * 3, 0.01)
    assert (taken.count, taken.why.split(":")[0]) == (2, "its input queue is full")

    def train() -> None:
        time.sleep(0.1)
        tray.take(0, ask(), 1.0)
        tray.done(0, "0", 1)

    thread = threading.Thread(target=train)
    thread.start()
    assert tray.put([sample], 10.0).count == 1
    thread.join()
