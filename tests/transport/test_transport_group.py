"""Collectives give the same bits on all members, through shared memory, between hosts, and where both meet."""

from __future__ import annotations

import gc
import os
import resource
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import ConfigError, Interrupted, TimedOut
from paceline.testing.together import together
from paceline.transport.group import Group, solo

PLACES = {
    "one host, 2": ["a", "a"],
    "one host, 3": ["a", "a", "a"],
    "two hosts": ["a", "b"],
    "three hosts": ["a", "b", "c"],
    "two hosts of two": ["a", "a", "b", "b"],
    "unlike hosts": ["a", "b", "a", "a"],
}


def values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    if dtype.is_floating_point:
        return torch.randn(numel, generator=generator).to(dtype)
    return torch.randint(-50, 50, (numel,), generator=generator).to(dtype)


@pytest.mark.parametrize("place", PLACES)
def test_collectives(place: str) -> None:
    hosts = PLACES[place]
    n = len(hosts)

    def body(group: Group) -> list[torch.Tensor]:
        out = []
        for numel in (0, 1, 5, 4097, 300_001):
            for dtype in (torch.float32, torch.bfloat16, torch.int64):
                mine = values(group.rank, numel, dtype)
                every = [values(r, numel, dtype) for r in range(n)]
                out.append(group.all_reduce(mine.clone()))
                assert all(map(torch.equal, group.all_gather(mine), every))
                assert torch.equal(group.broadcast(mine.clone(), n - 1), every[-1])
                rows = torch.stack([mine + k for k in range(n)])
                scattered = group.reduce_scatter(rows.clone())
                expected = sum(e.double() + group.rank for e in every)
                torch.testing.assert_close(scattered.double(), torch.as_tensor(expected), rtol=2e-2, atol=0.3)
        gathered = group.gather(torch.full((group.rank + 1,), group.rank), root=1)
        if group.rank == 1:
            assert gathered is not None
            assert [t.tolist() for t in gathered] == [[r] * (r + 1) for r in range(n)]
        else:
            assert gathered is None
        dealt = group.scatter([torch.tensor([r, 7]) for r in range(n)] if group.rank == 0 else None)
        assert dealt.tolist() == [group.rank, 7]
        assert group.exchange(b"x" * group.rank) == [b"x" * r for r in range(n)]
        group.barrier()
        return out

    results = together(n, body, hosts=hosts)
    for others in results[1:]:
        for a, b in zip(results[0], others):
            assert torch.equal(a, b)
    index = 0
    for numel in (0, 1, 5, 4097, 300_001):
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            total = torch.stack([values(r, numel, dtype).double() for r in range(n)]).sum(0)
            torch.testing.assert_close(results[0][index].double(), total, rtol=2e-2, atol=0.1)
            if not dtype.is_floating_point:
                assert torch.equal(results[0][index], total.to(dtype))
            index += 1


