"""Every element has one place, servers are loaded alike, and first layers come first."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import ConfigError
from paceline.launch.servers import choose, forgives, parse
from paceline.server.placement import Tensor, place

SHAPES = st.lists(
    st.tuples(st.lists(st.integers(0, 60), max_size=3), st.sampled_from(["float32", "bfloat16", "float64"])),
    max_size=12,
)


@settings(deadline=None)
@given(shapes=SHAPES, servers=st.integers(1, 5), cut=st.booleans(), chunk_bytes=st.sampled_from([64, 4096, 1 << 22]))
def test_every_element_is_placed_once(
    shapes: list[tuple[list[int], str]], servers: int, cut: bool, chunk_bytes: int
) -> None:
    tensors = [Tensor(f"p{i}", tuple(shape), dtype, 0) for i, (shape, dtype) in enumerate(shapes)]
    table = place(tensors, servers, cut=cut, chunk_bytes=chunk_bytes)
    seen = {(p.tensor, i) for c in table.chunks for p in c.pieces for i in range(p.start, p.stop)}
    assert len(seen) == sum(p.numel for c in table.chunks for p in c.pieces) == sum(t.numel for t in tensors)
    for chunk in table.chunks:
        assert 0 <= chunk.server < servers
        assert [p.at for p in chunk.pieces] == [
            sum(q.numel for q in chunk.pieces[:i]) for i in range(len(chunk.pieces))
        ]
        assert {tensors[p.tensor].dtype for p in chunk.pieces} == {chunk.dtype}
        assert chunk.nbytes <= chunk_bytes or len(chunk.pieces) == 1
    firsts = [(c.pieces[0].tensor, c.pieces[0].start) for c in table.chunks]
    assert firsts == sorted(firsts)
    if not cut:
        assert all(p.numel == tensors[p.tensor].numel for c in table.chunks for p in c.pieces)


@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, 3_000_000), min_size=1, max_size=20), servers=st.integers(1, 8))
def test_servers_are_loaded_alike(sizes: list[int], servers: int) -> None:
    tensors = [Tensor(f"p{i}", (n,), "float32", 0) for i, n in enumerate(sizes)]
    loads = [place(tensors, servers).nbytes(server) for server in range(servers)]
    total = 4 * sum(sizes)
    assert max(loads) - min(loads) <= max(total / servers / 8 + 4, 64 << 10)


def test_everyone_computes_the_same_table() -> None:
    tensors = [Tensor(f"p{i}", (100 * i + 1, 7), "float32", i % 2) for i in range(30)]
    assert place(tensors, 3) == place(list(tensors), 3)


def test_the_number_of_servers_is_chosen_and_said() -> None:
    assert choose("async(correct='drop(8)')", "auto", 4)[0] == 1
    assert choose("bounded(staleness=2)", "auto", 9)[0] == 3
    assert choose("sync", "auto", 4)[0] == 0
    assert choose("sync(backups=1)", "auto", 4)[0] == 1
    assert choose("sync", "3", 4) == (3, "3 servers, as asked for")
    assert "every worker" in choose("async", "colocated", 4)[1]
    assert choose("async", "auto", 1) == (0, "")
    with pytest.raises(ConfigError, match="allreduce has no servers"):
        choose("allreduce", "2", 4)
    assert not forgives("sync(backups=0)", 1)
    assert not forgives("sync(0, per_host=True)", 1)
    assert choose("sync(backups=0)", "auto", 4)[0] == 0
    assert forgives("sync(1)", 1)
    assert [forgives(s, 1) for s in ("async", "bounded(staleness=1)", "sync", "sync(backups=1)")] == [
        True,
        True,
        False,
        True,
    ]
    for text in ("0", "-1", "many", "1.5"):
        with pytest.raises(ConfigError, match="number of servers"):
            parse(text)
