"""A shard under any order of events: bounds hold, pushes count once, sums are those of the order of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import ConfigError
from paceline.server.messages import Push, Rule
from paceline.server.placement import Tensor, place
from paceline.server.rounds import Rounds
from paceline.server.shard import Shard
from paceline.server.stock import room

SHAPES = [(30, 5), (7,), (40, 4)]
SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.0}


class Table:
    """A shard with workers that push when the test says so."""

    def __init__(self, gate: str, workers: int, *, correct: str = "", options: dict[str, Any] | None = None) -> None:
        tensors = [Tensor(f"p{i}", shape, "float32", 0) for i, shape in enumerate(SHAPES)]
        placement = place(tensors, 1, chunk_bytes=400)
        self.options = [options or SGD]
        self.got: list[tuple[int, int]] = []
        self.closed: list[frozenset[int]] = []
        rule = Rule(optimizer="SGD", groups=self.options, gate=gate, correct=correct)
        memory = torch.zeros(room(placement.of(0)), dtype=torch.uint8)
        self.shard = Shard(placement, 0, rule, memory, lambda rank, chunk: self.got.append((rank, chunk)), self._stands)
        self.chunks = len(self.shard.chunks)
        assert self.chunks > 2
        self.rounds = Rounds()
        self.step = {rank: self.shard.join(rank) for rank in range(workers)}
        self.due = dict.fromkeys(range(workers), 0)  # chunks that a worker still waits for
        self.part = dict.fromkeys(range(workers), 0)  # of the push under way; 0: none is
        self.read = dict.fromkeys(range(workers), 0)
        self.round = dict.fromkeys(range(workers), 0)

    def _stands(self) -> None:
        if closed := self.rounds.hear(0, self.shard.standing()):
            self.closed.append(frozenset(rank for rank, _ in closed.contributors))
            self.shard.close(closed.contributors)

    def can(self, rank: int) -> bool:
        return not self.due[rank] or self.part[rank] < self.chunks

    def event(self, rank: int, value: float = 1.0, weight: float = 1.0) -> None:
        """The worker's next frame: the head of a push, or a part of it."""
        if not self.due[rank]:
            self.step[rank] += 1
            self.part[rank], self.due[rank] = 0, self.chunks
            push = Push(
                table=0,
                view=1,
                step=self.step[rank],
                read=self.read[rank],
                weight=weight,
                groups=self.options,
                round=self.round[rank],
            )
            self.shard.begin(rank, push)
            return
        index = self.part[rank]
        self.part[rank] += 1
        self.shard.part(rank, index, torch.full((self.shard.chunks[index].numel,), value))
        self._collect()

    def whole(self, rank: int, value: float = 1.0, weight: float = 1.0) -> None:
        """A push from its head to its last part."""
        for _ in range(self.chunks + 1):
            self.event(rank, value, weight)

    def _collect(self) -> None:
        for rank, _ in self.got:
            self.due[rank] -= 1
            if not self.due[rank]:
                self.read[rank] = self.shard.named_version(rank)
                self.round[rank] = self.shard.round
        self.got.clear()

    def values(self) -> torch.Tensor:
        return torch.cat([self.shard.weights(0, i).clone() for i in range(self.chunks)])


@settings(max_examples=60, deadline=None)
@given(data=st.data(), workers=st.integers(1, 4), bound=st.integers(0, 3))
def test_nobody_is_further_ahead_than_the_bound(data: st.DataObject, workers: int, bound: int) -> None:
    table = Table(f"bounded(staleness={bound})", workers)
    here = set(range(workers))
    for _ in range(data.draw(st.integers(10, 120))):
        able = sorted(rank for rank in here if table.can(rank))
        assert able, "everyone waits"
        rank = data.draw(st.sampled_from(able))
        table.event(rank)
        computing = [table.step[r] for r in here if not table.due[r]]  # these go on with their next step
        slowest = min(table.shard.clocks.of[r] for r in here)
        assert all(step - slowest <= bound for step in computing)
        if len(here) > 1 and data.draw(st.integers(0, 40)) == 0:
            gone = data.draw(st.sampled_from(sorted(here)))
            here.discard(gone)
            table.shard.leave(gone)
            table._collect()


