"""A worker whose threads push in turn: ages and corrections are those of each thread."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from paceline.core.errors import ConfigError
from paceline.server import messages as m
from paceline.server.client import Client, Table
from paceline.server.connection import pair
from paceline.server.placement import Tensor, place
from paceline.server.service import Service
from paceline.server.shard import Shard
from paceline.server.stock import room

SGD: dict[str, Any] = {"lr": 1.0}


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service(limit_s=10)
    yield service
    service.close()


def worker(service: Service, rank: int, correct: str) -> Table:
    theirs, mine = pair(rank, shared=False)
    service.attach(theirs)
    rule = m.Rule(optimizer="SGD", groups=[SGD], gate="async", correct=correct)
    client = Client(rank, [mine], limit_s=10)
    return client.open([(Tensor("p", (4,), "float32", 0), torch.zeros(4))], rule)


def push(table: Table, **options: Any) -> None:
    table.push([torch.ones(4)], [SGD], **options)


def test_the_age_of_a_push_is_counted_from_what_its_thread_had_read(service: Service) -> None:
    table = worker(service, 0, "drop(2)")
    read = table.versions
    push(table)
    push(table, read=read, thread=1)  # one version old
    assert not table.dropped
    push(table, read=read, thread=2)
    assert ["2 versions old" in reason for reason in table.dropped.values()] == [True]
    push(table)  # has read what came back
    assert len(table.dropped) == 1
    table._client.close()


def test_what_is_pulled_is_new(service: Service) -> None:
    idle, busy = worker(service, 0, "drop(2)"), worker(service, 1, "drop(2)")
    push(idle)
    for _ in range(5):
        push(busy)
    idle.pull()
    push(idle)
    assert not idle.dropped
    for table in (idle, busy):
        table._client.close()


class Bench:
    """A shard of one chunk with one worker, whose threads push when the test says so."""

    def __init__(self, correct: str) -> None:
        placement = place([Tensor("p", (3,), "float32", 0)], 1)
        rule = m.Rule(optimizer="SGD", groups=[SGD], gate="async", correct=correct)
        memory = torch.zeros(room(placement.of(0)), dtype=torch.uint8)
        self.shard = Shard(placement, 0, rule, memory, lambda rank, chunk: None)
        self.step = self.shard.join(0)

    def push(self, thread: int, value: float) -> torch.Tensor:
        self.step += 1
        head = m.Push(table=0, view=1, step=self.step, read=0, weight=1.0, groups=[SGD], thread=thread)
        self.shard.begin(0, head)
        self.shard.part(0, 0, torch.full((3,), value))
        return self.shard.weights(0, 0).clone()

    def pull(self) -> torch.Tensor:
        self.shard.pulls(0)
        return self.shard.weights(0, 0).clone()


def test_each_thread_is_compensated_from_where_it_had_read() -> None:
    bench = Bench("compensate(0.5)")
    bench.pull()
    w1 = bench.push(0, 1.0)  # both have read 0
    assert w1.tolist() == [-1.0] * 3
    w2 = bench.push(1, 1.0)  # its first push: nothing was kept for it yet
    assert w2.tolist() == [-2.0] * 3
    w3 = bench.push(0, 1.0)  # read at -1, arrives at -2: 1 + 0.5 * 1 * (-2 - -1) = 0.5
    assert w3.tolist() == [-2.5] * 3
    w4 = bench.push(1, 1.0)  # read at -2, arrives at -2.5: 0.75
    assert w4.tolist() == [-3.25] * 3
    bench.pull()
    assert bench.push(0, 1.0).tolist() == [-4.25] * 3  # both have read what was pulled
    bench.pull()
    assert bench.push(1, 1.0).tolist() == [-5.25] * 3


def test_each_thread_has_a_momentum_of_its_own_and_leaves_none_behind() -> None:
    bench = Bench("dana(0.5)")
    for thread in (0, 1, 0, 1):
        bench.push(thread, 1.0)
    # Twice 1, then twice 1 + 0.5; workers read ahead of both momenta, of 1.5 each.
    assert bench.pull().tolist() == [-5.0 - 0.5 * 3.0] * 3
    bench.shard.leave(0)
    assert bench.shard.readers.correction is not None
    assert not bench.shard.readers.correction.state_dict()["momenta"]


@pytest.mark.parametrize("thread", [-1, 1 << 20])
def test_a_thread_that_no_worker_has_is_refused(thread: int) -> None:
    with pytest.raises(ConfigError, match=f"thread {thread}"):
        Bench("").push(thread, 1.0)
