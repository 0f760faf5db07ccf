"""Corrections go on where they were: after a resume, on any number of servers, with fewer or more workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from paceline.checkpoint import pack, unpack
from paceline.core.errors import ConfigError
from paceline.server import messages as m
from paceline.server.client import Client, Table
from paceline.server.connection import pair
from paceline.server.placement import Tensor
from paceline.server.service import Service
from paceline.server.shard import Shard
from paceline.strategies import World, make_strategy
from paceline.testing.together import together
from paceline.transport.group import Group

SHAPES: list[tuple[int, ...]] = [(300, 700), (7,), (50, 3), ()]
CORRECTIONS = [
    "by_age",
    "compensate",
    "compensate(adaptive=True)",
    "dana(0.9)",
    "decay(0.1)",
    "drop(4)",
    "gap",
    "drop(9) + compensate(adaptive=True) + gap + dana(0.8) + decay(0.01)",
]


class Place:
    def __init__(self, servers: int, workers: int, correct: str, dtype: str = "float32") -> None:
        self.services = [Service(limit_s=10) for _ in range(servers)]
        self.clients = []
        self.tables: list[Table] = []
        tensors = [Tensor(f"p{i}", shape, dtype, i % 2) for i, shape in enumerate(SHAPES)]
        rule = m.Rule(optimizer="SGD", groups=[{"lr": 9.0}, {"lr": 9.0}], gate="async", correct=correct)
        for rank in range(workers):
            ends = [pair(rank) for _ in self.services]
            for service, (theirs, _) in zip(self.services, ends):
                service.attach(theirs)
            self.clients.append(Client(rank, [mine for _, mine in ends], limit_s=10))
            generator = torch.Generator().manual_seed(1)
            values = [torch.randn(t.shape, generator=generator).to(t.torch_dtype) for t in tensors]
            self.tables.append(self.clients[-1].open(list(zip(tensors, values)), rule))
        self.tables[0].store()
        self.pull()

    def pull(self) -> None:
        for table in self.tables:
            table.pull()

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last):
            for rank, table in enumerate(self.tables):
                gradients: list[torch.Tensor | None] = [torch.cos(w * (step + rank + 1)) for w in weights(table)]
                if step % 3 == 1:
                    gradients[1] = gradients[3] = None  # so their history is another than that of their neighbours
                table.push(gradients, [{"lr": 0.1 / (step + 1)}, {"lr": 0.02}])

    def resumed_from(self, other: Place) -> None:
        """As the strategy does it: what the first worker has, and what the servers keep."""
        for mine, theirs in zip(weights(self.tables[0]), weights(other.tables[0])):
            mine.copy_(theirs)
        self.tables[0].store()
        self.tables[0].store_state(other.tables[0].state())
        self.pull()

    def shard(self) -> Shard:
        return self.services[0].tables[0].shard


@contextmanager
def places(*each: Place) -> Iterator[None]:
    try:
        yield
    finally:
        for place in each:
            for client in place.clients:
                client.close()
            for service in place.services:
                service.close()


def weights(table: Table) -> list[torch.Tensor]:
    return [slot.parameter for slot in table.slots]


def same(one: Place, other: Place) -> bool:
    pairs = [(a, b) for x, y in zip(one.tables, other.tables) for a, b in zip(weights(x), weights(y))]
    return bool(pairs) and all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(("before", "after", "dtype"), [(1, 1, "float32"), (3, 2, "float32"), (1, 3, "bfloat16")])
@pytest.mark.parametrize("correct", CORRECTIONS)
def test_a_resumed_run_goes_on_bit_for_bit(correct: str, before: int, after: int, dtype: str) -> None:
    whole, first, second = (Place(n, 1, correct, dtype) for n in (1, before, after))
    with places(whole, first, second):
        whole.steps(0, 5)
        whole.pull()
        first.steps(0, 5)
        first.pull()
        second.resumed_from(first)
        assert same(whole, second)
        for step in range(5, 9):
            whole.steps(step, step + 1)
            second.steps(step, step + 1)
            assert same(whole, second), step


@pytest.mark.parametrize("correct", CORRECTIONS)
def test_so_do_three_workers_that_take_turns(correct: str) -> None:
    whole, first, second = Place(1, 3, correct), Place(2, 3, correct), Place(3, 3, correct)
    with places(whole, first, second):
        for place in (whole, first):
            place.steps(0, 3)
            place.pull()
        second.resumed_from(first)
        for place in (whole, second):
            place.steps(3, 5)
            place.pull()
        assert same(whole, second)


@pytest.mark.parametrize("correct", ["compensate(adaptive=True)", "dana(0.9)", "gap"])
def test_without_what_was_kept_others_come_out(correct: str) -> None:
    whole, second = Place(1, 3, correct), Place(1, 3, correct)
    with places(whole, second):
        whole.steps(0, 5)
        whole.pull()
        for mine, theirs in zip(weights(second.tables[0]), weights(whole.tables[0])):
            mine.copy_(theirs)
        second.tables[0].store()
        second.pull()
        for place in (whole, second):
            place.steps(5, 7)
        assert not same(whole, second)


def test_the_momentum_of_who_is_not_there_any_more_is_forgotten() -> None:
    first, second, third = Place(2, 3, "dana(0.5)"), Place(1, 2, "dana(0.5)"), Place(1, 4, "dana(0.5)")
    with places(first, second, third):
        first.steps(0, 3)
        first.pull()
        for place, ranks in ((second, {0, 1}), (third, {0, 1, 2})):
            place.resumed_from(first)
            correction = place.shard().readers.correction
            assert correction is not None
            for momenta in correction.state_dict()["momenta"].values():
                assert set(momenta["of"]) == {str(rank) for rank in ranks}
                torch.testing.assert_close(momenta["total"], sum(momenta["of"].values()))
            place.steps(3, 5)


def test_what_does_not_fit_is_refused() -> None:
    place = Place(1, 1, "dana(0.5) + drop(3)")
    with places(place):
        shard = place.shard()
        with pytest.raises(ConfigError, match="3 values of @parts/0"):
            shard.store_state(0, 0, "@parts/0/momenta/*/total", torch.ones(3))
        shard.store_state(0, 0, "@parts/7/momenta/*/pushes", 3.0)
        with pytest.raises(ConfigError, match="no parts/7"):
            shard.weights(0, 0)


@pytest.mark.parametrize("gate", ["async({})", "bounded(staleness=8, {})"])
def test_a_strategy_saves_what_its_servers_corrections_keep(gate: str) -> None:
    """The other member waits, so that all can be repeated; the resumed run has three."""
    correct = "correct='compensate(adaptive=True) + dana(0.9)'"

    def body(group: Group, words: str, saved: dict[str, Any] | None) -> dict[str, Any]:
        strategy = make_strategy(words)
        model = torch.nn.Linear(5, 3)
        with torch.no_grad():
            for p, value in zip(model.parameters(), saved["model"] if saved else (torch.tensor(0.3),) * 2):
                p.copy_(value)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        strategy.attach(model, optimizer, World(group, wires=group._wires, limit_s=20.0))
        if saved:
            strategy.load_state_dict(saved["strategy"])
            strategy.load_own_state([])
        found: dict[str, Any] = {}
        for half in range(1 if saved else 2):
            for step in range(3 if group.rank == 0 else 0):
                for p in model.parameters():
                    p.grad = torch.cos(p.detach() * (step + 1))
                strategy.finish(optimizer)
            strategy.together(keep=True)
            assert not any(key.startswith("@") for state in optimizer.state.values() for key in state)
            if not half:
                found["strategy"] = unpack(bytearray(pack(strategy.state_dict())))
                found["model"] = [p.detach().clone() for p in model.parameters()]
        found["end"] = [p.detach().clone() for p in model.parameters()]
        strategy.close()
        return found

    words = gate.format(correct)
    whole = together(2, lambda group: body(group, words, None))[0]
    assert whole["strategy"]["corrections"][0].keys() == {"weight", "bias"}
    for resumed in together(3, lambda group: body(group, words, whole)):
        assert all(torch.equal(a, b) for a, b in zip(whole["end"], resumed["end"]))
    anew = together(2, lambda group: body(group, gate.format("correct='dana(0.9)'"), whole))[0]
    assert not all(torch.equal(a, b) for a, b in zip(whole["end"], anew["end"]))
