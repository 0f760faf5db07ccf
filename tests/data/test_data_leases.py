"""Batches that are dealt out: each is trained once, whoever is fast, slow or lost."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from _dealing import dealt
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data import Loader
from paceline.data.leases import Leases
from paceline.server.dealing import Dealer, DealsFor


@settings(deadline=None)
@given(data=st.data(), total=st.integers(0, 30), members=st.integers(1, 4))
def test_every_batch_is_done_once_by_someone_who_stays(data: st.DataObject, total: int, members: int) -> None:
    leases = Leases(total)
    here = set(range(members))
    held: dict[int, list[int]] = {rank: [] for rank in here}
    done: Counter[int] = Counter()
    while not leases.over:
        rank = data.draw(st.sampled_from(sorted(here)))
        what = data.draw(st.sampled_from(["take", "take", "done", "lost"]))
        if what == "lost" and len(here) > 1 and data.draw(st.booleans()):
            here.discard(rank)
            leases.lost(rank)
        elif what == "take" and (number := leases.take(rank)) is not None:
            held[rank].append(number)
        elif held[rank]:
            number = held[rank].pop(data.draw(st.integers(0, len(held[rank]) - 1)))
            done[number] += 1
            leases.done(rank, [number])
    assert done == Counter(range(total))
    assert leases.take(min(here)) is None


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_is_shared_by_those_who_ask(workers: int) -> None:
    def body(dealer: Dealer, rank: int) -> list[int]:
        loader = Loader(
            torch.utils.data.StackDataset(torch.arange(103)) if workers else torch.arange(103),
            batch_size=4,
            rank=rank,
            size=3,
            seed=5,
            workers=workers,
            deal=DealsFor(dealer, "0"),
        )
        seen = []
        for epoch in range(2):
            loader.set_epoch(epoch)
            for batch in loader:
                values = batch[0] if workers else batch
                assert loader.last_real == len(values)
                seen += [epoch * 1000 + int(v) for v in values]
        return seen

    seen = [v for mine in dealt(3, body, hosts=["a", "b", "a", "a"]) for v in mine]
    assert sorted(seen) == [epoch * 1000 + v for epoch in range(2) for v in range(103)]


def test_what_a_lost_member_had_is_dealt_again() -> None:
    first = threading.Event()

    def body(dealer: Dealer, rank: int) -> list[int]:
        if rank == 1:
            mine = [dealer.take("x", 6, wait=True, waits=lambda: None) for _ in range(3)]
            assert mine[2] is not None
            dealer.done("x", [mine[2]])
            first.set()
            dealer.close()  # two that it has not done
            return [mine[2]]
        first.wait(10)
        done = []
        while (number := dealer.take("x", 6, wait=True, waits=lambda: None)) is not None:
            done.append(number)
            dealer.done("x", [number])
        return done

    mine, lost = dealt(2, body, hosts=["a", "b", "a"])
    assert sorted(mine + lost) == list(range(6))


def test_a_partition_of_the_users_own_is_not_dealt() -> None:
    from paceline.data.partition import Contiguous

    class Nobody:
        def take(
            self, course: str, total: int, *, wait: bool, waits: Callable[[], None], bound: object = ()
        ) -> int | None:
            raise AssertionError

        def done(self, course: str, numbers: Sequence[int]) -> None:
            raise AssertionError

        deals = True

        def named(self, course: str) -> str:
            raise AssertionError

        def rest(self) -> None:
            raise AssertionError

    loader = Loader(torch.arange(8), batch_size=2, rank=1, size=2, partition=Contiguous(), shuffle=False, deal=Nobody())
    assert [b.tolist() for b in loader] == [[4, 5], [6, 7]]


@pytest.mark.parametrize("background", [False, True])
def test_a_member_rests_when_it_has_nothing_to_train_and_not_before(background: bool) -> None:
    """A dealer that deals three batches, lets the member wait, and deals one more."""
    dealt, rested, go_on = iter([0, 1, 2, 3, None]), [], threading.Event()

    class Slow:
        def take(
            self, course: str, total: int, *, wait: bool, waits: Callable[[], None], bound: object = ()
        ) -> int | None:
            number = next(dealt)
            if number == 3:
                waits()
                go_on.wait(10)
            return number

        def done(self, course: str, numbers: Sequence[int]) -> None:
            pass

        deals = True

        def named(self, course: str) -> str:
            return course

        def rest(self) -> None:
            rested.append(len(seen))
            go_on.set()

    class Rows(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, i: int) -> int:
            time.sleep(0.02 if background else 0.0)  # slow enough to be fetched ahead
            return i

    seen: list[int] = []
    for batch in Loader(Rows(), batch_size=2, size=2, deal=Slow(), prefetch=3):
        seen.append(len(batch))
        time.sleep(0.05)
    assert seen == [2, 2, 2, 2]
    assert set(rested) == {3}
