"""The ring: right sums of anything, the same bits everywhere, the cheaper way taken, faults that name their member."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.core.errors import ConfigError, Interrupted, TimedOut
from paceline.core.view import Member, View
from paceline.testing.hosts import Hosts
from paceline.transport.channel import Listener
from paceline.transport.link import Link
from paceline.transport.mesh import Mesh
from paceline.transport.ring import Ring
from paceline.transport.sender import Sender

T = TypeVar("T")
TOKEN = "a token of this run"
AROUND = Link(latency_s=0.0, bytes_per_s=1e9, piece_bytes=64)  # makes the ring cheaper, in many pieces
FEW_STEPS = Link(latency_s=1.0, bytes_per_s=1e15, piece_bytes=64)  # makes doubling and the tree cheaper
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
OTHERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64]


class Members:
    """Members as threads of this process, each with its own listener, mesh and ring."""

    def __init__(self, size: int, link: Link | None = AROUND, limit_s: float = 20, encrypt: bool | None = None) -> None:
        self.pool = ThreadPoolExecutor(size)
        self.listeners = [Listener(token=TOKEN, encrypt=encrypt) for _ in range(size)]
        members = [Member(rank=r, host="h", pid=1, address=x.address) for r, x in enumerate(self.listeners)]
        view = View(number=1, members=tuple(members))
        self.meshes = [Mesh(view, r, TOKEN, x, limit_s, encrypt=encrypt) for r, x in enumerate(self.listeners)]
        self.rings = list(self.pool.map(lambda m: Ring(m, range(size), "a", link=link), self.meshes))

    def run(self, work: Callable[[Ring], T]) -> list[T]:
        return list(self.pool.map(work, self.rings, timeout=60))

    def errors(self, work: Callable[[Ring], object]) -> list[Interrupted | None]:
        """What each member raised, and None where it raised nothing."""

        def attempt(ring: Ring) -> Interrupted | None:
            try:
                work(ring)
            except Interrupted as error:
                return error
            return None

        return self.run(attempt)

    def close(self) -> None:
        for each in (*self.rings, *self.meshes, *self.listeners):
            each.close()
        self.pool.shutdown()


@contextlib.contextmanager
def members(size: int, *args: object, **more: object) -> Iterator[Members]:
    made = Members(size, *args, **more)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def formed() -> Iterator[Callable[[int, Link], Members]]:
    """Rings that many tests use, made once."""
    made: dict[tuple[int, Link], Members] = {}

    def get(size: int, link: Link) -> Members:
        if (size, link) not in made:
            made[size, link] = Members(size, link)
        return made[size, link]

    yield get
    for each in made.values():
        each.close()


def values(dtype: torch.dtype, numel: int, seed: int) -> torch.Tensor:
    """Numbers of every size, and some that are none."""
    generator = torch.Generator().manual_seed(seed)
    if dtype in FLOATS or dtype.is_complex:
        flat = torch.randn(numel, generator=generator, dtype=torch.float64)
        flat *= 10.0 ** torch.randint(-3, 4, (numel,), generator=generator)
        if not dtype.is_complex:  # of complex numbers torch itself makes inf + nan j or inf + 0 j, by their place
            flat[torch.rand(numel, generator=generator) < 0.02] = math.nan
            flat[torch.rand(numel, generator=generator) < 0.02] = math.inf
        return flat.to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 100, (numel,), generator=generator).to(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def check_sum(got: torch.Tensor, parts: list[torch.Tensor]) -> None:
    """Integers exactly; floats within the rounding of as many additions, in the wide type."""
    if not got.is_floating_point() and not got.is_complex():
        exact = parts[0].clone()
        for part in parts[1:]:
            exact += part
        assert torch.equal(got, exact)
        return
    wide = torch.complex128 if got.is_complex() else torch.float64
    exact = sum((p.to(wide) for p in parts), torch.zeros_like(got, dtype=wide))
    size = sum((p.to(wide).abs() for p in parts), torch.zeros(got.shape, dtype=torch.float64))
    room = size * (len(parts) * torch.finfo(got.dtype).eps)
    finite = exact.abs() < (torch.finfo(got.dtype).max / 2)
    assert ((got.to(wide) - exact).abs() <= room)[finite].all()
    assert torch.equal(got.isnan(), exact.isnan())


any_case = {
    "size": st.integers(2, 5),
    "numel": st.one_of(st.integers(0, 40), st.integers(0, 3000)),
    "dtype": st.sampled_from(FLOATS + OTHERS),
    "link": st.sampled_from([AROUND, FEW_STEPS]),
    "seed": st.integers(0, 1000),
}
Formed = Callable[[int, Link], Members]


@settings(max_examples=120, deadline=None)
@given(**any_case)
def test_all_reduce(formed: Formed, size: int, numel: int, dtype: torch.dtype, link: Link, seed: int) -> None:
    parts = [values(dtype, numel, seed * 10 + r) for r in range(size)]
    flats = [p.clone() for p in parts]
    formed(size, link).run(lambda ring: ring.all_reduce(flats[ring.position]))
    assert all(same_bits(flat, flats[0]) for flat in flats)
    check_sum(flats[0], parts)


@settings(max_examples=40, deadline=None)
@given(**any_case)
def test_reduce_scatter(formed: Formed, size: int, numel: int, dtype: torch.dtype, link: Link, seed: int) -> None:
    parts = [values(dtype, numel * size, seed * 10 + r) for r in range(size)]
    outs = [torch.empty(numel, dtype=dtype) for _ in range(size)]
    formed(size, link).run(lambda ring: ring.reduce_scatter(parts[ring.position].clone(), outs[ring.position]))
    check_sum(torch.cat(outs), parts)


@pytest.mark.parametrize("few", [16, 0])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(**any_case)
def test_all_gather(
    formed: Formed, size: int, numel: int, dtype: torch.dtype, link: Link, seed: int,
    few: int, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Straight from member to member, and around the ring or by doubling where they are many."""
    monkeypatch.setattr("paceline.transport.ring._FEW", few)
    parts = [values(dtype, numel, seed * 10 + r) for r in range(size)]
    outs = [torch.empty(numel * size, dtype=dtype) for _ in range(size)]
    formed(size, link).run(lambda ring: ring.all_gather(parts[ring.position], outs[ring.position]))
    assert all(same_bits(out, torch.cat(parts)) for out in outs)


