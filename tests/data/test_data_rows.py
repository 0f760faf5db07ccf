"""Datasets of Ray Data as a loader reads them; blocks are plain arrays here, and Ray is not needed."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from paceline.core.errors import ConfigError
from paceline.data import Loader, rows


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many blocks each call to Ray was for; a reference is the block itself."""
    calls: list[int] = []

    def get(references: list[Any]) -> list[Any]:
        calls.append(len(references))
        return references

    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(get=get))
    return calls


def parts(*sizes: int) -> list[rows.Part]:
    edges = np.cumsum([0, *sizes])
    return [({"x": np.arange(a, b), "y": np.arange(a, b) * 2.0}, int(b - a)) for a, b in pairwise(edges)]


def like(name: str, **methods: Any) -> Any:
    """An object of a class of Ray Data's, by its name."""
    return type(name, (), {"__module__": "ray.data.somewhere", **methods})()


def test_rows_are_found_by_number(asked: list[int]) -> None:
    found = rows.Rows(parts(3, 0, 1, 4))
    assert len(found) == 8
    assert [row["x"] for row in found.__getitems__([7, 0, 3, 2])] == [7, 0, 3, 2]
    assert found[4]["y"] == 8.0
    with pytest.raises(IndexError, match="row 8 of 8"):
        found[8]
    with pytest.raises(IndexError):
        found[-1]


def test_blocks_come_in_one_call_and_few_are_kept(asked: list[int]) -> None:
    found = rows.Rows(parts(*[1] * 20))
    found.__getitems__(list(range(20)))
    assert asked == [20]
    found.__getitems__([12, 13, 19])  # of the last, which are at hand
    assert asked == [20]
    found.__getitems__([0, 19])
    assert asked == [20, 1]


def test_members_share_the_rows_of_an_epoch(asked: list[int]) -> None:
    found = rows.Rows(parts(5, 6))
    seen = []
    for rank in range(2):
        loader = Loader(found, batch_size=2, rank=rank, size=2, seed=3)
        for batch in loader:
            assert batch["y"].tolist() == [2.0 * x for x in batch["x"].tolist()]
            seen += batch["x"].tolist()[: loader.last_real]
    assert sorted(seen) == list(range(11))


def test_a_dataset_of_several_members_needs_the_engine() -> None:
    with pytest.raises(ConfigError, match="paceline run --on ray"):
        rows.taken(like("Dataset"), {}, 0, 2, {})
    with pytest.raises(ConfigError, match="workers= does not go"):
        rows.taken(like("Dataset"), {"workers": 2}, 0, 1, {})


def test_a_share_is_a_stream_of_its_own() -> None:
    def iter_rows(self: Any) -> Iterator[dict[str, int]]:
        return iter([{"x": n} for n in range(5)])

    share = like("DataIterator", iter_rows=iter_rows)
    assert rows.is_share(share)
    assert not rows.is_dataset(share)
    dataset, options = rows.taken(share, {}, 0, 2, {})
    agreed = iter([[2 << 32, 2 << 32]] * 2 + [[1 << 32 | 1, 1 << 32 | 1], [1, 1], [0, 0]])
    loader = Loader(dataset, batch_size=2, rank=1, size=2, agree=lambda number: next(agreed), **options)
    assert [batch["x"].tolist() for batch in loader] == [[0, 1], [2, 3], [4]]
    with pytest.raises(ConfigError, match="partition= does not go"):
        rows.taken(share, {"partition": object()}, 0, 2, {})


def test_other_datasets_are_left_alone() -> None:
    mine = type("Dataset", (), {"__module__": "my.data"})()
    assert not rows.is_dataset(mine)
    assert not rows.is_share([1, 2])
