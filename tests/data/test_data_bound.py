"""Samples that are bound to labels: only members that have one train them, each once, and nobody waits in vain."""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter

import pytest
import torch
from _dealing import dealt
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core import labels
from paceline.core.errors import ConfigError, Lost
from paceline.data import Contiguous, Loader
from paceline.data.kinds import Kinds
from paceline.data.leases import Leases
from paceline.server.dealing import Dealer, DealsFor

LABELS = st.sampled_from([None, "a", "b"])


@settings(deadline=None)
@given(named=st.lists(LABELS, min_size=1, max_size=40), width=st.integers(1, 5), drop_last=st.booleans())
def test_a_batch_has_samples_of_one_kind(named: list[str | None], width: int, drop_last: bool) -> None:
    order = torch.randperm(len(named))
    kinds = Kinds(lambda index: named[index], len(named))
    queue, edges, bound = kinds.cut(order, width, drop_last=drop_last)
    batches = [queue[start:end].tolist() for start, end in itertools.pairwise(edges)]
    of = [{named[i] for i in batch} for batch in batches]
    assert all(len(kind) == 1 for kind in of)
    free = len(batches) - sum(count for _, count in bound)
    assert of == [{None}] * free + [{label} for label, count in bound for _ in range(count)]
    seen = sorted(i for batch in batches for i in batch)
    if drop_last:
        assert all(len(batch) == width for batch in batches)
        left_out = Counter(named[i] for i in set(range(len(named))) - set(seen))
        assert all(count < width for count in left_out.values())
    else:
        assert seen == list(range(len(named)))


@settings(deadline=None)
@given(seed=st.integers(0, 2**32), free=st.integers(0, 8), a=st.integers(1, 8), b=st.integers(0, 8))
def test_a_bound_batch_is_only_lent_to_members_with_its_label(seed: int, free: int, a: int, b: int) -> None:
    dice = random.Random(seed)
    has = {0: ("a",), 1: ("a", "b"), 2: (), 3: ("b",)}
    kinds = [""] * free + ["a"] * a + ["b"] * b
    leases = Leases(len(kinds), [("a", a), ("b", b)])
    here, done = set(has), Counter[int]()
    held: dict[int, list[int]] = {rank: [] for rank in has}

    def living() -> set[str]:
        return {label for rank in here for label in has[rank]}

    while not leases.over and (leases.lent or not leases.missing(living())):
        rank = dice.choice(sorted(here))
        what = dice.choice(["take", "take", "take", "done", "done", "lost"])
        if what == "lost" and len(here) > 1:
            here.discard(rank)
            leases.lost(rank)
        elif what == "take":
            number = leases.take(rank, has[rank])
            taken = set(done) | {n for r in here for n in held[r]}
            mine = [n for n in range(len(kinds)) if n not in taken and kinds[n] in ("", *has[rank])]
            if number is None:
                assert not mine
                continue
            assert number in mine
            assert kinds[number] or not any(kinds[n] for n in mine)  # its own kind first
            held[rank].append(number)
        elif held[rank]:
            number = held[rank].pop()
            done[number] += 1
            leases.done(rank, [number])
        parts = {part.label: part for part in leases.parts()}
        for label, part in parts.items():
            assert part.done == sum(kinds[n] == label for n in done)
            assert part.done + part.left + sum(loan.batches for loan in part.lent) == kinds.count(label)
    left = [kinds[n] for n in range(len(kinds)) if n not in done]
    assert max(done.values(), default=1) == 1
    assert not set(left) & {"", *living()}
    assert leases.missing(living()) == Counter(left)


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_are_trained_where_they_are_bound_to(workers: int) -> None:
    def body(dealer: Dealer, rank: int) -> list[int]:
        loader = Loader(
            torch.utils.data.StackDataset(torch.arange(103)) if workers else torch.arange(103),
            batch_size=4,
            rank=rank,
            size=3,
            workers=workers,
            bound=[None if i < 50 else "a" if i < 80 else "b" for i in range(103)],
            labels=("a", "b"),
            deal=DealsFor(dealer, "0"),
        )
        assert len(loader) == 9  # 13, 8 and 6 batches on three members, where all are equally fast
        return [int(v) for batch in loader for v in (batch[0] if workers else batch)]

    a, both, nobody = dealt(3, body, labels=[("a",), ("a", "b"), ()])
    assert sorted([*a, *both, *nobody]) == list(range(103))
    assert all(v < 80 for v in a)
    assert all(v < 50 for v in nobody)
    assert set(range(80, 103)) <= set(both)


