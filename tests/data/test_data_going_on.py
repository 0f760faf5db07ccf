"""Loaders whose members change in the middle of an epoch: every sample counts once, whatever was drawn and dropped."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from _members import Member, step
from hypothesis import given
from hypothesis import strategies as st


class Stream(torch.utils.data.IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Any:
        return iter(range(self.length))


changes = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 2), st.integers(1, 4)), max_size=5)


@given(
    length=st.integers(1, 60), batch_size=st.integers(1, 5), size=st.integers(1, 4), story=changes, stream=st.booleans()
)
def test_every_sample_counts_once(
    length: int, batch_size: int, size: int, story: list[tuple[int, int, int]], stream: bool
) -> None:
    dataset: Any = Stream(length) if stream else torch.arange(length)
    members = [Member(dataset, batch_size, rank, size) for rank in range(size)]
    counted: Counter[int] = Counter()

    over = False
    for committed, dropped, new_size in story:
        for _ in range(committed):
            over = over or not step(members, counted)
        for member in members if not over else ():
            for _ in range(dropped):
                member.draw()
        if over or any(member.loader._feed is None for member in members):
            break
        state = members[0].loader.committed()
        assert all(member.loader.committed() == state for member in members)
        survivors = [m for m in members[:new_size] if any(b.feed is m.loader._feed for b in m.loader._live)]
        over = any(batches.over for m in survivors for batches in m.loader._live)
        if over:
            break
        members = survivors + [Member(dataset, batch_size, 0, 1) for _ in range(new_size - len(survivors))]
        for rank, member in enumerate(members):
            member.loader.go_on(state, rank, new_size)
    while not over and step(members, counted):
        pass
    if not over:
        assert counted == Counter(range(length))


def test_a_loop_that_counts_ends_where_the_length_says() -> None:
    member = Member(torch.arange(24), 2, 0, 3)
    for _ in range(2):
        member.draw()
        member.loader.mark()
    member.draw()  # of a step that is dropped
    member.loader.go_on(member.loader.committed(), 0, 2)
    assert len(member.loader) == 3 + 3  # drawn so far, and (24 - 2 * 3 * 2) / (2 * 2) more
    count = 3
    while member.draw() is not None:
        count += 1
    assert count == len(member.loader)