@settings(max_examples=60, deadline=None)
@given(data=st.data(), workers=st.integers(1, 4), age=st.integers(1, 3))
def test_every_push_is_applied_once_or_dropped(data: st.DataObject, workers: int, age: int) -> None:
    """Gradients of one and a rate of 0.1: the weights count what was applied."""
    table = Table("async", workers, correct=f"drop({age})")
    begun = 0
    for _ in range(data.draw(st.integers(5, 100))):
        rank = data.draw(st.sampled_from(sorted(r for r in range(workers) if table.can(r))))
        begun += not table.due[rank]
        table.event(rank)
    for rank in range(workers):
        while table.due[rank]:
            table.event(rank)
    shard = table.shard
    assert shard.applied + shard.dropped == begun
    assert shard.version == shard.applied
    torch.testing.assert_close(table.values(), torch.full((sum(map(_numel, SHAPES)),), -0.1 * shard.applied))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), workers=st.integers(1, 4))
def test_sync_adds_in_the_order_of_ranks_whatever_comes_first(data: st.DataObject, workers: int) -> None:
    weights = [data.draw(st.sampled_from([1.0, 0.5, 0.25])) for _ in range(workers)]
    gradients = [data.draw(st.floats(-3, 3, width=32)) for _ in range(workers)]
    table = Table("sync", workers)
    for _ in range(workers * (table.chunks + 1)):
        rank = data.draw(st.sampled_from(sorted(r for r in range(workers) if table.can(r) and table.step[r] < 2)))
        if not table.due[rank] and table.step[rank] == 1:
            continue
        table.event(rank, gradients[rank], weights[rank])
    for rank in range(workers):
        while table.due[rank]:
            table.event(rank, gradients[rank], weights[rank])
    total = sum(weights)
    mean = torch.full((1,), gradients[0])
    if workers > 1:
        mean = mean * (weights[0] / total)
        for gradient, weight in zip(gradients[1:], weights[1:]):
            mean.add_(torch.full((1,), gradient), alpha=weight / total)
    expected = torch.zeros(1).add_(mean, alpha=-0.1)
    assert torch.equal(table.values(), expected.expand(sum(map(_numel, SHAPES))))
    assert table.shard.version == 1


@settings(max_examples=60, deadline=None)
@given(data=st.data(), workers=st.integers(2, 5))
def test_rounds_with_backups_have_their_number_of_pushes(data: st.DataObject, workers: int) -> None:
    table = Table("sync(backups=1)", workers)
    begun = 0
    for _ in range(data.draw(st.integers(10, 150))):
        able = sorted(r for r in range(workers) if table.can(r))
        assert able, "everyone waits"
        rank = data.draw(st.sampled_from(able))
        begun += not table.due[rank]
        table.event(rank)
    assert all(len(round_) == workers - 1 for round_ in table.closed)
    shard = table.shard
    assert shard.version == len(table.closed)
    assert shard.applied == sum(map(len, table.closed))
    assert 0 <= begun - shard.applied - shard.dropped <= workers  # on their way
    torch.testing.assert_close(table.values(), torch.full((sum(map(_numel, SHAPES)),), -0.1 * shard.version))


def test_a_resting_worker_is_not_waited_for() -> None:
    table = Table("sync(backups=1)", 3)
    table.whole(2)
    assert table.due[2]
    table.shard.rest(0)  # it is the backup: the two that are left are both needed
    table._collect()
    assert table.due[2]
    table.shard.rest(1)
    table._collect()
    assert not table.due[2]
    assert table.closed == [frozenset({2})]


def test_who_rests_is_not_waited_for_and_comes_back_level() -> None:
    table = Table("bounded(staleness=1)", 2)
    table.whole(0)
    table.whole(0)
    assert table.due[0]  # two ahead
    table.shard.rest(1)
    table._collect()
    assert not table.due[0]
    for _ in range(5):
        table.whole(0)
        assert not table.due[0]
    table.whole(1)  # nobody waits for the steps that it has rested through
    for _ in range(2):
        table.whole(0)
        assert not table.due[0]
    table.whole(0)
    assert table.due[0]