@pytest.mark.parametrize("place", ["one host, 2", "one host, 3"])
def test_collectives_where_members_cannot_read_each_other(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.transport.reach.permitted", lambda pids, gather: False)
    test_collectives(place)


@pytest.mark.parametrize("reads", [True, False])
def test_a_scattered_sum_may_lie_in_what_it_is_made_of(reads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not reads:
        monkeypatch.setattr("paceline.transport.reach.permitted", lambda pids, gather: False)

    def body(group: Group) -> torch.Tensor:
        rows = torch.stack([values(group.rank, 200_000, torch.float32) + k for k in range(3)])
        group.lane().reduce_scatter(rows.view(-1), rows[group.rank])
        return rows[group.rank]

    for rank, found in enumerate(together(3, body)):
        a, b, c = (values(r, 200_000, torch.float32) + rank for r in range(3))
        assert torch.equal(found, a + b + c)


@pytest.mark.parametrize("hosts", [["a", "a"], ["a", "a", "a"], ["a", "b"], ["a", "a", "b"]])
def test_a_scattered_sum_goes_where_it_is_wanted(hosts: list[str]) -> None:
    def body(group: Group) -> bool:
        rows = torch.stack([values(group.rank, 200_000, torch.float32) + k for k in range(group.size)])
        out = torch.empty(200_000)
        group.reduce_scatter_into(rows.clone(), out)
        return torch.equal(out, group.reduce_scatter(rows)) and bool(out.any())

    assert together(len(hosts), body, hosts=hosts) == [True] * len(hosts)


@settings(max_examples=15, deadline=None)
@given(
    hosts=st.lists(st.sampled_from("abc"), min_size=2, max_size=5),
    numels=st.lists(st.integers(0, 70_000), min_size=1, max_size=5),
)
def test_arena_sums_in_place_whatever_the_hosts(hosts: list[str], numels: list[int]) -> None:
    """Several posts in flight, several rounds, the memory private again after each wait."""
    n = len(hosts)
    total = sum(-(-x // 16) * 16 for x in numels) * 4

    def body(group: Group) -> list[torch.Tensor]:
        arena = group.arena(max(total, 64))
        memory = arena.memory.view(torch.float32)
        kept = []
        for turn in range(3):
            start = 0
            for k, numel in enumerate(numels):
                piece = memory[start : start + numel]
                piece.copy_(values(group.rank + 10 * turn + k, numel, torch.float32))
                arena.post(piece)
                arena.progress()
                start += -(-numel // 16) * 16
            arena.wait()
            kept.append(memory.clone())
            memory.fill_(float("nan"))  # nobody may still be reading this
        return kept

    results = together(n, body, hosts=hosts)
    for turn in range(3):
        start = 0
        for k, numel in enumerate(numels):
            expected = torch.stack([values(r + 10 * turn + k, numel, torch.float32) for r in range(n)]).sum(0)
            for result in results:
                torch.testing.assert_close(result[turn][start : start + numel], expected)
                assert torch.equal(result[turn][start : start + numel], results[0][turn][start : start + numel])
            start += -(-numel // 16) * 16


@pytest.mark.parametrize("op", ["sum", "mean", "max", "min", "product"])
def test_operations(op: str) -> None:
    results = together(3, lambda g: g.all_reduce(torch.tensor([1.0, 2.0]) + g.rank, op).tolist())
    rows = torch.tensor([[1.0, 2.0], [2.0, 3.0], [3.0, 4.0]])
    want = {"sum": rows.sum(0), "mean": rows.mean(0), "max": rows.amax(0), "min": rows.amin(0)}
    want["product"] = rows.prod(0)
    assert results == [want[op].tolist()] * 3


def test_shapes_and_strides_are_the_callers() -> None:
    def body(group: Group) -> torch.Tensor:
        t = torch.arange(6.0).view(2, 3).t()
        group.all_reduce(t)
        assert not t.is_contiguous()
        return t

    assert together(2, body)[0].tolist() == [[0, 6], [2, 8], [4, 10]]


@pytest.mark.parametrize("hosts", [["a", "a", "a"], ["a", "b", "c"]])
def test_subgroup_and_messages(hosts: list[str]) -> None:
    def body(group: Group) -> tuple[float, list[float]]:
        sub = group.subgroup([0, 2])
        total = -1.0 if sub is None else sub.all_reduce(torch.tensor([group.rank + 1.0])).item()
        if sub is not None:
            assert sub.broadcast(torch.tensor([group.rank]), root=1).item() == 2
            assert [t.item() for t in sub.all_gather(torch.tensor([group.rank]))] == [0, 2]
        if group.rank == 0:
            group.send(torch.tensor([[1.5, 2.5]]), 1)
            group.send(torch.empty(0), 1)
            return total, []
        if group.rank == 1:
            got = group.recv(0)
            assert group.recv(0).numel() == 0
            return total, got.flatten().tolist()
        return total, []

    assert together(3, body, hosts=hosts) == [(4.0, []), (-1.0, [1.5, 2.5]), (4.0, [])]


@pytest.mark.parametrize("hosts", [["a", "a"], ["a", "b"], ["a", "a", "b"]])
def test_a_member_that_leaves_interrupts_the_others(hosts: list[str]) -> None:
    def body(group: Group) -> str:
        if group.rank == 1:
            raise ZeroDivisionError
        with pytest.raises(Interrupted, match="member 1"):
            for _ in range(1000):
                group.all_reduce(torch.ones(1000))
        return "told"

    with pytest.raises(ZeroDivisionError):
        together(len(hosts), body, hosts=hosts)


def test_a_member_that_never_comes_is_named() -> None:
    def body(group: Group) -> None:
        if group.rank == 1:
            import time

            time.sleep(1.5)
            return
        with pytest.raises(TimedOut, match="member 1"):
            group.all_reduce(torch.ones(3))

    together(2, body, limit_s=0.5)


def test_what_cannot_be_done_is_refused() -> None:
    group = solo()
    with pytest.raises(ConfigError, match="one member"):
        group.send(torch.ones(1), 1)
    with pytest.raises(ConfigError, match="0 to 0"):
        group.broadcast(torch.ones(1), 1)
    with pytest.raises(ConfigError, match="unknown operation 'avg'"):
        group.all_reduce(torch.ones(1), "avg")
    with pytest.raises(ConfigError, match="first dimension of 1"):
        group.reduce_scatter(torch.ones(3))


def test_arena_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where cores are to spare a thread of its own reduces while the training thread goes on posting."""
    monkeypatch.setattr("paceline.transport.group.Group._core_to_spare", lambda self, device: True)

    def body(group: Group) -> torch.Tensor:
        arena = group.arena(4 * 64 * 3)
        assert type(arena).__name__ == "Background"
        memory = arena.memory.view(torch.float32)
        for turn in range(5):
            for k in range(3):
                piece = memory[64 * k : 64 * (k + 1)]
                piece.fill_(turn + k + group.rank)
                arena.post(piece)
            arena.wait()
        return memory.clone()

    for hosts in ["a", "a", "a"], ["a", "a", "b", "b"]:
        n = len(hosts)
        for result in together(n, body, hosts=hosts):
            expected = [sum(4 + k + r for r in range(n)) for k in range(3)]
            assert result.view(3, 64)[:, 0].tolist() == expected
            assert result.view(3, 64)[:, 63].tolist() == expected


def test_reducing_a_parameter_changes_its_value_and_nothing_else():
    def body(group: Group) -> tuple[float, float]:
        p = torch.nn.Parameter(torch.tensor([1.0 + group.rank]))
        group.all_reduce(p, "mean")
        mean = float(p)
        group.all_reduce(p.detach().mul_(1 + group.rank), "max")
        with pytest.raises(ConfigError, match="convert it first"):
            group.all_reduce(torch.ones(2, dtype=torch.int64), "mean")
        return mean, float(group.all_reduce(p, "max"))

    assert together(2, body) == [(1.5, 3.0), (1.5, 3.0)]


@pytest.mark.parametrize("hosts", [["a", "b"], ["a", "a"], ["a", "a", "b"]])
@pytest.mark.parametrize("coded", [False, True])
def test_a_released_arena_leaves_nothing(hosts: list[str], coded: bool) -> None:
    def body(group: Group) -> list[int]:
        open_files, sent = [], []
        for _ in range(12):
            arena = group.arena(4096, through=(lambda collective: collective.all_reduce) if coded else None)
            arena.post(arena.memory.view(torch.float32))
            arena.wait()
            group.barrier()
            group.release(arena)
            del arena
            gc.collect()
            group.barrier()
            open_files.append(len(os.listdir("/proc/self/fd")))
            sent.append(group.sent_bytes)
            group.barrier()
        assert sent == sorted(sent)
        return open_files

    for open_files in together(len(hosts), body, hosts=hosts):
        assert open_files[-1] < open_files[0] + 6  # listing them takes one, in each thread; others may open some


def test_descriptors_may_have_large_numbers() -> None:
    """As in a process with many open files, such as a loader's."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("this machine allows too few open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    held = [os.dup(0) for _ in range(1100)]
    try:
        for hosts in (["a", "a"], ["a", "b"]):
            assert together(2, lambda g: g.all_reduce(torch.ones(3)).tolist(), hosts=hosts) == [[2.0] * 3] * 2
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("place", PLACES)
def test_a_lane_works_beside_the_group(place: str) -> None:
    """Another thread scatters sums while this one gathers."""
    hosts = PLACES[place]
    n = len(hosts)

    def body(group: Group) -> bool:
        lane, mine = group.lane(), values(group.rank, 64 * n, torch.float32)
        own, before = torch.empty(64), group.sent_bytes
        beside = threading.Thread(target=lambda: lane.reduce_scatter(mine.clone(), own))
        beside.start()
        part, whole = values(group.rank, 300, torch.float32), torch.empty(300 * n)
        whole[300 * group.rank :][:300] = part
        group.all_gather_into(whole[300 * group.rank :][:300], whole)
        beside.join(20.0)
        total = torch.stack([values(r, 64 * n, torch.float32) for r in range(n)]).sum(0)
        torch.testing.assert_close(own, total[64 * group.rank :][:64])
        assert group.sent_bytes > before
        return torch.equal(whole, torch.cat([values(r, 300, torch.float32) for r in range(n)]))

    assert together(n, body, hosts=hosts) == [True] * n
