"""Servers and workers over real sockets and shared memory; what is malformed ends one connection and nothing else."""

from __future__ import annotations

import contextlib
import functools
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec
import pytest
import torch

from paceline.core.errors import ConfigError, Interrupted, PacelineError, TimedOut
from paceline.server import messages as m
from paceline.server import service as service_module
from paceline.server import session as session_module
from paceline.server.client import Client, Table
from paceline.server.connection import Connection, pair
from paceline.server.placement import Tensor
from paceline.server.placement import place as place_tensors
from paceline.server.service import Service
from paceline.server.stock import optimizer_class
from paceline.transport.channel import Channel

T = TypeVar("T")
SHAPES = [(300, 700), (7,), (50, 3), ()]
SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}


class Place:
    """Servers and the connections of some workers."""

    def __init__(self, workers: int, servers: int = 1, *, shared: bool = False) -> None:
        self.services = [Service(limit_s=60) for _ in range(servers)]
        self.clients = [self.join(rank, shared=shared) for rank in range(workers)]

    def join(self, rank: int, *, shared: bool = False) -> Client:
        ends = [pair(rank, shared=shared) for _ in self.services]
        for service, (theirs, _) in zip(self.services, ends):
            service.attach(theirs)
        return Client(rank, [mine for _, mine in ends], limit_s=60)

    def close(self) -> None:
        for client in self.clients:
            client.close()
        for service in self.services:
            service.close()


@contextlib.contextmanager
def place(workers: int, servers: int = 1, *, shared: bool = False) -> Iterator[Place]:
    made = Place(workers, servers, shared=shared)
    try:
        yield made
    finally:
        made.close()


def weights() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def opened(
    client: Client, gate: str, options: dict[str, Any] = SGD, optimizer: str = "SGD", correct: str = ""
) -> Table:
    tensors = [Tensor(f"p{i}", shape, "float32", 0) for i, shape in enumerate(SHAPES)]
    rule = m.Rule(optimizer=optimizer, groups=[options], gate=gate, correct=correct)
    return client.open(list(zip(tensors, weights())), rule)


def at_once(*bodies: Callable[[], T]) -> list[T]:
    """What the bodies return, each run by a thread; the first failure is raised."""
    results: dict[int, T] = {}
    failures: list[BaseException] = []

    def run(i: int) -> None:
        try:
            results[i] = bodies[i]()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    if failures:
        raise failures[0]
    assert len(results) == len(bodies), "somebody hangs"
    return [results[i] for i in range(len(bodies))]


def parameters(table: Table) -> list[torch.Tensor]:
    return [slot.parameter for slot in table.slots]


def test_a_server_without_a_piece_is_left_alone() -> None:
    with place(1, servers=3) as here:
        rule = m.Rule(optimizer="SGD", groups=[{"lr": 1.0}], gate="sync")
        table = here.clients[0].open([(Tensor("p", (3,), "float32", 0), torch.zeros(3))], rule)
        table.store()
        for _ in range(3):
            table.push([torch.ones(3)], [{"lr": 1.0}])
        assert parameters(table)[0].tolist() == [-3.0] * 3


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adafactor", "paceline.Adagrad"])
@pytest.mark.parametrize("shared", [True, False], ids=["memory", "socket"])
@pytest.mark.parametrize("servers", [1, 3])
def test_one_worker_gets_what_torch_gives_bit_for_bit(servers: int, shared: bool, optimizer: str) -> None:
    options = SGD if optimizer == "SGD" else {"lr": 0.01}
    if "Adagrad" in optimizer:
        options = options | {"initial_accumulator_value": 0.1}
    kind = optimizer_class(optimizer)
    mine = [torch.nn.Parameter(w.clone()) for w in weights()]
    plain = kind(mine, **options)
    with place(1, servers, shared=shared) as here:
        client = here.clients[0]
        tensors = [Tensor(f"p{i}", shape, "float32", 0) for i, shape in enumerate(SHAPES)]
        group = {k: v for k, v in plain.param_groups[0].items() if k != "params"}
        rule = m.Rule(optimizer=optimizer, groups=[group], gate="sync")
        table = client.open(list(zip(tensors, weights())), rule, cut=optimizer != "Adafactor")
        table.store()
        for step in range(4):
            gradients = [torch.sin(p.detach() * (step + 1)) for p in mine]
            for p, gradient in zip(mine, gradients):
                p.grad = gradient.clone()
            plain.step()
            table.push(gradients, [group])
            assert all(torch.equal(a, b) for a, b in zip(mine, parameters(table)))
        states = table.state()
        for p, state in zip(mine, states):
            expected = plain.state[p]
            assert state.keys() == expected.keys()
            for key, value in expected.items():
                assert torch.equal(torch.as_tensor(state[key]), torch.as_tensor(value)), key


