"""The loader: the batches that torch would give, each sample once, resumed exactly."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from paceline.core.errors import ConfigError
from paceline.data import Blocks, ByFile, ByKey, Columns, Contiguous, Loader, Shuffled, Strided
from paceline.data.randomness import capture, same


class Numbers(Dataset[Any]):
    """Sample i is i; with `noise` each sample also draws from all three global generators."""

    def __init__(self, length: int, noise: bool = False, bad: int = -1) -> None:
        self.length, self.noise, self.bad = length, noise, bad

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        if index == self.bad:
            raise ValueError("cannot decode")
        if not self.noise:
            return index, torch.zeros(3)
        drawn = [float(torch.rand(())), float(numpy.random.rand()), random.random()]
        return index, torch.tensor(drawn, dtype=torch.float64)


def plain(batch: Any) -> Any:
    return [part.tolist() for part in batch] if isinstance(batch, list) else batch.tolist()


@pytest.mark.parametrize(
    "dataset",
    [
        TensorDataset(torch.arange(50.0).view(25, 2), torch.arange(25)),
        Subset(TensorDataset(torch.arange(50.0).view(25, 2), torch.arange(25)), [3, 9, 1, 20, 4]),
        Subset(Subset(TensorDataset(torch.arange(25)), list(range(20, 2, -1))), [0, 5, 7]),
        torch.arange(25),
        list(range(25)),
        [{"x": torch.ones(2) * n, "name": f"s{n}"} for n in range(25)],
        Numbers(25),
    ],
    ids=lambda dataset: type(dataset).__name__,
)
def test_alone_without_shuffle_it_gives_what_torch_gives(dataset: Any) -> None:
    ours = list(Loader(dataset, batch_size=4, shuffle=False))
    theirs = list(DataLoader(dataset, batch_size=4))
    assert repr(ours) == repr(theirs)
    assert len(ours) == len(Loader(dataset, batch_size=4))


@settings(deadline=None, max_examples=60)
@given(
    length=st.integers(8, 60),
    partition=st.sampled_from([None, Strided(), Contiguous(), ByKey(lambda i: i % 5), Blocks(6)]),
    shuffle=st.booleans(),
    legs=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=3),
)
def test_each_sample_once_over_any_changes_of_size(
    length: int, partition: Any, shuffle: bool, legs: list[tuple[int, int, int]]
) -> None:
    seen: Counter[int] = Counter()
    state: dict[str, Any] | None = None
    for number, (size, batch_size, batches) in enumerate(legs):
        last = number == len(legs) - 1
        states = []
        for rank in range(size):
            loader = Loader(
                torch.arange(length),
                batch_size=batch_size,
                rank=rank,
                size=size,
                partition=partition,
                shuffle=shuffle,
            )
            if state:
                loader.load_state_dict(state)
            batches_here = iter(loader)
            for _ in range(10**6 if last else batches):
                batch = next(batches_here, None)
                if batch is None:
                    break
                seen.update(batch[: loader.last_real].tolist())
            states.append(loader.state_dict())
        assert all(one == states[0] for one in states), "the state is the same on all members"
        state = json.loads(json.dumps(states[0]))
        assert state is not None
        assert state["consumed"] == sum(seen.values())
    assert seen == Counter(range(length))


@pytest.mark.parametrize("resumed_workers", [0, 2])
def test_random_transforms_are_the_same_with_workers_and_after_a_resume(resumed_workers: int) -> None:
    def loader(workers: int, rank: int = 0) -> Loader:
        return Loader(Numbers(40, noise=True), batch_size=4, rank=rank, size=2, seed=3, workers=workers)

    straight = loader(0)
    straight.set_epoch(1)
    wanted = [plain(batch) for batch in straight]
    assert len(wanted) == 5
    first = loader(0)
    first.set_epoch(1)
    for _, _ in zip(range(2), first):
        torch.rand(5)  # training draws too
    resumed = loader(resumed_workers)
    resumed.load_state_dict(first.state_dict())
    torch.manual_seed(99)
    assert [plain(batch) for batch in resumed] == wanted[2:]
    draws = [tuple(part) for batch in wanted for part in batch[1]]
    assert len(set(draws)) == len(draws)
    second = loader(0, rank=1)
    second.set_epoch(1)
    other = [tuple(part) for batch in second for part in plain(batch)[1]]
    assert not set(draws) & set(other), "members draw differently"


def test_a_dataset_that_draws_leaves_the_global_states_alone_and_says_so_once() -> None:
    notes: list[str] = []
    loader = Loader(Numbers(20, noise=True), batch_size=4, on_note=notes.append)
    torch.manual_seed(0)
    before = capture()
    for _ in range(2):
        for _ in loader:
            assert same(before, capture())
    assert len(notes) == 1
    assert "draws random numbers" in notes[0]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_itself_draws_nothing(workers: int) -> None:
    before = capture()
    list(Loader(Numbers(9), batch_size=2, workers=workers))
    assert same(before, capture())


def test_epochs_follow_each_other_and_can_be_set() -> None:
    loader = Loader(torch.arange(12), batch_size=4)
    first, second = ([plain(batch) for batch in loader] for _ in range(2))
    assert first != second
    assert loader.state_dict()["pass"] == 1
    loader.set_epoch(1)
    assert [plain(batch) for batch in loader] not in (first, second)
    loader.set_epoch(0)
    assert [plain(batch) for batch in loader] == first
    assert loader.state_dict() == {
        "consumed": 12,
        "history": [[1, 4, 3]],
        "epoch": 0,
        "pass": 0,
        "seed": 0,
        "length": 12,
        "partition": "default",
        "shuffle": True,
    }


def test_a_look_at_the_first_batch_does_not_lose_the_resumed_position() -> None:
    source = Loader(torch.arange(20), batch_size=4, seed=8)
    wanted = [plain(batch) for batch in source]
    source.set_epoch(0)
    for _, _ in zip(range(3), source):
        pass
    resumed = Loader(torch.arange(20), batch_size=4)
    resumed.load_state_dict(source.state_dict())
    assert resumed.state_dict() == source.state_dict()
    assert plain(next(iter(resumed))) == wanted[3]
    resumed.set_epoch(0)
    assert [plain(batch) for batch in resumed] == wanted[3:]
    resumed.set_epoch(1)
    assert len(list(resumed)) == 5


def test_what_was_loaded_counts_before_the_first_step() -> None:
    saved = Loader(TensorDataset(torch.arange(40)), batch_size=4)
    saved.set_epoch(3)
    batches = iter(saved)
    for _ in range(4):
        next(batches)
    state = saved.state_dict()
    resumed = Loader(TensorDataset(torch.arange(40)), batch_size=4)
    resumed.load_state_dict(state)
    assert resumed.committed() == state
    assert resumed.committed()["consumed"] == 16


def test_a_state_saved_at_the_end_of_an_epoch() -> None:
    done = Loader(torch.arange(6), batch_size=4)
    list(done)
    again = Loader(torch.arange(6), batch_size=4, rank=1, size=2)
    again.load_state_dict(done.state_dict())
    again.set_epoch(0)
    assert list(again) == []
    assert len(list(again)) == 1, "the next pass is whole"
    again.set_epoch(1)
    assert len(list(again)) == 1, "and so is the next epoch"


def test_a_second_pass_in_an_epoch_is_resumed_where_it_stood() -> None:
    def loader() -> Loader:
        return Loader(torch.arange(20), batch_size=4)

    straight = loader()
    straight.set_epoch(3)
    list(straight)
    wanted = [plain(batch) for batch in straight]
    first = loader()
    first.set_epoch(3)
    list(first)
    for _, _ in zip(range(2), first):
        pass
    resumed = loader()
    resumed.load_state_dict(first.state_dict())
    resumed.set_epoch(3)
    assert [plain(batch) for batch in resumed] == wanted[2:]


def test_an_iteration_that_goes_on_over_the_ends_of_epochs_is_resumed_where_it_stood() -> None:
    def cycle(loader: Loader) -> Iterator[Any]:
        while True:
            yield from loader

    notes: list[str] = []
    loader = Loader(torch.arange(20), batch_size=4, on_note=notes.append)
    batches, taken, states = cycle(loader), [], []
    for epoch in range(1, 6):
        taken += [plain(next(batches)) for _ in range(3)]
        loader.enter_epoch(epoch)
        states.append(loader.state_dict())
    assert len(notes) == 1
    assert sorted(i for batch in taken[:5] for i in batch) == list(range(20))
    for done in (2, 3, 4):
        resumed = Loader(torch.arange(20), batch_size=4)
        resumed.load_state_dict(states[done - 1])
        batches, again = cycle(resumed), []
        for epoch in range(done, 5):
            if resumed.epoch != epoch:
                resumed.enter_epoch(epoch)
            again += [plain(next(batches)) for _ in range(3)]
        assert again == taken[3 * done :]


def test_an_iteration_that_is_left_gives_way_to_the_next_epoch() -> None:
    loader, plainly = (Loader(torch.arange(20), batch_size=4) for _ in range(2))
    for epoch in range(3):
        loader.enter_epoch(epoch)
        plainly.set_epoch(epoch)
        kept = iter(loader)  # is still there when the next epoch is entered
        assert [plain(next(kept)) for _ in range(5)] == [plain(batch) for batch in plainly]
        loader.enter_epoch(epoch + 1)
        assert loader.state_dict()["consumed"] == 0


def test_an_evaluation_loader_always_starts_over() -> None:
    loader = Loader(torch.arange(9), batch_size=4, pad=False)
    next(iter(loader))
    assert loader.state_dict()["consumed"] == 0
    resumed = Loader(torch.arange(9), batch_size=4, pad=False)
    resumed.load_state_dict(loader.state_dict())
    resumed.set_epoch(0)
    assert len(list(resumed)) == 3


def test_before_is_called_when_a_batch_is_asked_for() -> None:
    consumed: list[int] = []
    loader = Loader(torch.arange(5), batch_size=2, before=lambda: consumed.append(loader.state_dict()["consumed"]))
    list(loader)
    assert consumed == [0, 2, 4, 5]


def test_evaluation_sees_each_sample_once_without_fillers() -> None:
    for size in range(1, 6):
        seen: Counter[int] = Counter()
        for rank in range(size):
            loader = Loader(torch.arange(11), batch_size=3, rank=rank, size=size, shuffle=False, pad=False)
            found = 0
            for batch in loader:
                assert loader.last_real == len(batch)
                seen.update(batch.tolist())
                found += 1
            assert found == len(loader)
        assert seen == Counter(range(11))


def test_draw_tells_how_many_samples_count() -> None:
    drawn: list[tuple[int, int]] = []
    loader = Loader(torch.arange(9), batch_size=4, rank=1, size=2, draw=lambda *counts: drawn.append(counts))
    assert [len(batch) for batch in loader] == [4, 1]
    assert drawn == [(4, 4), (0, 4)]
    assert loader.wait_s > 0


def test_columns_are_cut_for_tensors_and_for_samples() -> None:
    x, y = torch.arange(30).view(6, 5), torch.arange(6)
    for dataset in (TensorDataset(x, y), list(zip(x, y))):
        for rank, columns in enumerate([x[:, :3], x[:, 3:]]):
            loader = Loader(dataset, batch_size=4, rank=rank, size=2, shuffle=False, partition=Columns())
            got = list(loader)
            assert torch.equal(torch.cat([batch[0] for batch in got]), columns)
            assert torch.equal(torch.cat([batch[1] for batch in got]), y)
            assert loader.state_dict()["consumed"] == 6


def test_batches_are_copied_to_the_device() -> None:
    data = [{"x": torch.ones(2), "pair": (torch.zeros(1), "name")} for _ in range(4)]
    batch = next(iter(Loader(data, batch_size=2, device="meta")))
    assert batch["x"].device.type == "meta"
    assert batch["pair"][0].device.type == "meta"
    assert batch["pair"][1] == ("name", "name") or batch["pair"][1] == ["name", "name"]


class NoLength:
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("dataset", "arguments", "says"),
    [
        (torch.arange(4), {"batch_size": 0}, "batch_size=0: a batch needs at least one sample"),
        (torch.arange(4), {"batch_size": 1, "rank": 2, "size": 2}, "rank=2 of size=2"),
        (torch.arange(4), {"batch_size": 1, "workers": -1}, "workers=-1"),
        (torch.arange(4), {"batch_size": 1, "prefetch": -1}, "prefetch=-1"),
        ([], {"batch_size": 1}, "is empty"),
        (NoLength(), {"batch_size": 1}, "no __len__"),
        (17, {"batch_size": 1}, "neither __getitem__ and __len__ nor __iter__"),
        ((n for n in range(3)), {"batch_size": 1}, "can be read only once"),
        ({1, 2}, {"batch_size": 1, "partition": Contiguous()}, "is a stream"),
        (torch.arange(4), {"batch_size": 1, "partition": ByFile()}, "Files"),
        (torch.arange(4), {"batch_size": 1, "partition": Shuffled(), "shuffle": False}, "leave out one"),
    ],
)
def test_wrong_input_is_refused(dataset: Any, arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Loader(dataset, **arguments)


def test_a_state_that_does_not_fit_is_refused() -> None:
    state = Loader(torch.arange(4), batch_size=1).state_dict()
    with pytest.raises(ConfigError, match="length=4, this loader 5"):
        Loader(torch.arange(5), batch_size=1).load_state_dict(state)
    with pytest.raises(ConfigError, match="partition='default', this loader 'Contiguous'"):
        Loader(torch.arange(4), batch_size=1, partition=Contiguous()).load_state_dict(state)


def test_workers_that_do_nothing_are_named() -> None:
    notes: list[str] = []
    loader = Loader(TensorDataset(torch.arange(4)), batch_size=2, workers=2, on_note=notes.append)
    assert len(list(loader)) == 2
    assert "workers has no effect" in notes[0]


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("num_workers", "use workers="),
        ("prefetch_factor", "use prefetch="),
        ("collate_fn", "use collate="),
        ("sampler", "use partition="),
        ("batch_sampler", "use batch_size="),
        ("pin_memory", "leave it out, batches are copied to run.device"),
        ("shufle", "did you mean 'shuffle'?"),
        ("worker", "did you mean 'workers'?"),
        ("xyz", "known: 'bound', 'collate', 'drop_last'"),
    ],
)
def test_an_option_of_torch_or_of_nobody_is_named(option: str, said: str) -> None:
    options: dict[str, Any] = {option: 1}
    with pytest.raises(ConfigError) as caught:
        Loader(torch.arange(4), batch_size=2, **options)
    assert str(caught.value).startswith(f"the loader has no option {option!r}: {said}")
