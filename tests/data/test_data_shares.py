"""Unequal shares of a global batch: bounded, of the same sum, and every sample counts once however they change."""

from __future__ import annotations

import time
from collections import Counter

import pytest
import torch
from _members import Member, step
from hypothesis import given
from hypothesis import strategies as st

from paceline import ConfigError
from paceline.data import Blocks, Loader
from paceline.data.partition import Shuffled, Strided
from paceline.data.sampler import Sampler
from paceline.data.shares import deal, widths_of

speeds = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=9)


@given(speeds, st.integers(1, 300))
def test_widths_add_up_to_the_global_batch_within_bounds(speeds: list[float], batch_size: int) -> None:
    widths = widths_of(speeds, batch_size)
    assert sum(widths) == len(speeds) * batch_size
    assert all(max(1, batch_size // 4) <= width <= 2 * batch_size for width in widths)
    assert all(a <= b + 1 for a, s in zip(widths, speeds) for b, t in zip(widths, speeds) if s <= t)


@pytest.mark.parametrize("batch_size", [8, 64])
def test_who_is_twice_as_slow_gets_half_as_many(batch_size: int) -> None:
    widths = widths_of([2, 2, 2, 1], batch_size)
    assert abs(widths[3] - widths[0] / 2) <= 1


@given(st.integers(0, 200), st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_dealing_is_a_division_and_nobody_runs_out_a_turn_before_others(length: int, widths: list[int]) -> None:
    queues = deal(torch.randperm(length), widths)
    assert sorted(torch.cat(queues).tolist()) == list(range(length))
    full = length // sum(widths)
    assert all(full * w <= len(queue) <= (full + 1) * w for queue, w in zip(queues, widths))


@given(st.integers(1, 100), st.integers(1, 6), st.integers(1, 4), st.booleans(), st.data())
def test_as_many_global_batches_as_with_equal_shares(
    length: int, batch_size: int, size: int, shuffle: bool, data: st.DataObject
) -> None:
    speed = data.draw(st.lists(st.floats(0.1, 10), min_size=size, max_size=size))
    courses = [
        Sampler(
            length=length,
            partition=Shuffled() if shuffle else Strided(),
            shuffle=shuffle,
            batch_size=batch_size,
            rank=0,
            size=size,
            widths=widths,
        ).begin(1, 0, [])
        for widths in ((), widths_of(speed, batch_size))
    ]
    assert courses[0].batches == courses[1].batches
    done = length // (size * batch_size)
    assert courses[0].consumed(done) == courses[1].consumed(done) == done * size * batch_size


# So many steps, then: other shares ("share", seed), a loss or a newcomer ("size", members), with so many turns dropped,
# or a run that is started again from a checkpoint with another number of members ("again", members).
acts = st.tuples(
    st.integers(0, 6), st.sampled_from(["share", "share", "size", "again"]), st.integers(1, 4), st.integers(0, 2)
)


@given(
    length=st.integers(1, 80),
    batch_size=st.integers(1, 5),
    size=st.integers(1, 4),
    shuffle=st.booleans(),
    story=st.lists(acts, max_size=6),
)
def test_every_sample_counts_once_however_shares_and_members_change(
    length: int, batch_size: int, size: int, shuffle: bool, story: list[tuple[int, str, int, int]]
) -> None:
    members = [Member(torch.arange(length), batch_size, rank, size, shuffle=shuffle) for rank in range(size)]
    counted: Counter[int] = Counter()
    over = False

    for committed, what, number, dropped in story:
        for _ in range(committed):
            over = over or not step(members, counted)
        if over:
            break
        state = members[0].loader.committed()
        assert all(member.loader.committed() == state for member in members)
        if what == "share":
            speed = [1.0 + (rank * number) % 5 for rank in range(len(members))]
            for member in members:
                member.loader.share(widths_of(speed, batch_size))
        elif what == "again":
            members = [
                Member(torch.arange(length), batch_size, rank, number, shuffle=shuffle) for rank in range(number)
            ]
            for member in members:
                member.loader.load_state_dict(state)
                member.loop = iter(member.loader)
        else:
            if any(member.draw() is None for member in members for _ in range(dropped)):
                return  # loops that have ended do not go on
            members = members[:number]
            members += [
                Member(torch.arange(length), batch_size, 0, 1, shuffle=shuffle) for _ in range(number - len(members))
            ]
            for rank, member in enumerate(members):
                member.loader.go_on(state, rank, number)
                assert len(set(member.loader.widths)) == 1
    while not over and step(members, counted):
        pass
    assert counted == Counter(range(length))


def test_the_length_counts_what_was_drawn_before_the_shares_changed() -> None:
    member = Member(torch.arange(100), 5, 0, 2)
    for _ in range(3):
        member.draw()
    member.loader.share([7, 3])
    assert len(member.loader) == 10
    assert [len(member.draw() or ()) for _ in range(8)] == [7] * 7 + [0]


def test_the_next_epoch_keeps_the_shares() -> None:
    member = Member(torch.arange(40), 5, 1, 2)
    member.loader.share([7, 3])
    member.loader.enter_epoch(1)
    member.loop = iter(member.loader)
    assert [len(member.draw() or ()) for _ in range(4)] == [3] * 4


def test_what_binds_samples_to_members_has_no_shares() -> None:
    member = Member(torch.arange(40), 5, 1, 2, partition=Blocks(4))
    with pytest.raises(ConfigError, match="partition=Blocks says which member"):
        member.loader.share([7, 3])
    with pytest.raises(ConfigError, match="add up to a global batch"):
        Member(torch.arange(40), 5, 1, 2).loader.share([7, 4])


class Slow(torch.utils.data.Dataset[int]):
    """Slow enough that its batches are fetched ahead."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, number: int) -> int:
        time.sleep(0.002)
        return number


@pytest.mark.parametrize("workers", [0, 1])
def test_what_was_fetched_ahead_with_other_shares_is_dropped(workers: int) -> None:
    loaders = [Loader(Slow(), batch_size=5, rank=rank, size=2, workers=workers) for rank in range(2)]
    loops = [iter(loader) for loader in loaders]
    drawn = [batch.tolist() for _ in range(2) for batch in map(next, loops)]
    for loader in loaders:
        loader.share([8, 2])
    rest = [batch.tolist() for loop in loops for batch in loop]
    assert [len(batch) for batch in rest] == [8] * 4 + [2] * 4
    assert sorted(number for batch in drawn + rest for number in batch) == list(range(60))
