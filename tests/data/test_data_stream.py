"""Iterable datasets: all members end together, each sample once, resumed on any number of members."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from paceline.core.errors import ConfigError
from paceline.data import ByFile, Columns, Files, Loader
from paceline.data.randomness import capture, same


class Stream(IterableDataset[Any]):
    """Counts up; with `mixed` the order is drawn from the global generator, as a shuffle buffer does."""

    def __init__(self, length: int, mixed: bool = False, bad: int = -1) -> None:
        self.length, self.mixed, self.bad = length, mixed, bad

    def __iter__(self) -> Iterator[int]:
        numbers = list(range(self.length))
        for count in range(self.length):
            if count == self.bad:
                raise OSError("torn")
            yield numbers.pop(random.randrange(len(numbers)) if self.mixed else 0)


def run_on(size: int, member: Callable[[int, Callable[[int], list[int]]], Any]) -> list[Any]:
    """Run `member(rank, agree)` for all ranks, in threads that agree with each other."""
    barrier, board = Barrier(size), [0] * size

    def agree(rank: int) -> Callable[[int], list[int]]:
        def gather(number: int) -> list[int]:
            board[rank] = number
            barrier.wait(20)
            found = list(board)
            barrier.wait(20)
            return found

        return gather

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(member, rank, agree(rank)) for rank in range(size)]
        for future in futures:
            if future.exception():
                barrier.abort()
        return [future.result() for future in futures]


@settings(deadline=None, max_examples=60)
@given(
    length=st.integers(1, 60),
    mixed=st.booleans(),
    legs=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=3),
)
def test_each_sample_of_a_stream_once_over_any_changes_of_size(
    length: int, mixed: bool, legs: list[tuple[int, int, int]]
) -> None:
    seen: Counter[int] = Counter()
    state: dict[str, Any] | None = None
    before = capture()
    for number, (size, batch_size, batches) in enumerate(legs):
        last = number == len(legs) - 1
        ends, states = set(), []
        for rank in range(size):
            loader = Loader(Stream(length, mixed), batch_size=batch_size, rank=rank, size=size)
            if state:
                loader.load_state_dict(state)
            handed = 0
            for batch in iter(loader) if last or batches else []:
                seen.update(batch[: loader.last_real].tolist())
                assert len(batch)
                handed += 1
                if not last and handed == batches:
                    break
            ends.add(handed)
            states.append(loader.state_dict())
        assert len(ends) == 1, "all loops end at the same step"
        assert all(one == states[0] for one in states)
        state = states[0]
        assert state["consumed"] == sum(seen.values())
    assert seen == Counter(range(length))
    assert same(before, capture())


def test_a_stream_in_a_worker_process_gives_the_same() -> None:
    notes: list[str] = []

    def batches(workers: int) -> list[Any]:
        loader = Loader(Stream(20, mixed=True), batch_size=3, rank=1, size=2, workers=workers, on_note=notes.append)
        loader.set_epoch(4)
        return [batch.tolist() for batch in loader]

    here = batches(0)
    assert batches(2) == batches(1) == here
    assert any("one worker process" in note for note in notes)
    assert sorted(number for batch in here for number in batch) != list(range(1, 20, 2)), "the order was drawn"


def test_what_collate_draws_is_the_same_after_a_resume() -> None:
    def collate(samples: list[int]) -> list[float]:
        return [sample + random.random() for sample in samples]

    def loader() -> Loader:
        return Loader(Stream(20, mixed=True), batch_size=3, rank=1, size=2, collate=collate)

    wanted = list(loader())
    first = loader()
    for _, _ in zip(range(2), first):
        pass
    resumed = loader()
    resumed.load_state_dict(first.state_dict())
    assert list(resumed) == wanted[2:]


def test_length_of_a_stream() -> None:
    class Sized(Stream):
        def __len__(self) -> int:
            return self.length

    for length in range(1, 30):
        for rank in range(3):
            for more in ({}, {"drop_last": True}, {"pad": False}, {"partition": Columns(of=0)}):
                data = Sized(length) if "partition" not in more else SizedRows(length)
                loader = Loader(data, batch_size=2, rank=rank, size=3, **more)  # type: ignore[arg-type]
                assert len(loader) == len(list(loader))
    with pytest.raises(TypeError, match="not known"):
        len(Loader(Stream(5), batch_size=1))


class SizedRows(IterableDataset[Any]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.arange(4), 0)] * self.length)


def test_an_error_in_a_stream_names_the_sample() -> None:
    loader = Loader(Stream(20, bad=11), batch_size=2, size=2)
    with pytest.raises(OSError, match="torn") as caught:
        list(loader)
    assert "while reading sample 11 of Stream" in caught.value.__notes__


class Shelf:
    """Files by number with given lengths; remembers who opened which."""

    def __init__(self, lengths: list[int], noise: bool = False) -> None:
        self.lengths, self.noise = lengths, noise
        self.opened: list[int] = []

    def files(self) -> Files:
        return Files(list(range(len(self.lengths))), self.open)

    def open(self, file: int) -> Iterator[tuple[int, float]]:
        self.opened.append(file)
        for sample in range(self.lengths[file]):
            yield 100 * file + sample, (random.random() if self.noise else 0.0)

    def all(self) -> Counter[int]:
        return Counter(100 * file + n for file, length in enumerate(self.lengths) for n in range(length))


def file_leg(
    lengths: list[int], size: int, batch_size: int, batches: int | None, state: dict[str, Any] | None, **more: Any
) -> tuple[Counter[int], dict[str, Any], list[list[int]]]:
    """`batches` global batches on `size` members: what was seen, the state, and which files each opened."""

    def member(rank: int, agree: Any) -> Any:
        shelf = Shelf(lengths)
        seen: Counter[int] = Counter()
        loader = Loader(
            shelf.files(), batch_size=batch_size, rank=rank, size=size, partition=ByFile(), agree=agree, **more
        )
        if state:
            loader.load_state_dict(state)
        handed = 0
        if batches != 0:
            for batch in loader:
                assert len(batch[0]) >= max(1, loader.last_real)
                seen.update(batch[0][: loader.last_real].tolist())
                handed += 1
                if handed == batches:
                    break
        return seen, loader.state_dict(), shelf.opened, handed

    results = run_on(size, member)
    assert len({handed for *_, handed in results}) == 1, "all loops end at the same step"
    assert all(result[1] == results[0][1] for result in results), "every member knows the whole state"
    return sum((result[0] for result in results), Counter()), results[0][1], [result[2] for result in results]


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=4, max_size=8),
    shuffle=st.booleans(),
    legs=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=3),
)
def test_each_sample_of_files_once_over_any_changes_of_size(
    lengths: list[int], shuffle: bool, legs: list[tuple[int, int, int]]
) -> None:
    seen: Counter[int] = Counter()
    state: dict[str, Any] | None = None
    for number, (size, batch_size, batches) in enumerate(legs):
        last = number == len(legs) - 1
        found, state, _ = file_leg(lengths, size, batch_size, None if last else batches, state, shuffle=shuffle)
        seen += found
        assert state["consumed"] == sum(seen.values())
    assert seen == Shelf(lengths).all()


def test_each_member_opens_only_its_own_files_and_empty_files_are_no_harm() -> None:
    seen, state, opened = file_leg([5, 0, 2, 9, 0, 1], 2, 3, None, None)
    assert [set(files) for files in opened] == [{0, 2, 4}, {1, 3, 5}]
    assert seen == Shelf([5, 0, 2, 9, 0, 1]).all()
    assert state["done"] == [0, 1, 2, 3, 4, 5]
    assert state["files"] == {}


def test_files_whose_members_have_no_sample_are_refused_on_all_members() -> None:
    errors = []

    def member(rank: int, agree: Any) -> None:
        loader = Loader(Shelf([3, 0, 3, 0]).files(), batch_size=2, rank=rank, size=2, partition=ByFile(), agree=agree)
        try:
            next(iter(loader))
        except ConfigError as error:
            errors.append(str(error))

    run_on(2, member)
    assert len(errors) == 2
    assert "files of member(s) 1 have no samples" in errors[0]


def test_more_members_than_files_and_a_missing_agree_are_refused() -> None:
    files = Shelf([3, 3]).files()
    with pytest.raises(ConfigError, match="2 files cannot be divided among 3 members"):
        Loader(files, batch_size=2, rank=0, size=3, partition=ByFile())
    with pytest.raises(ConfigError, match="needs agree="):
        Loader(files, batch_size=2, rank=0, size=2, partition=ByFile())
    with pytest.raises(ConfigError, match="list of files is empty"):
        Files([], open)


def test_random_samples_of_files_are_the_same_in_a_worker_and_after_a_resume() -> None:
    def loader(workers: int = 0) -> Loader:
        return Loader(Shelf([4, 7, 3], noise=True).files(), batch_size=3, partition=ByFile(), seed=2, workers=workers)

    wanted = [batch[1].tolist() for batch in loader()]
    assert len({number for batch in wanted for number in batch}) == 14
    first = loader()
    for _, _ in zip(range(3), first):
        random.random()
    for workers in (0, 1):
        resumed = loader(workers)
        resumed.load_state_dict(first.state_dict())
        assert [batch[1].tolist() for batch in resumed] == wanted[3:]


def test_drop_last_with_files_gives_full_batches_only() -> None:
    seen, _, _ = file_leg([5, 4], 2, 3, None, None, drop_last=True)
    assert sum(seen.values()) == 6
    with pytest.raises(ConfigError, match="drop_last"):
        file_leg([2, 2], 2, 3, None, None, drop_last=True)


def test_evaluation_over_files_needs_no_agreement() -> None:
    seen: Counter[int] = Counter()
    for rank in range(2):
        loader = Loader(Shelf([3, 1, 0, 0]).files(), batch_size=2, rank=rank, size=2, partition=ByFile(), pad=False)
        for batch in loader:
            seen.update(batch[0].tolist())
    assert seen == Shelf([3, 1]).all()


def test_an_error_in_a_file_names_file_and_sample() -> None:
    def torn(path: str) -> Iterator[int]:
        yield 1
        raise OSError("torn")

    with pytest.raises(OSError, match="torn") as caught:
        list(Loader(Files(["a.bin"], torn), batch_size=4, partition=ByFile()))
    assert "while reading sample 1 of file a.bin" in caught.value.__notes__
