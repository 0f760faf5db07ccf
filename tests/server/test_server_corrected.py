"""Corrections act on each piece by itself: with the rate of its group, and not at all where it has no gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import ConfigError
from paceline.server.messages import Push, Rule
from paceline.server.placement import Tensor, place
from paceline.server.shard import Shard
from paceline.server.stock import room

SIZES = [5, 3, 4, 6]
RATES = [0.001, 0.5, 0.05]
CORRECTIONS = [
    "by_age", "compensate", "compensate(adaptive=True)", "dana", "decay(0.3)", "drop(3)", "gap",
    "drop(5) + compensate(adaptive=True) + gap + decay(0.1) + dana",
]  # fmt: skip
Gradients = list[torch.Tensor | None]


class Table:
    """Parameters of several groups in one chunk, or in several."""

    def __init__(self, correct: str, groups: list[int], gate: str = "async", chunk_bytes: int = 1 << 20) -> None:
        tensors = [Tensor(f"p{i}", (size,), "float64", group) for i, (size, group) in enumerate(zip(SIZES, groups))]
        placement = place(tensors, 1, chunk_bytes=chunk_bytes)
        self.options: list[dict[str, Any]] = [{"lr": rate} for rate in RATES]
        rule = Rule(optimizer="SGD", groups=self.options, gate=gate, correct=correct)
        memory = torch.zeros(room(placement.of(0)), dtype=torch.uint8)
        self.got: list[tuple[int, int]] = []
        self.shard = Shard(placement, 0, rule, memory, lambda rank, chunk: self.got.append((rank, chunk)))
        self.step: dict[int, int] = {}
        self.read: dict[int, int] = {}
        for index, chunk in enumerate(self.shard.chunks):
            start = [torch.linspace(-1, 1, SIZES[p.tensor], dtype=torch.float64) for p in chunk.pieces]
            self.shard.stock.store(index, torch.cat(start))

    def join(self, workers: int) -> None:
        for rank in range(workers):
            self.step[rank], self.read[rank] = self.shard.join(rank), 0
            self.pull(rank)

    def pull(self, rank: int) -> list[torch.Tensor]:
        """What a worker is sent, by parameter."""
        sent: dict[int, torch.Tensor] = {}
        for index, chunk in enumerate(self.shard.chunks):
            flat = self.shard.weights(rank, index).clone()
            sent |= {p.tensor: flat[p.at : p.at + p.numel] for p in chunk.pieces}
        return [sent[i] for i in range(len(SIZES))]

    def begin(self, rank: int, weight: float = 1.0) -> str:
        self.step[rank] += 1
        push = Push(
            table=0, view=1, step=self.step[rank], read=self.read[rank], weight=weight, groups=self.options
        )  # fmt: skip
        return self.shard.begin(rank, push)

    def part(self, rank: int, index: int, gradients: Gradients) -> None:
        pieces = self.shard.chunks[index].pieces
        given = [gradients[p.tensor] for p in pieces]
        flat = [torch.zeros(p.numel, dtype=torch.float64) if g is None else g for p, g in zip(pieces, given)]
        self.shard.part(rank, index, torch.cat(flat), frozenset(i for i, g in enumerate(given) if g is None))

    def push(self, rank: int, gradients: Gradients, weight: float = 1.0) -> list[torch.Tensor]:
        """A whole push, and what comes back."""
        self.begin(rank, weight)
        for index in range(len(self.shard.chunks)):
            self.part(rank, index, gradients)
        back = self.pull(rank)
        self.read[rank] = self.shard.named_version(rank)
        return back


EVENTS = st.lists(
    st.tuples(
        st.integers(0, 2),  # who
        st.lists(st.booleans(), min_size=len(SIZES), max_size=len(SIZES)),  # which parameters have a gradient
        st.sampled_from([0.5, 1.0, 2.0]),  # a schedule of rates
    ),
    max_size=12,
)


def of(weights: list[torch.Tensor], given: list[bool], seed: int) -> Gradients:
    return [torch.cos(w * (seed + 1)) if there else None for w, there in zip(weights, given)]


@pytest.mark.parametrize(
    ("correct", "options"),
    [("dana(0.9)", {"momentum": 0.9, "nesterov": True}), ("decay(0.5)", {"weight_decay": 0.5}), ("by_age", {})],
)
@settings(max_examples=30, deadline=None)
@given(events=EVENTS, groups=st.lists(st.integers(0, 2), min_size=len(SIZES), max_size=len(SIZES)), chunk=st.booleans())
def test_one_worker_trains_as_torch_does(
    correct: str, options: dict[str, Any], events: list[Any], groups: list[int], chunk: bool
) -> None:
    """With groups of other rates, rates that change, and parameters that are frozen or now and then not used."""
    table = Table(correct, groups, chunk_bytes=1 << 20 if chunk else 64)
    table.join(1)
    sent = table.pull(0)
    own = [w.clone().requires_grad_() for w in sent]
    by_group = [{"params": [p for p, g in zip(own, groups) if g == n], "lr": lr} for n, lr in enumerate(RATES)]
    optimizer = torch.optim.SGD(by_group, **options)
    for i, (_, there, factor) in enumerate(events):
        if correct.startswith("dana"):
            factor = 1.0  # what dana looks ahead with is the rate of the last push; Nesterov's is that of the next
        table.options = [{"lr": rate * factor} for rate in RATES]
        sent = table.push(0, of(sent, there, i))
        for group, rate in zip(optimizer.param_groups, RATES):
            group["lr"] = rate * factor
        for p, g in zip(own, of([p.detach().clone() for p in own], there, i)):
            p.grad = g
        optimizer.step()
        for mine, theirs in zip(sent, own):
            torch.testing.assert_close(mine, theirs.detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("correct", CORRECTIONS)
@settings(max_examples=15, deadline=None)
@given(events=EVENTS)
def test_a_piece_is_corrected_as_if_it_were_alone(correct: str, events: list[Any]) -> None:
    """Of each parameter the same comes out, bit for bit, whichever others share its chunk and their groups."""
    groups = [0, 1, 1, 2]
    together, apart = Table(correct, groups), Table(correct, groups, chunk_bytes=48)
    assert (len(together.shard.chunks), len(apart.shard.chunks)) == (1, len(SIZES))
    for table in together, apart:
        table.join(3)
    for i, (rank, there, factor) in enumerate(events):
        sent = []
        for table in together, apart:
            table.options = [{"lr": rate * factor} for rate in RATES]
            gradients: Gradients = [
                torch.full((size,), 0.1 * (i + 1), dtype=torch.float64).cumsum(0) if has else None
                for size, has in zip(SIZES, there)
            ]
            sent.append(table.push(rank, gradients))
        assert all(map(torch.equal, *sent))


@pytest.mark.parametrize("correct", CORRECTIONS)
def test_the_rates_of_other_groups_do_not_matter(correct: str) -> None:
    one, other = Table(correct, [0, 1, 1, 0]), Table(correct, [0, 1, 1, 0])
    for table in one, other:
        table.join(2)
        for i in range(8):
            table.options = [{"lr": 0.1 / (i + 1)}, {"lr": 1e-3 if table is one else 1.0 * (i % 3)}, {"lr": 3.0}]
            table.push(i % 2, [torch.linspace(i, 1, size, dtype=torch.float64) for size in SIZES])
    first, *_, last = (a.equal(b) for a, b in zip(one.pull(0), other.pull(0)))
    assert (first, last) == (True, True)


@pytest.mark.parametrize("correct", CORRECTIONS)
def test_what_has_no_gradient_stays_as_it_is(correct: str) -> None:
    table = Table(correct, [0, 0, 1, 1])
    table.join(2)
    first = table.pull(0)
    for i in range(6):
        table.push(i % 2, of(first, [False, True, True, False], i))
    last = table.pull(0)
    assert [a.equal(b) for a, b in zip(first, last)] == [True, False, False, True]


def test_a_batch_without_samples_does_not_decay() -> None:
    one, other = Table("decay(0.5)", [0, 1, 1, 2]), Table("decay(0.5)", [0, 1, 1, 2])
    for table in one, other:
        table.join(1)
        gradients = of(table.pull(0), [True] * 4, 1)
        table.push(0, gradients)
        if table is other:
            table.push(0, gradients, weight=0.0)
        table.push(0, gradients)
    assert all(map(torch.equal, one.pull(0), other.pull(0)))


def test_a_rate_that_decay_cannot_take_is_refused_before_anything_is_applied() -> None:
    table = Table("decay(3)", [0, 0, 1, 1], chunk_bytes=64)
    table.join(1)
    first = table.pull(0)
    with pytest.raises(ConfigError, match=r"decay\(rate=3\): at a learning rate of 0.5"):
        table.push(0, of(first, [True] * 4, 1))
    assert all(map(torch.equal, first, table.pull(0)))


def test_in_sync_corrections_rest_and_begin_anew_behind_it() -> None:
    correct = "compensate(adaptive=True) + gap + dana(0.9) + decay(0.1)"
    table, plain = Table(correct, [0, 1, 1, 2]), Table("", [0, 1, 1, 2], gate="sync")
    for each in table, plain:
        each.join(1)
    for i in range(4):
        table.push(0, of(table.pull(0), [True] * 4, i))
    table.shard.turn("sync")
    plain.shard.stock.store(0, table.shard.stock.weights[0])
    assert all(map(torch.equal, table.pull(0), plain.pull(0)))  # not ahead of where they are
    for i in range(3):
        sent = [each.push(0, of(each.pull(0), [True] * 4, i)) for each in (table, plain)]
        assert all(map(torch.equal, *sent))
    table.shard.turn("async")
    anew = Table(correct, [0, 1, 1, 2])
    anew.shard.stock.store(0, plain.shard.stock.weights[0])
    anew.join(1)
    table.pull(0)  # as a worker does when the gate has turned
    for i in range(4):
        sent = [each.push(0, of(each.pull(0), [True] * 4, i)) for each in (table, anew)]
        assert all(map(torch.equal, *sent))


def test_between_async_and_bounded_corrections_go_on() -> None:
    table, other = Table("dana(0.9)", [0, 1, 1, 2]), Table("dana(0.9)", [0, 1, 1, 2])
    for each in table, other:
        each.join(1)
        for i in range(4):
            if each is table and i == 2:
                each.shard.turn("bounded(staleness=4)")
            each.push(0, of(each.pull(0), [True] * 4, i))
    assert all(map(torch.equal, table.pull(0), other.pull(0)))