@settings(max_examples=40, deadline=None)
@given(**any_case)
def test_all_to_all(formed: Formed, size: int, numel: int, dtype: torch.dtype, link: Link, seed: int) -> None:
    parts = [values(dtype, numel * size, seed * 10 + r) for r in range(size)]
    outs = [torch.empty(numel * size, dtype=dtype) for _ in range(size)]
    formed(size, link).run(lambda ring: ring.all_to_all(parts[ring.position], outs[ring.position]))
    for position, out in enumerate(outs):
        assert same_bits(out, torch.cat([p.view(size, -1)[position] for p in parts]))


@settings(max_examples=40, deadline=None)
@given(root=st.integers(0, 4), **any_case)
def test_broadcast(formed: Formed, root: int, size: int, numel: int, dtype: torch.dtype, link: Link, seed: int) -> None:
    parts = [values(dtype, numel, seed * 10 + r) for r in range(size)]
    flats = [p.clone() for p in parts]
    formed(size, link).run(lambda ring: ring.broadcast(flats[ring.position], root % size))
    assert all(same_bits(flat, parts[root % size]) for flat in flats)


@pytest.mark.parametrize("link", [None, FEW_STEPS], ids=["measured", "doubling"])
@pytest.mark.parametrize("encrypt", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("size", [2, 3])
def test_more_than_the_buffers_hold(size: int, encrypt: bool, link: Link | None) -> None:
    with members(size, link, encrypt=encrypt) as run:
        parts = [torch.randn(3_000_001) for _ in range(size)]
        flats = [p.clone() for p in parts]
        run.run(lambda ring: ring.all_reduce(flats[ring.position]))
        assert all(same_bits(flat, flats[0]) for flat in flats)
        check_sum(flats[0], parts)


def test_nan_payloads_are_the_same_on_all_members(formed: Formed) -> None:
    # a + b and b + a may differ in which operand's payload they keep.
    for link in (AROUND, FEW_STEPS):
        flats = [torch.tensor([0x7FC00000 + r], dtype=torch.int32).view(torch.float32) for r in range(5)]
        formed(5, link).run(lambda ring, flats=flats: ring.all_reduce(flats[ring.position]))
        assert len({int(flat.view(torch.int32)) for flat in flats}) == 1


def test_members_in_another_order_and_a_part_of_the_view() -> None:
    with members(4) as run:
        order = [3, 0, 2]
        with ThreadPoolExecutor(3) as pool:
            rings = list(pool.map(lambda r: Ring(run.meshes[r], order, "part", link=AROUND), order))
            outs = [torch.empty(30) for _ in order]
            list(pool.map(lambda i: rings[i].all_gather(torch.full((10,), float(order[i])), outs[i]), range(3)))
        for ring, out in zip(rings, outs):
            assert out[::10].tolist() == [3.0, 0.0, 2.0]
            ring.close()


def test_many_in_a_row_with_members_at_their_own_pace() -> None:
    with members(3, None) as run:

        def work(ring: Ring) -> list[float]:
            sums = []
            for i in range(60):
                if i % 7 == ring.position:
                    time.sleep(0.002)
                flat = torch.full((1 + 500 * i,), float(ring.position + i))
                ring.all_reduce(flat)
                assert bool((flat == flat[0]).all())
                sums.append(float(flat[0]))
                flat.zero_()  # the caller may use it again at once
            return sums

        assert run.run(work) == [[3.0 + 3 * i for i in range(60)]] * 3


def test_all_is_sent_when_a_collective_returns() -> None:
    with members(2, Link(0.0, 1e9)) as run:

        def work(ring: Ring) -> float:
            flat = torch.full((5_000_000,), float(1 - ring.position))
            if ring.position == 1:
                time.sleep(0.2)  # the sender's queue fills up meanwhile
            ring.broadcast(flat, 0)
            least = float(flat.min())
            flat.zero_()
            return least

        assert run.run(work) == [1.0, 1.0]


# ---- which way, and how much is sent


def test_bytes_sent_are_those_of_a_ring() -> None:
    with members(4, Link(0.0, 1e9)) as run:
        run.run(lambda ring: ring.all_reduce(torch.ones(4)))  # opens the channels
        before = [ring.sent_bytes for ring in run.rings]
        run.run(lambda ring: ring.all_reduce(torch.ones(100_000)))
        head = 32
        for ring, start in zip(run.rings, before):
            assert ring.sent_bytes - start == 2 * 3 * 100_000 + head  # 2(n−1)/n of 400 000 bytes


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_cost_follows_the_steps_and_bytes_that_are_really_made(size: int) -> None:
    link = Link(latency_s=0.01, bytes_per_s=1e8)
    small, large = 100, 10**10
    rounds = {2: 1, 3: 3, 4: 2, 5: 4, 8: 3}[size]
    assert link.doubling_s(size, small) == pytest.approx(rounds * 0.01, rel=0.01)
    assert link.doubling_s(size, large) == pytest.approx(rounds * 100, rel=0.01)
    assert link.ring_s(size, small) == pytest.approx(2 * (size - 1) * 0.01, rel=0.01)
    assert link.ring_s(size, large) == pytest.approx(2 * (size - 1) / size * 100, rel=0.01)
    assert link.chain_s(size, large) == pytest.approx(100, rel=0.01)
    assert link.tree_s(size, small) == pytest.approx(math.ceil(math.log2(size)) * 0.01, rel=0.01)


def test_the_cheaper_way_is_taken_on_both_sides_of_the_crossing() -> None:
    link = Link(latency_s=1e-4, bytes_per_s=1e9)
    with members(4, link) as run:
        ring = run.rings[0]
        sizes = [2**i for i in range(10, 24)]
        cheaper = [min(ring.cost(n), key=ring.cost(n).get) for n in sizes]  # type: ignore[arg-type]
        crossing = cheaper.index("ring")
        assert cheaper == ["doubling"] * crossing + ["ring"] * (len(sizes) - crossing)
        assert 0 < crossing < len(sizes) - 1
        for nbytes in (1024, sizes[-1]):  # opens the channels
            run.run(lambda ring, nbytes=nbytes: ring.all_reduce(torch.ones(nbytes // 4)))
        for nbytes, expected in ((sizes[crossing - 1], "doubling"), (sizes[crossing], "ring")):
            start = ring.sent_bytes
            run.run(lambda ring, nbytes=nbytes: ring.all_reduce(torch.ones(nbytes // 4)))
            sent = ring.sent_bytes - start
            assert sent == {"doubling": 2 * (nbytes + 32), "ring": 3 * nbytes // 2 + 32}[expected]


def test_the_link_is_measured_and_agreed() -> None:
    with members(3, None) as run:
        assert len({ring.link for ring in run.rings}) == 1
        link = run.rings[0].link
        assert 1e-6 < link.latency_s < 0.1  # loopback, on a machine that may be busy
        assert 1e7 < link.bytes_per_s < 1e12


# ---- faults


def by_rank(errors: list[Interrupted | None], rank: int, kind: type[Interrupted]) -> None:
    for position, error in enumerate(errors):
        if position != rank:
            assert isinstance(error, kind), f"member {position} raised {error!r}"
            assert f"member {rank} " in str(error)


@pytest.mark.parametrize("link", [AROUND, FEW_STEPS, Link(0.0, 1e9)], ids=["pieces", "doubling", "ring"])
def test_a_member_that_closes_midway_is_named_by_all(link: Link) -> None:
    with members(4, link, limit_s=20) as run:

        def work(ring: Ring) -> None:
            for i in range(1000):
                if ring.position == 2 and i == 5:
                    run.meshes[2].close()
                ring.all_reduce(torch.ones(5000))

        start = time.monotonic()
        errors = run.errors(work)
        assert time.monotonic() - start < 5
        by_rank(errors, 2, Interrupted)
        assert "closed on this side" in str(errors[2])
        with pytest.raises(Interrupted, match="after a fault: member 2"):
            run.rings[0].all_reduce(torch.ones(1))


@pytest.mark.parametrize("way", ["ring", "mesh"])
def test_close_from_another_thread_is_the_abort(way: str) -> None:
    with members(2, Link(0.0, 1e9), limit_s=20) as run:
        run.run(lambda ring: ring.all_reduce(torch.ones(10)))
        with ThreadPoolExecutor(2) as pool:
            sending = pool.submit(run.rings[0].broadcast, torch.ones(20_000_000), 0)  # nobody takes it
            time.sleep(0.3)
            start = time.monotonic()
            {"ring": run.rings, "mesh": run.meshes}[way][0].close()  # type: ignore[attr-defined]
            with pytest.raises(Interrupted, match="broadcast: closed on this side"):
                sending.result(5)
            with pytest.raises(Interrupted, match="member 0 "):
                run.rings[1].broadcast(torch.ones(20_000_000), 0)
            with pytest.raises(Interrupted):
                run.rings[0].all_reduce(torch.ones(10))
            assert time.monotonic() - start < 3


def test_nothing_is_left_after_close() -> None:
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for encrypt in (False, True):
        with members(3, None, encrypt=encrypt) as run:
            run.run(lambda ring: ring.all_reduce(torch.ones(1_000_000)))
    deadline = time.monotonic() + 5
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.01)  # short threads of newcomers
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == files


def test_a_closed_sender_holds_nobody() -> None:
    with members(2) as run:
        channel = run.meshes[0].channel(1, "other")
        failures: list[int] = []
        sender = Sender(lambda rank, error: failures.append(rank))
        sender.post(1, channel, memoryview(bytes(64 << 20)))
        channel.close()
        sender.close()
        assert failures == [1]
        sender.post(1, channel, memoryview(bytes(1 << 20)))
        for _ in range(2):
            sender.drain()


def test_a_member_whose_process_is_gone_is_named_by_all() -> None:
    with members(4, limit_s=20) as run:
        run.run(lambda ring: ring.all_reduce(torch.ones(10)))

        def work(ring: Ring) -> None:
            if ring.position == 1:
                time.sleep(0.2)
                run.listeners[1].close()
                run.meshes[1].close()
                return
            ring.all_reduce(torch.ones(2_000_000))

        start = time.monotonic()
        errors = run.errors(work)
        assert time.monotonic() - start < 5
        by_rank(errors, 1, Interrupted)
        assert "died or closed its channels" in str(errors[0])


@pytest.mark.parametrize("link", [AROUND, FEW_STEPS], ids=["ring", "doubling"])
@pytest.mark.parametrize("numel", [100, 2_000_000])
def test_a_paused_member_is_named_by_all(link: Link, numel: int) -> None:
    link = Link(link.latency_s, link.bytes_per_s)  # whole pieces
    with members(4, link, limit_s=0.5) as run:
        run.run(lambda ring: ring.all_reduce(torch.ones(10)))

        def work(ring: Ring) -> None:
            if ring.position == 3:
                time.sleep(0.3)  # the direct neighbour need not be the first to lose patience
            if ring.position != 2:
                ring.all_reduce(torch.ones(numel))

        start = time.monotonic()
        errors = run.errors(work)
        assert time.monotonic() - start < 5
        by_rank(errors, 2, TimedOut)
        assert "did not take part for 0.5 s" in str(errors[1])


def test_a_different_collective_or_size_is_told() -> None:
    for there in (
        lambda ring: ring.all_reduce(torch.ones(11)),
        lambda ring: ring.broadcast(torch.ones(10), 0),
        lambda ring: ring.all_gather(torch.ones(5), torch.ones(10)),
    ):
        with members(2, limit_s=5) as run:

            def work(ring: Ring, there: Callable[[Ring], None] = there) -> None:
                if ring.position == 0:
                    ring.all_reduce(torch.ones(10))
                else:
                    there(ring)

            start = time.monotonic()
            errors = run.errors(work)
            assert time.monotonic() - start < 3
            assert all("same collectives in the same order" in str(error) for error in errors)


def test_members_that_wait_in_a_circle_are_told() -> None:
    with members(2, limit_s=0.5) as run:
        # Both receive, nobody sends: each holds the other for the root.
        errors = run.errors(lambda ring: ring.broadcast(torch.ones(10), 1 - ring.position))
        assert all(isinstance(error, TimedOut) and "circle" in str(error) for error in errors)


def test_bad_tensors_are_refused_before_anything_is_sent(formed: Formed) -> None:
    ring = formed(2, AROUND).rings[0]
    for bad in (torch.ones(3, 3), torch.ones(10)[::2], torch.ones(3, device="meta"), torch.tensor(1.0)):
        with pytest.raises(ConfigError, match="flat, contiguous CPU"):
            ring.all_reduce(bad)
    with pytest.raises(ConfigError, match=r"cannot add torch.float8_e4m3fn"):
        ring.all_reduce(torch.zeros(3, dtype=torch.float8_e4m3fn))
    with pytest.raises(ConfigError, match=r"10 elements of torch.float32 are not 2 shares of 4"):
        ring.reduce_scatter(torch.ones(10), torch.ones(4))
    with pytest.raises(ConfigError, match=r"root=9 is not one of the ranks \[0, 1\]"):
        ring.broadcast(torch.ones(1), 9)
    with pytest.raises(ConfigError, match="ranks="):
        Ring(formed(2, AROUND).meshes[0], [1], "b")
    formed(2, AROUND).run(lambda ring: ring.all_reduce(torch.ones(3)))


# ---- real hosts, encrypted


MEMBER = """
import os, sys, time
import torch
from paceline.core.errors import Interrupted
from paceline.core.view import Member, View
from paceline.transport.channel import Listener
from paceline.transport.mesh import Mesh
from paceline.transport.ring import Ring
from paceline.transport.sender import Sender
rank, size = int(os.environ["HOSTS_RANK"]), int(os.environ["HOSTS_SIZE"])
listener = Listener(os.environ["HOSTS_IP"], "a token", port=7000)
members = [Member(rank=r, host=str(r), pid=1, address=f"10.77.0.{r + 1}:7000") for r in range(size)]
mesh = Mesh(View(number=1, members=tuple(members)), rank, "a token", listener, 20.0)
ring = Ring(mesh, range(size), "a")
mesh.limit_s = 1.5
assert all(channel.encrypted for channel in mesh._channels.values())
print("formed", flush=True)
start = time.monotonic()
try:
    while time.monotonic() < start + 60:
        started = time.monotonic()
        ring.all_reduce(torch.ones(250_000))
except Interrupted as error:
    print(f"{time.monotonic() - started:.1f} {type(error).__name__} {error}", flush=True)
sys.stdin.readline()
"""


@pytest.mark.slow
@pytest.mark.skipif(bool(Hosts.missing()), reason=Hosts.missing())
@pytest.mark.parametrize("fault", ["killed", "stopped", "cut off"])
def test_a_fault_of_a_host_is_named_by_all_others(fault: str) -> None:
    with Hosts(4, rate="1gbit") as hosts:
        pipe = subprocess.PIPE
        programs = [
            hosts.popen(i, [sys.executable, "-c", MEMBER], stdin=pipe, stdout=pipe, text=True) for i in range(4)
        ]
        for program in programs:
            assert program.stdout.readline() == "formed\n"
        time.sleep(0.5)
        if fault == "killed":
            programs[2].kill()
        elif fault == "stopped":
            programs[2].send_signal(signal.SIGSTOP)
        else:
            hosts.cut(2)
        for i in (0, 1, 3):
            seconds, kind, *words = programs[i].stdout.readline().split()
            assert "member 2 " in " ".join(words)
            assert kind == ("Interrupted" if fault == "killed" else "TimedOut")
            assert float(seconds) < (2 if fault == "killed" else 7)
        for program in programs:
            program.stdin.close()
            program.stdout.close()
