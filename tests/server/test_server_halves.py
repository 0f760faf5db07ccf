"""A push that ends before its last chunk: what had been applied of it is named, counted, and nothing else changes."""

from __future__ import annotations

import pytest
import torch

from paceline.core.errors import ConfigError, PacelineError
from paceline.server import messages as m
from paceline.server.client import Client
from paceline.server.connection import pair
from paceline.server.placement import Tensor, place
from paceline.server.service import Service
from paceline.server.shard import Shard
from paceline.server.stock import room

TENSORS = tuple(Tensor(f"p{i}", (4,), "float32", 0) for i in range(3))
OPTIONS = [{"lr": 1.0}]


def shard(gate: str, workers: int) -> Shard:
    placement = place(TENSORS, 1, chunk_bytes=16)
    memory = torch.zeros(room(placement.of(0)), dtype=torch.uint8)
    made = Shard(placement, 0, m.Rule(optimizer="SGD", groups=OPTIONS, gate=gate), memory, lambda rank, chunk: None)
    for rank in range(workers):
        made.join(rank)
    return made


def begin(made: Shard, rank: int, weight: float = 1.0) -> None:
    made.begin(rank, m.Push(table=0, view=1, step=1, read=0, weight=weight, groups=OPTIONS))


def applied(made: Shard) -> list[bool]:
    return [bool(weights.any()) for weights in made.stock.weights]


@pytest.mark.parametrize("gate", ["async", "bounded(staleness=2)"])
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_chunks_before_a_bad_one_are_named_and_counted(gate: str, bad: int) -> None:
    made = shard(gate, 2)
    begin(made, 0)
    for index in range(bad):
        made.part(0, index, torch.ones(4))
    with pytest.raises(ConfigError, match="not finite, in parameter"):
        made.part(0, bad, torch.tensor([1.0, 1.0, float("nan"), 1.0]))
    assert applied(made) == [index < bad for index in range(3)]
    which = ["", "chunk 0 of 3 of this push, from 'p0' to 'p0',", "chunks 0 to 1 of 3 of this push, from 'p0' to 'p1',"]
    assert made.half(0) == (which[bad] and f"{which[bad]} had been applied")
    assert made.half(1) == ""
    made.leave(0)
    assert (made.halves, made.applied, made.dropped, made.version) == (int(bad > 0), 0, 0, 0)
    begin(made, 1)  # the others go on
    for index in range(3):
        made.part(1, index, torch.ones(4))
    assert (made.halves, made.applied, made.version, made.half(1)) == (int(bad > 0), 1, 1, "")


def test_with_backups_nothing_of_it_is_applied() -> None:
    made = shard("sync(backups=1)", 2)
    for rank in range(2):
        begin(made, rank)
        made.part(rank, 0, torch.ones(4))
    assert made.half(0) == ""
    made.leave(0)
    assert made.halves == 0
    assert not any(applied(made))


def test_in_sync_what_was_summed_is_named() -> None:
    made = shard("sync", 2)
    for rank in range(2):
        begin(made, rank)
    made.part(0, 0, torch.ones(4))
    assert made.half(0) == ""
    made.part(1, 0, torch.ones(4))
    assert made.half(0) == made.half(1) == "chunk 0 of 3 of this push, from 'p0' to 'p0', had been applied"


def test_a_batch_without_samples_leaves_no_half() -> None:
    made = shard("async", 1)
    begin(made, 0, weight=0.0)
    made.part(0, 0, torch.ones(4))
    assert made.half(0) == ""


def test_a_sender_that_does_not_look_is_told() -> None:
    """Over a real connection, past the client's own look."""
    service = Service(limit_s=10)
    theirs, mine = pair(0)
    service.attach(theirs)
    client = Client(0, [mine], limit_s=10)
    try:
        sizes = [1 << 20, 1 << 20]
        tensors = [Tensor(f"p{i}", (size,), "float32", 0) for i, size in enumerate(sizes)]
        values = [torch.zeros(size) for size in sizes]
        table = client.open(
            list(zip(tensors, values)), m.Rule(optimizer="SGD", groups=OPTIONS, gate="async")
        )  # fmt: skip
        table.store()
        table.pull()
        table._check_finite = lambda gradients: None  # type: ignore[method-assign]
        gradients = [torch.ones(size) for size in sizes]
        gradients[1][-1] = float("inf")
        with pytest.raises(PacelineError, match=r"not finite, in parameter 'p1'.*of this push, from 'p0' to 'p[01]'"):
            table.push(gradients, OPTIONS)
        client.close()
        assert service.wait(10)  # until the server has seen it go
        assert service.readings()["halves"] == 1
    finally:
        client.close()
        service.close()