def take_all(dealer: Dealer) -> list[int]:
    done: list[int] = []
    while (n := dealer.take("x", 6, wait=True, waits=lambda: None, bound=(("a", 3),))) is not None:
        done.append(n)
        dealer.done("x", [n])
    return done


def test_a_lost_members_bound_batches_wait_for_one_with_the_label() -> None:
    lost, others = threading.Event(), threading.Event()

    def body(dealer: Dealer, rank: int) -> list[int]:
        if rank == 0:
            taken = [dealer.take("x", 6, wait=True, waits=lambda: None, bound=(("a", 3),)) for _ in range(2)]
            assert taken == [3, 4]
            dealer.close()  # neither is done
            lost.set()
            return []
        lost.wait(10)
        if rank == 1:
            others.wait(10)  # who has the label comes when the other one has been waiting
            return take_all(dealer)
        done = [dealer.take("x", 6, wait=True, waits=lambda: None, bound=(("a", 3),)) for _ in range(3)]
        dealer.done("x", [n for n in done if n is not None])
        others.set()
        return [n for n in done if n is not None] + take_all(dealer)

    _, labelled, plain = dealt(3, body, labels=[("a",), ("a",), ()])
    assert sorted(labelled) == [3, 4, 5]
    assert plain == [0, 1, 2]


def test_a_label_that_nobody_has_any_more_is_named_when_all_else_is_done() -> None:
    lost = threading.Event()

    def body(dealer: Dealer, rank: int) -> list[int]:
        if rank == 0:
            dealer.take("x", 6, wait=True, waits=lambda: None, bound=(("a", 3),))
            dealer.close()
            lost.set()
            return []
        lost.wait(10)
        done = []
        with pytest.raises(Lost, match="no worker that is left has the label 'a', to which 3 batches are bound"):
            while (n := dealer.take("x", 6, wait=True, waits=lambda: None, bound=(("a", 3),))) is not None:
                done.append(n)
                dealer.done("x", [n])
        return done

    _, one, other = dealt(3, body, labels=[("a",), (), ()])
    assert sorted(one + other) == [0, 1, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bound": ["a", None]}, "2 labels for 4 samples"),
        ({"bound": lambda i: "b"}, "no member has this label .known: 'a'"),
        ({"bound": ["a b"] * 4}, "'a b' is not a label"),
        ({"bound": [7] * 4}, "7 is not a label"),
        ({"bound": ["a"] * 4, "partition": Contiguous()}, "leave out one of the two"),
        ({"bound": ["a"] * 4}, "lent to workers as they ask"),
    ],
)
def test_what_cannot_be_bound_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Loader(torch.arange(4), batch_size=2, size=2, labels=("a",), **options)  # type: ignore[arg-type]


def test_a_run_of_one_with_the_label_trains_all() -> None:
    loader = Loader(torch.arange(4), batch_size=2, labels=("a",), bound=["a"] * 4, shuffle=False)
    assert [b.tolist() for b in loader] == [[0, 1], [2, 3]]


@pytest.mark.parametrize("text", ["", "gpu:", "gpu:a", ":1", "a/b", "gpu:1,"])
def test_a_bad_word_for_a_label_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--label"):
        labels.word(text)