@pytest.mark.parametrize("shared", [True, False], ids=["memory", "socket"])
@pytest.mark.parametrize("servers", [1, 2])
def test_sync_is_the_mean_and_the_same_for_all(servers: int, shared: bool) -> None:
    mine = [torch.nn.Parameter(w.clone()) for w in weights()]
    plain = torch.optim.SGD(mine, **SGD)
    with place(3, servers, shared=shared) as here:
        tables = at_once(*(lambda c=c: opened(c, "sync") for c in here.clients))
        tables[0].store()
        for table in tables[1:]:
            table.pull()
        for step in range(3):
            gradients = [[torch.cos(p.detach() + rank + step) for p in mine] for rank in range(3)]
            at_once(*(lambda t=t, g=g: t.push(g, [SGD]) for t, g in zip(tables, gradients)))
            for p, *each in zip(mine, *gradients):
                p.grad = torch.stack(each).mean(0)
            plain.step()
        for table in tables:
            assert all(torch.equal(a, b) for a, b in zip(parameters(tables[0]), parameters(table)))
        for a, b in zip(mine, parameters(tables[0])):
            torch.testing.assert_close(a.detach(), b)


def test_state_goes_to_another_number_of_servers_and_back() -> None:
    with place(1, 1) as here, place(1, 3) as there:
        first, second = opened(here.clients[0], "async"), opened(there.clients[0], "async")
        first.store()
        for step in range(3):
            first.push([torch.sin(p + step) for p in parameters(first)], [SGD])
        for ours, theirs in zip(parameters(second), parameters(first)):
            ours.copy_(theirs)
        second.store()
        second.store_state(first.state())
        for table in (first, second):
            table.push([torch.cos(w) for w in weights()], [SGD])
        assert all(torch.equal(a, b) for a, b in zip(parameters(first), parameters(second)))


@pytest.mark.parametrize("gate", ["async", "bounded(staleness=2)"])
@pytest.mark.parametrize("shared", [True, False], ids=["memory", "socket"])
def test_a_lost_worker_stops_nobody(gate: str, shared: bool) -> None:
    with place(3, 2, shared=shared) as here:
        tables = at_once(*(lambda c=c: opened(c, gate) for c in here.clients))
        tables[0].store()
        lost = here.clients.pop(1)
        for port in lost.ports:
            port._channel.close()
        steps = at_once(*(lambda t=t: _steps(t, 20) for t in (tables[0], tables[2])))
        assert steps == [20, 20]
        assert [service.readings()["applied"] for service in here.services] == [40.0, 40.0]


def test_a_lost_worker_ends_a_sync_run_by_name() -> None:
    with place(2, 1) as here:
        tables = at_once(*(lambda c=c: opened(c, "sync") for c in here.clients))
        lost = here.clients.pop(1)
        for port in lost.ports:
            port._channel.close()
        with pytest.raises(Interrupted, match=r"member 1 left the run"):
            tables[0].push(weights(), [SGD])


def test_a_worker_may_come_late_and_leave_early() -> None:
    with place(2, 1) as here:
        tables = at_once(*(lambda c=c: opened(c, "bounded(staleness=1)") for c in here.clients))
        tables[0].store()
        at_once(*(lambda t=t: _steps(t, 5) for t in tables))
        late = here.join(2)
        here.clients.append(late)
        table = opened(late, "bounded(staleness=1)")
        table.pull()
        assert table.step == 5
        here.clients.pop(0).close()
        at_once(lambda: _steps(table, 4), lambda: _steps(tables[1], 4))


