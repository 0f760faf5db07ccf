"""What a worker can tell of its pushes: ages as the servers count them, drops once each, codes and their cost."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.server import messages as m
from paceline.server.client import Client, Table
from paceline.server.connection import pair
from paceline.server.placement import Tensor
from paceline.server.pushes import readings_of
from paceline.server.service import Service

SGD: dict[str, Any] = {"lr": 0.1}
SHAPES = [(60, 100), (70, 100), (5,)]


def workers(count: int, servers: int, *, correct: str = "", codec: str = "") -> tuple[list[Service], list[Table]]:
    services = [Service(limit_s=30) for _ in range(servers)]
    tables = []
    for rank in range(count):
        ends = [pair(rank, shared=False) for _ in services]
        for service, (theirs, _) in zip(services, ends):
            service.attach(theirs)
        client = Client(rank, [mine for _, mine in ends], limit_s=30)
        rule = m.Rule(optimizer="SGD", groups=[SGD], gate="async", correct=correct, codec=codec)
        tensors = [Tensor(f"p{i}", shape, "float32", 0) for i, shape in enumerate(SHAPES)]
        tables.append(client.open([(t, torch.zeros(t.shape)) for t in tensors], rule))
    return services, tables


def push(table: Table) -> None:
    table.push([torch.ones(shape) for shape in SHAPES], [SGD])


def told(table: Table, codec: str = "") -> dict[str, Any]:
    return readings_of([table], codec, table._client.sent_bytes)


def close(services: list[Service], tables: list[Table]) -> None:
    for table in tables:
        table._client.close()
    for service in services:
        service.close()


@pytest.mark.parametrize("servers", [1, 2])
def test_ages_and_drops_are_counted_once_for_each_push(servers: int) -> None:
    services, (slow, fast) = workers(2, servers, correct="drop(4)")
    push(slow)
    for gap in (2, 3, 4, 7):
        for _ in range(gap):
            push(fast)
        push(slow)  # so many of the other's pushes old
    mine, other = told(slow), told(fast)
    assert (mine["pushes"], mine["ages"], mine["oldest"]) == (5, 16, 7)
    assert (mine["dropped_pushes"], mine["drop_reasons"]) == (2, {"it is n versions old": 2})
    assert len(slow.dropped) == 2
    assert (other["pushes"], other["dropped_pushes"]) == (16, 0)
    assert "codec" not in mine
    close(services, [slow, fast])  # a message is counted once it is sent, which its answer may come before
    assert told(slow)["pushed_bytes"] > 5 * 4 * sum(torch.Size(shape).numel() for shape in SHAPES)


def test_codes_tell_bytes_times_and_what_is_unsaid() -> None:
    services, [table] = workers(1, 2, codec="sign")
    assert "codec" not in told(table, "sign")  # nothing was encoded yet
    for _ in range(3):
        table.push([torch.randn(shape) for shape in SHAPES], [SGD])
    mine = told(table, "sign")
    assert mine["codec"] == "sign"
    assert mine["bytes_before"] == 3 * 4 * sum(torch.Size(shape).numel() for shape in SHAPES)
    assert 16 < mine["bytes_before"] / mine["bytes_after"] < 32
    assert mine["encode_s"] > 0
    assert mine["residual_norm"] > 0
    close(services, [table])
