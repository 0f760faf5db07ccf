"""Whatever the partition and however often the number of members changes: each sample exactly once."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import ConfigError
from paceline.data import Blocks, ByKey, Columns, Contiguous, Partition, Shuffled, Strided
from paceline.data.sampler import Course, Sampler

PARTITIONS: dict[str, Partition] = {
    "shuffled": Shuffled(),
    "strided": Strided(),
    "contiguous": Contiguous(),
    "by key": ByKey(lambda index: f"key {index * index % 11}"),
    "blocks": Blocks(7),
    "columns": Columns(),
}


def course(partition: Partition, length: int, batch_size: int, rank: int, size: int, **more: object) -> Course:
    history = more.pop("history", [])
    shuffle = more.pop("shuffle", True)
    sampler = Sampler(
        length=length,
        partition=partition,
        shuffle=shuffle,  # type: ignore[arg-type]
        batch_size=batch_size,
        rank=rank,
        size=size,
        **more,  # type: ignore[arg-type]
    )
    return sampler.begin(seed=5, epoch=2, history=history)  # type: ignore[arg-type]


@settings(deadline=None, max_examples=300)
@given(
    name=st.sampled_from(sorted(PARTITIONS)),
    length=st.integers(20, 120),
    shuffle=st.booleans(),
    legs=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(0, 6)), min_size=1, max_size=4),
)
def test_each_sample_once_over_any_changes_of_size(
    name: str, length: int, shuffle: bool, legs: list[tuple[int, int, int]]
) -> None:
    partition = PARTITIONS[name]
    seen: Counter[int] = Counter()
    history: list[list[int]] = []
    for number, (size, batch_size, batches) in enumerate(legs):
        last = number == len(legs) - 1
        members = [
            course(partition, length, batch_size, rank, size, history=history, shuffle=shuffle) for rank in range(size)
        ]
        assert len({member.batches for member in members}) == 1, "all loops end at the same step"
        end = members[0].batches if last else min(members[0].batches, members[0].done + batches)
        for turn_number in range(members[0].done, end):
            turns = [member.turn(turn_number) for member in members]
            assert any(turn.real for turn in turns)
            assert all(len(turn.indices) in (turn.real, max(t.real for t in turns)) for turn in turns)
            if partition.whole:
                assert all(torch.equal(turn.indices, turns[0].indices) for turn in turns)
                turns = turns[:1]
            for turn in turns:
                seen.update(turn.indices[: turn.real].tolist())
        for member in members:
            member.done = end
        assert members[0].consumed(end) == sum(seen.values())
        assert all(member.history() == members[0].history() for member in members)
        history = members[0].history()
    assert seen == Counter(range(length))


@pytest.mark.parametrize("name", sorted(PARTITIONS))
def test_resumed_on_the_same_size_goes_on_in_the_same_order(name: str) -> None:
    for rank in range(3):
        straight = course(PARTITIONS[name], 100, 4, rank, 3)
        resumed = course(PARTITIONS[name], 100, 4, rank, 3, history=[[3, 4, 5]])
        assert resumed.done == 5
        for number in range(5, straight.batches):
            assert torch.equal(straight.turn(number).indices, resumed.turn(number).indices)
            assert straight.seed(number) == resumed.seed(number)


def test_the_last_global_batch_is_divided_evenly() -> None:
    for partition in (Shuffled(), Strided()):
        members = [course(partition, 4 * 8 + 7, 8, rank, 4) for rank in range(4)]
        assert [member.turn(1).real for member in members] == [2, 2, 2, 1]


def test_a_member_without_samples_repeats_some_with_no_weight() -> None:
    members = [course(Shuffled(), 2, 4, rank, 3) for rank in range(3)]
    turns = [member.turn(0) for member in members]
    assert [turn.real for turn in turns] == [1, 1, 0]
    assert len(turns[2].indices) == 1
    # A member that has less than the others fills up with its own samples, to a batch like theirs.
    skewed = ByKey([0] * 10 + [1] * 3)
    few = course(skewed, 13, 4, 1, 2)
    assert [few.turn(number).real for number in range(few.batches)] == [3, 0, 0]
    filler = few.turn(1).indices
    assert len(filler) == 4
    assert set(filler.tolist()) <= {10, 11, 12}


def test_drop_last_keeps_only_complete_global_batches() -> None:
    members = [course(Shuffled(), 31, 4, rank, 2, drop_last=True) for rank in range(2)]
    assert members[0].batches == 3
    assert all(member.turn(n).real == 4 for member in members for n in range(3))
    with pytest.raises(ConfigError, match=r"drop_last=True leaves no batch: 7 samples.*batch_size=4 on 2"):
        course(Shuffled(), 7, 4, 0, 2, drop_last=True)


def test_order_changes_with_the_epoch_and_the_seed_and_covers_all() -> None:
    sampler = Sampler(length=50, partition=Shuffled(), shuffle=True, batch_size=5, rank=0, size=1)
    orders = [sampler.begin(seed, epoch, []).queue.tolist() for seed, epoch in [(0, 0), (0, 1), (1, 0)]]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert orders[0] == sampler.begin(0, 0, []).queue.tolist()


def test_bound_partitions_keep_a_sample_with_its_member_over_epochs() -> None:
    for partition in (Strided(), Contiguous(), PARTITIONS["by key"], Blocks(7)):
        sampler = Sampler(length=60, partition=partition, shuffle=True, batch_size=5, rank=1, size=3)
        first, second = (sampler.begin(0, epoch, []).queue.tolist() for epoch in (0, 1))
        assert first != second
        assert sorted(first) == sorted(second)


def test_keys_and_blocks_stay_together() -> None:
    keys = [index * 7 % 13 for index in range(100)]
    queues = [course(ByKey(keys), 100, 5, rank, 4).queue.tolist() for rank in range(4)]
    owners = [{keys[index] for index in queue} for queue in queues]
    assert sum(len(owner) for owner in owners) == 13
    assert max(map(len, queues)) - min(map(len, queues)) <= 8
    blocks = [course(Blocks(5), 100, 5, rank, 2).queue for rank in range(2)]
    assert [sorted({int(index) // 20 for index in queue}) for queue in blocks] == [[0, 2, 4], [1, 3]]


def test_large_keys_are_dealt_first() -> None:
    queues = [course(ByKey([0] * 3 + [1] * 3 + [2] * 6), 12, 2, rank, 2).queue for rank in range(2)]
    assert [len(queue) for queue in queues] == [6, 6]


@pytest.mark.parametrize("name", ["shuffled", "strided", "contiguous"])
def test_the_rest_is_divided_evenly_on_another_number_of_members(name: str) -> None:
    members = [course(PARTITIONS[name], 100, 4, r, 4, history=[[2, 5, 4]], shuffle=False) for r in range(4)]
    assert [len(member.queue) for member in members] == [15] * 4


def test_contiguous_is_one_run_and_strided_a_stride() -> None:
    assert course(Contiguous(), 10, 2, 1, 3, shuffle=False).queue.tolist() == [4, 5, 6]
    assert course(Strided(), 10, 2, 1, 3, shuffle=False).queue.tolist() == [1, 4, 7]


def test_columns_cover_each_column_once() -> None:
    x, y = torch.arange(21).view(3, 7), torch.arange(3)
    for size in range(1, 8):
        parts = [Columns().cut([x, y], rank, size) for rank in range(size)]
        assert torch.equal(torch.cat([part[0] for part in parts], dim=1), x)
        assert all(torch.equal(part[1], y) for part in parts)
    grouped = Columns(of="x", groups=[[6, 0], [1, 2, 3, 4, 5]])
    assert torch.equal(grouped.cut({"x": x, "y": y}, 0, 2)["x"], x[:, [6, 0]])


def test_wrong_partitions_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 keys for 5 samples"):
        course(ByKey([1, 2, 3]), 5, 1, 0, 1)
    with pytest.raises(ConfigError, match="2 different keys cannot be divided among 3 members"):
        course(ByKey([0, 1, 0, 1]), 4, 1, 0, 3)
    with pytest.raises(ConfigError, match="use at least 4 blocks"):
        course(Blocks(3), 10, 1, 0, 4)
    with pytest.raises(ConfigError, match="use at most 10 blocks"):
        course(Blocks(11), 10, 1, 0, 1)
    with pytest.raises(ConfigError, match="m must be at least 1"):
        Blocks(0)
    with pytest.raises(ConfigError, match="2 columns cannot be divided among 3"):
        Columns().cut(torch.ones(4, 2), 0, 3)
    with pytest.raises(ConfigError, match="each of the 3 columns exactly once"):
        Columns(groups=[[0], [1]]).cut(torch.ones(4, 3), 0, 2)
    with pytest.raises(ConfigError, match="one per member"):
        course(Columns(groups=[[0], [1]]), 4, 1, 0, 3)
    with pytest.raises(ConfigError, match=r"Columns\(of=3\)"):
        Columns(of=3).cut([torch.ones(4, 3)], 0, 1)