def test_age_counts_the_pushes_of_others() -> None:
    table = Table("async", 2, correct="drop(2)")
    table.whole(0)
    table.whole(0)
    assert table.shard.dropped == 0  # its own pushes do not make it old
    table.whole(1)  # read before both: two versions old
    assert (table.shard.dropped, table.shard.version) == (1, 2)
    table.whole(1)
    assert (table.shard.dropped, table.shard.version) == (1, 3)


def test_a_newcomer_begins_with_the_slowest() -> None:
    table = Table("bounded(staleness=1)", 2)
    for rank in (0, 1, 0, 1, 0):
        table.whole(rank)
    assert table.shard.join(2) == 2


def test_momentum_and_rate_follow_the_push() -> None:
    table = Table("sync", 1, options={"lr": 0.1, "momentum": 0.9})
    p = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.9)
    for rate in (0.1, 0.05, 0.5):
        table.options = [{"lr": rate, "momentum": 0.9}]
        table.whole(0, value=rate * 2)
        optimizer.param_groups[0]["lr"] = rate
        p.grad = torch.full((3,), rate * 2)
        optimizer.step()
    assert torch.equal(table.values()[:3], p.detach())


def test_a_batch_without_samples_changes_nothing() -> None:
    table = Table("async", 1)
    table.whole(0, weight=0.0)
    assert table.shard.clocks.of[0] == 1
    assert not table.values().any()


def test_a_piece_without_a_gradient_is_left_alone() -> None:
    table = Table("sync", 2, options={"lr": 0.1, "weight_decay": 0.5})
    for index in range(table.chunks):
        table.shard.stock.store(index, torch.ones(table.shard.chunks[index].numel))
    several = next(i for i, chunk in enumerate(table.shard.chunks) if len(chunk.pieces) > 1)
    for rank, missing in ((0, frozenset({0, 1})), (1, frozenset({0}))):
        table.event(rank)
        for index in range(table.chunks):
            gradient = torch.zeros(table.shard.chunks[index].numel)
            table.shard.part(rank, index, gradient, missing if index == several else frozenset())
    pieces = table.shard.chunks[several].pieces
    flat = table.shard.weights(0, several)
    assert torch.equal(flat[: pieces[0].numel], torch.ones(pieces[0].numel))
    assert torch.equal(flat[pieces[1].at : pieces[1].at + 1], torch.tensor([1 - 0.1 * 0.5]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"view": 2}, "view 2"),
        ({"read": 7}, "version 7"),
        ({"read": -1}, "version -1"),
        ({"step": 3}, "step 3 after step 1"),
        ({"round": 1}, "round 1 of 0"),
        ({"weight": -1.0}, "weight"),
        ({"weight": float("nan")}, "weight"),
        ({"groups": []}, "0 parameter groups"),
    ],
)
def test_a_push_that_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    table = Table("async", 1)
    table.whole(0)
    fields = {"table": 0, "view": 1, "step": 2, "read": 0, "weight": 1.0, "groups": table.options} | change
    with pytest.raises(ConfigError, match=message):
        table.shard.begin(0, Push(**fields))
    table.whole(0)  # it lives on


def test_parts_that_do_not_fit_are_refused() -> None:
    table = Table("async", 1)
    numel = table.shard.chunks[0].numel
    with pytest.raises(ConfigError, match="out of turn"):
        table.shard.part(0, 0, torch.ones(numel))
    table.event(0)
    with pytest.raises(ConfigError, match="out of turn"):
        table.shard.part(0, 1, torch.ones(numel))
    with pytest.raises(ConfigError, match="elements"):
        table.shard.part(0, 0, torch.ones(numel + 1))
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="not finite, in parameter"):
            table.shard.part(0, 0, torch.full((numel,), bad))
    assert not table.values().any()
    with pytest.raises(ConfigError, match="before it has the weights"):
        table.shard.begin(0, Push(table=0, view=1, step=1, read=0, weight=1.0, groups=table.options))


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def test_who_begins_an_epoch_does_not_close_a_round_alone() -> None:
    """All rest at the end of an epoch, and pull before the next."""
    table = Table("sync(backups=1)", 3)
    for rank in range(3):
        table.shard.rest(rank)
    for rank in range(3):
        table.shard.pulls(rank)
    for _ in range(table.chunks + 1):
        table.event(0)
    assert table.closed == []
    for _ in range(table.chunks + 1):
        table.event(2)
    assert table.closed == [frozenset({0, 2})]