def test_the_gate_changes_between_epochs() -> None:
    with place(2, 1) as here:
        tables = at_once(*(lambda c=c: opened(c, "async") for c in here.clients))
        tables[0].store()
        _steps(tables[0], 5)  # nobody waits
        tables[0].turn("sync")
        for table in tables:
            table.pull()
        at_once(*(lambda t=t: _steps(t, 3) for t in tables))
        assert all(torch.equal(a, b) for a, b in zip(parameters(tables[0]), parameters(tables[1])))


@pytest.mark.parametrize("gate", ["sync", "sync(backups=1)"])
def test_rounds_keep_more_chunks_than_are_received_ahead(gate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after the gate has turned to them."""
    monkeypatch.setattr("paceline.server.placement.CHUNK_BYTES", 64 << 10)
    monkeypatch.setattr(service_module, "place", functools.partial(place_tensors, chunk_bytes=64 << 10))
    monkeypatch.setattr("paceline.server.client.place", functools.partial(place_tensors, chunk_bytes=64 << 10))
    with place(2, 1) as here:
        tables = at_once(*(lambda c=c: opened(c, "async") for c in here.clients))
        tables[0].store()
        assert len(here.services[0].tables[0].chunks) > 8
        tables[0].turn(gate)
        for table in tables:
            table.pull()
        if gate == "sync":
            at_once(*(lambda t=t: _steps(t, 3) for t in tables))
        else:
            assert _steps(tables[1], 3) == 3  # the other is a backup


def test_a_gradient_that_is_not_finite_never_leaves_its_worker() -> None:
    with place(1, 2) as here:
        table = opened(here.clients[0], "async")
        table.store()
        before = [w.clone() for w in parameters(table)]
        bad = weights()
        bad[2][3, 1] = float("nan")
        with pytest.raises(PacelineError, match=r"gradient of 'p2' is not finite on member 0"):
            table.push(bad, [SGD])
        table.pull()
        assert all(torch.equal(a, b) for a, b in zip(before, parameters(table)))
        _steps(table, 1)


def test_members_that_differ_are_told_how() -> None:
    with place(2, 1) as here:
        opened(here.clients[0], "async")
        with pytest.raises(ConfigError, match="trained by"):
            opened(here.clients[1], "sync")
        here.clients.append(here.join(2))
        tensors = [Tensor(f"p{i}", (*shape, 2), "float32", 0) for i, shape in enumerate(SHAPES)]
        rule = m.Rule(optimizer="SGD", groups=[SGD], gate="async")
        with pytest.raises(ConfigError, match=r"parameter 'p0' \[300, 700, 2\]"):
            here.clients[2].open([(t, torch.zeros(t.shape)) for t in tensors], rule)


def test_only_optimizers_of_torch_are_looked_up() -> None:
    with place(1, 1) as here, pytest.raises(ConfigError, match="no optimizer of torch"):
        opened(here.clients[0], "async", optimizer="lr_scheduler")


class Raw:
    """A worker that says what it likes."""

    def __init__(self, service: Service, rank: int = 9) -> None:
        mine, theirs = socket.socketpair()
        self.channel = Channel(mine, "the server")
        service.attach(Connection(rank, Channel(theirs, f"member {rank}"), None))

    def say(self, message: Any, body: bytes = b"") -> None:
        self.channel.send(message if isinstance(message, bytes) else msgspec.msgpack.encode(message))
        if body:
            self.channel.send_raw(memoryview(body))

    def answer(self) -> m.ToWorker:
        return m.decode_to_worker(self.channel.recv(5.0))

    def refusal(self) -> str:
        while not isinstance(answer := self.answer(), m.Refused):
            assert not isinstance(answer, m.Weights)
        return answer.message


OPEN = m.Open(
    rank=9,
    table=0,
    tensors=(Tensor("p0", (64,), "float32", 0),),
    servers=1,
    server=0,
    cut=True,
    rule=m.Rule(optimizer="SGD", groups=[SGD], gate="async"),
    shared=False,
)
PUSH = m.Push(table=0, view=1, step=1, read=0, weight=1.0, groups=[SGD])


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ([b"\xc1 nonsense"], "cannot be read"),
        ([msgspec.structs.replace(OPEN, protocol=0)], "speaks protocol 0, the server 6"),
        ([{"type": "open", "protocol": 99, "what": "ever"}], "speaks protocol 99, the server 6"),
        ([msgspec.structs.replace(OPEN, rank=3)], "as member 3"),
        ([msgspec.structs.replace(OPEN, server=4, table=3)], "no server 4 among 1"),
        ([PUSH], "table 0, which it has not opened"),
        ([OPEN, msgspec.structs.replace(PUSH, table=7)], "table 7"),
        ([OPEN, msgspec.structs.replace(PUSH, view=3), m.Part(chunk=0, nbytes=256)], "view 3"),
        ([OPEN, PUSH, m.Part(chunk=1, nbytes=256)], "pushed no part 0"),
        ([OPEN, PUSH, m.Part(chunk=0, nbytes=1 << 40)], "announced"),
        ([OPEN, PUSH, m.Part(chunk=0, nbytes=256, missing=(5,))], "leaves out pieces"),
        ([OPEN, m.Part(chunk=0, nbytes=256)], "out of turn"),
        ([OPEN, m.Store(table=0, chunk=9, nbytes=4)], "stores chunk 9"),
        ([OPEN, m.Store(table=0, chunk=0, nbytes=1 << 50)], "stores"),
        ([OPEN, m.Turn(0, "whenever")], "unknown gate"),
    ],
)
def test_what_does_not_fit_is_refused_by_name_and_the_server_lives_on(said: list[Any], message: str) -> None:
    with place(1, 1) as here:
        table = opened(here.clients[0], "async") if said[0] is not OPEN else None
        raw = Raw(here.services[0])
        for each in said:
            raw.say(each)
        if message == "view 3":
            raw.channel.send_raw(memoryview(bytes(256)))
        assert message in raw.refusal()
        raw.channel.close()
        if table is not None:
            table.store()
            _steps(table, 2)


def test_a_push_of_numbers_that_are_not_finite_is_refused() -> None:
    with place(0, 1) as here:
        raw = Raw(here.services[0])
        raw.say(OPEN)
        raw.say(PUSH)
        raw.say(m.Part(chunk=0, nbytes=256), torch.full((64,), float("nan")).numpy().tobytes())
        assert "not finite, in parameter 'p0'" in raw.refusal()
        assert not here.services[0].tables[0].block.data.any()


def test_a_fault_of_the_servers_own_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no more of this")

    with place(2, 1) as here:
        tables = at_once(*(lambda c=c: opened(c, "async") for c in here.clients))
        shard = here.services[0].tables[0].shard
        with monkeypatch.context() as patch:
            patch.setattr(shard, "begin", fails)
            with pytest.raises(Interrupted, match=r"the server failed: RuntimeError.*no more of this"):
                _steps(tables[0], 1)
        _steps(tables[1], 2)


def test_fuzzed_frames_harm_nobody_else() -> None:
    generator = random.Random(3)
    good = [m.encode(x) for x in (OPEN, PUSH, m.Part(chunk=0, nbytes=256), m.Pull(0), m.Rest(0), m.Turn(0, "sync"))]
    with place(1, 1) as here:
        table = opened(here.clients[0], "async")
        table.store()
        for _ in range(60):
            raw = Raw(here.services[0], rank=generator.randrange(50, 60))
            with contextlib.suppress(PacelineError):
                for _ in range(generator.randrange(1, 6)):
                    frame = bytearray(generator.choice(good))
                    for _ in range(generator.randrange(0, 4)):
                        frame[generator.randrange(len(frame))] = generator.randrange(256)
                    raw.say(bytes(frame[: generator.randrange(1, len(frame) + 1)]))
            raw.channel.close()
        before = here.services[0].readings()["applied"]
        _steps(table, 3)
        assert here.services[0].readings()["applied"] - before == 3


def test_memory_of_a_server_stays_bounded_under_a_fast_pusher(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that never waits for weights, and a shard that does not get on."""
    made: list[int] = []

    class Counted(session_module.Buffers):
        def take(self, nbytes: int, allowed: int, wanted: Callable[[], bool]) -> torch.Tensor:
            buffer = super().take(nbytes, allowed, wanted)
            made.append(self._made)
            return buffer

    monkeypatch.setattr(session_module, "Buffers", Counted)
    many = Tensor("p0", (100, 65536), "float32", 0)
    with place(0, 1) as here:
        raw = Raw(here.services[0])
        raw.say(msgspec.structs.replace(OPEN, tensors=(many,)))
        assert isinstance(raw.answer(), m.Opened)
        hold = threading.Event()
        taken = threading.Event()

        def stand_still() -> None:
            with here.services[0]._shards:
                taken.set()
                hold.wait(5)

        threading.Thread(target=stand_still, daemon=True).start()
        taken.wait(5)
        chunks = here.services[0].tables[0].chunks
        raw.channel.send_limit_s = 0.5
        raw.say(PUSH)
        with pytest.raises(PacelineError):
            for index, chunk in enumerate(chunks):
                raw.say(m.Part(chunk=index, nbytes=chunk.nbytes), bytes(chunk.nbytes))
        hold.set()
        assert len(chunks) > 6
        assert max(made, default=0) <= 4


def test_a_worker_that_takes_no_weights_does_not_hold_up_the_others() -> None:
    with place(1, 1) as here:
        table = opened(here.clients[0], "async")
        table.store()
        raw = Raw(here.services[0])
        raw.say(msgspec.structs.replace(OPEN, table=5))
        raw.channel.send_limit_s = 0.5
        with contextlib.suppress(PacelineError):  # the server reads no more of it
            for _ in range(100_000):
                raw.say(m.Pull(5))
        began = time.monotonic()
        _steps(table, 5)
        assert time.monotonic() - began < 10
        raw.channel.close()


def test_to_other_hosts_weights_go_out_while_chunks_come_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that takes no weights is read from no further than a few chunks, and gets all of them in the end."""
    monkeypatch.setattr(Channel, "encrypted", property(lambda channel: True))
    many = Tensor("p0", (40, 1 << 18), "float32", 0)
    with place(0, 1) as here:
        raw = Raw(here.services[0])
        raw.say(msgspec.structs.replace(OPEN, tensors=(many,)))
        assert isinstance(raw.answer(), m.Opened)
        chunks = here.services[0].tables[0].chunks
        session = here.services[0].session(9)
        assert session is not None
        most, sent = 0, threading.Event()

        def push() -> None:
            raw.say(PUSH)
            for index, chunk in enumerate(chunks):
                raw.say(m.Part(chunk=index, nbytes=chunk.nbytes), bytes(chunk.nbytes))
            sent.set()

        threading.Thread(target=push, daemon=True).start()
        for _ in range(50):
            time.sleep(0.01)
            most = max(most, len(session._out))
        assert len(chunks) > 8
        assert not sent.is_set()  # held back
        assert 0 < most <= 5
        for index in range(len(chunks)):
            answer = raw.answer()
            assert isinstance(answer, m.Weights)
            assert answer.chunk == index
            raw.channel.recv_raw_into(memoryview(bytearray(answer.nbytes)), 5.0)
        assert sent.wait(5)


@pytest.mark.parametrize("gate", ["sync", "async"])
def test_weights_are_the_same_by_either_thread(gate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "place", functools.partial(place_tensors, chunk_bytes=64 << 10))
    monkeypatch.setattr("paceline.server.client.place", functools.partial(place_tensors, chunk_bytes=64 << 10))
    found = []
    for encrypted in False, True:
        monkeypatch.setattr(Channel, "encrypted", property(lambda channel, encrypted=encrypted: encrypted))
        with place(1, 2) as here:
            table = opened(here.clients[0], gate)
            table.store()
            _steps(table, 6)
            found.append(torch.cat([p.flatten() for p in parameters(table)]))
    assert torch.equal(*found)


def _steps(table: Table, count: int) -> int:
    for _ in range(count):
        table.push([torch.ones(shape) * 0.01 for shape in SHAPES], [SGD])
    return count


def test_a_wait_for_others_has_a_limit() -> None:
    with place(1, 1) as here:
        client = here.join(1)
        client.limit_s = 0.3
        here.clients.append(client)
        tables = at_once(*(lambda c=c: opened(c, "sync") for c in here.clients))
        with pytest.raises(TimedOut, match=r"no weights came within 0\.3 s"):
            _steps(tables[1], 1)
