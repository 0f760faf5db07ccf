"""Collectives around a hub give what those of a group give, and go on without members that are lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

from paceline.core.errors import ConfigError, Interrupted
from paceline.testing.together import together
from paceline.transport.group import Group
from paceline.transport.hub import Hub, HubGroup

T = TypeVar("T")


def around(size: int, body: Callable[[HubGroup], T]) -> list[T | None]:
    """What the members return; one more has the hub until they are done."""
    done = threading.Barrier(size + 1)

    def member(group: Group) -> T | None:
        wires = group._wires
        assert wires is not None
        if wires.rank == size:
            hub = Hub(wires, range(size))
            done.wait(30)
            hub.close()
            return None
        mine = HubGroup(wires, range(size), size)
        try:
            return body(mine)
        finally:
            done.wait(30)
            mine.close()

    return together(size + 1, member, hosts=["a", "b", "a", "c"][: size + 1])[:size]


def test_collectives_are_those_of_a_group() -> None:
    def body(g: HubGroup) -> list[object]:
        mine = torch.tensor([1.0, 2.0]) + g.rank
        return [
            g.all_reduce(mine.clone()).tolist(),
            g.all_reduce(mine.clone(), "mean").tolist(),
            g.all_reduce(mine.clone(), "max").tolist(),
            g.all_reduce(mine.clone(), "min").tolist(),
            g.all_reduce(mine.clone(), "product").tolist(),
            [t.tolist() for t in g.all_gather(mine)],
            g.broadcast(mine.clone(), 1).tolist(),
            g.exchange(b"x" * g.rank),
            [t.tolist() for t in g.gather(torch.arange(g.rank), 2) or []],
            g.scatter([torch.tensor([r]) for r in range(3)] if g.rank == 1 else None, 1).tolist(),
            g.reduce_scatter(torch.ones(3, 2) * g.rank).tolist(),
        ]

    for rank, got in enumerate(around(3, body)):
        assert got is not None
        assert got[:5] == [[6.0, 9.0], [2.0, 3.0], [3.0, 4.0], [1.0, 2.0], [6.0, 24.0]]
        assert got[5] == [[1.0, 2.0], [2.0, 3.0], [3.0, 4.0]]
        assert got[6:8] == [[2.0, 3.0], [b"", b"x", b"xx"]]
        assert got[8] == ([[], [0], [0, 1]] if rank == 2 else [])
        assert got[9:] == [[rank], [3.0, 3.0]]


def test_a_long_broadcast_goes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.transport.hub._PART_BYTES", 64)
    results = around(2, lambda g: g.broadcast(torch.arange(100.0) * (g.rank + 1)))
    assert all(torch.equal(r, torch.arange(100.0)) for r in results if r is not None)


def test_the_others_go_on_without_a_lost_member() -> None:
    def body(g: HubGroup) -> list[object]:
        first = g.all_reduce(torch.ones(1)).item()
        if g.rank == 1:
            g._channel.close()
            return [first]
        second = g.all_reduce(torch.ones(1)).item()
        with pytest.raises(Interrupted, match="member 1 left before it could broadcast"):
            g.broadcast(torch.ones(1), 1)
        return [first, second, g.exchange(b"y"), g.ranks_here]

    lost = around(3, body)
    assert lost[1] == [3.0]
    assert lost[0] == lost[2] == [3.0, 2.0, [b"y", b"y"], (0, 2)]


def test_what_a_hub_is_not_for() -> None:
    def body(g: HubGroup) -> None:
        with pytest.raises(ConfigError, match="do not exchange gradients"):
            g.arena(100)
        with pytest.raises(ConfigError, match="unknown operation"):
            g.all_reduce(torch.ones(1), "most")

    around(2, body)
