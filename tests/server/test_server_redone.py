"""A push that only some servers have, or some chunks of one, is made again where it is missing, and nowhere else."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data.leases import Leases
from paceline.server import messages as m
from paceline.server.client import Client, Table
from paceline.server.connection import Connection, pair
from paceline.server.counting import Batch
from paceline.server.dealing import Dealer, Dealing
from paceline.server.lasts import Begun
from paceline.server.packing import Packer
from paceline.server.placement import Tensor, dtype_of, place
from paceline.server.rounds import Agreement
from paceline.server.service import Service
from paceline.strategies.held import Held
from paceline.testing.together import together
from paceline.transport.channel import Channel
from paceline.transport.group import Group

SGD: dict[str, Any] = {"lr": 1.0}
# Kinds of numbers take turns, and a chunk is of one kind: so every server has several.
TENSORS = tuple(Tensor(f"p{i}", (1100 + i,), "float64" if i % 2 else "float32", 0) for i in range(12))
COURSE = "0/7/1"


def until(true: Callable[[], object], limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Place:
    """Servers that know each other, and whoever deals with the first of them: one batch."""

    def __init__(self, servers: int, tables: int, codec: str = "") -> None:
        lines = [socket.socketpair() for _ in range(servers - 1)]
        first = Agreement(0, [Channel(here, f"server {i + 1}") for i, (here, _) in enumerate(lines)])
        others = [Agreement(i + 1, [Channel(there, "server 0")]) for i, (_, there) in enumerate(lines)]
        self.services = [Service(limit_s=10, agreement=agreement) for agreement in (first, *others)]
        self.num_tables = tables
        self.rule = m.Rule(optimizer="SGD", groups=[SGD], gate="async", codec=codec)
        self.placement = place(TENSORS, servers)
        self.leases = Leases(1)
        self.samples = 0.0  # that count, of workers that were lost
        self.left: list[int] = []
        self._torn: Mapping[Batch, Begun] = {}
        service = self.services[0]
        service.settle, service.torn, service.left = self._settle, self._tear, self._leave
        service.lost = lambda rank, work: self._count(work.samples)

    def _settle(self, rank: int, leases: Mapping[str, Sequence[int]]) -> None:
        self.leases.done(rank, leases[COURSE])

    def _tear(self, rank: int, torn: Mapping[Batch, Begun]) -> None:
        self._torn = torn

    def _leave(self, rank: int) -> None:
        back = self.leases.lost(rank, {number: begun.parts for (_, number), begun in self._torn.items()})
        self._count(-sum(self._torn[COURSE, number].samples for number in back if (COURSE, number) in self._torn))
        self._torn = {}
        self.left.append(rank)

    def _count(self, samples: float) -> None:
        self.samples += samples

    def connect(self, rank: int, life: int = 0) -> list[Connection]:
        ends = [pair(rank, shared=False) for _ in self.services]
        for service, (theirs, _) in zip(self.services, ends):
            theirs.life = life
            service.attach(theirs)
        return [mine for _, mine in ends]

    def client(self, rank: int) -> tuple[Client, list[Table]]:
        client = Client(rank, self.connect(rank), limit_s=10)
        own = [torch.zeros(t.shape, dtype=dtype_of(t.dtype)) for t in TENSORS]
        tables = [client.open(list(zip(TENSORS, own)), self.rule) for _ in range(self.num_tables)]
        return client, tables

    def weights(self, table: int) -> set[float]:
        """That any server has."""
        chunks = [chunk for service in self.services for chunk in service.tables[table].shard.stock.weights]
        return {float(value) for chunk in chunks for value in chunk.unique()}

    def close(self) -> None:
        for service in self.services:
            service.close()


@contextmanager
def placed(servers: int, tables: int = 1, codec: str = "") -> Iterator[Place]:
    here = Place(servers, tables, codec)
    try:
        client, opened = here.client(99)  # gives the weights
        for table in opened:
            table.store()
        client.close()
        until(lambda: here.left == [99])
        here.left.clear()
        yield here
    finally:
        here.close()


class Dying:
    """A worker that says what it likes, and hangs up."""

    def __init__(self, here: Place, rank: int, life: int = 0) -> None:
        self.here, self.rank = here, rank
        self.connections = here.connect(rank, life)
        for server, connection in enumerate(self.connections):
            for number in range(here.num_tables):
                wish = m.Open(
                    rank=rank,
                    table=number,
                    tensors=TENSORS,
                    servers=len(here.services),
                    server=server,
                    cut=True,
                    rule=here.rule,
                    shared=False,
                )
                connection.channel.send(m.encode(wish))
                connection.channel.recv(10)

    def push(self, table: int, parts: Sequence[int], there: Mapping[tuple[int, int], int]) -> None:
        """So many chunks to each server, of which so many have the batch already; return when they are applied."""
        for server, connection in enumerate(self.connections):
            chunks = self.here.placement.of(server)
            if not chunks:
                continue
            head = m.Push(
                table=table,
                view=1,
                step=1,
                read=0,
                weight=1.0,
                groups=[SGD],
                leases={COURSE: (0,)},
                samples=8.0 if server == table == 0 else 0.0,
            )
            connection.channel.send(m.encode(head))
            packer = Packer(self.here.rule.codec, rank=self.rank) if self.here.rule.codec else None
            for index, chunk in enumerate(chunks[: parts[server]]):
                body = torch.ones(chunk.numel, dtype=dtype_of(chunk.dtype))
                missing = tuple(range(len(chunk.pieces))) if index < there.get((table, server), 0) else ()
                sizes: tuple[int, ...] = ()
                if packer:
                    sizes, body = packer.pack(chunk, body, missing, 1)
                part = m.Part(chunk=index, nbytes=body.nbytes, missing=missing, sizes=sizes)
                connection.channel.send(m.encode(part))
                if body.numel():
                    connection.channel.send_raw(memoryview(body.view(torch.uint8).numpy().data))
                connection.channel.recv(10)
                connection.channel.recv_raw_into(memoryview(bytearray(chunk.nbytes)), 10)

    def die(self) -> None:
        for connection in self.connections:
            connection.close()


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_a_batch_counts_once_in_every_chunk_wherever_its_workers_die(data: st.DataObject) -> None:
    """Each gets the batch that the one before has left, and pushes it to one table after the other."""
    servers, tables = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    codec = data.draw(st.sampled_from(["", "cast"]))
    with placed(servers, tables, codec) as here:
        chunks = [len(here.placement.of(server)) for server in range(servers)]
        assert min(chunks) > 2
        for rank in range(data.draw(st.integers(1, 3))):
            if here.leases.take(rank) is None:
                break
            worker, there = Dying(here, rank, life=rank), here.leases.counted(0)
            for table in range(tables):
                parts = [data.draw(st.sampled_from([0, count, count - 1, 1])) for count in chunks]
                worker.push(table, parts, there)
                if parts != chunks:
                    break
            worker.die()
            until(lambda rank=rank: rank in here.left)
        client, opened = here.client(50)
        again = here.leases.take(50) is not None
        if again:
            counted = {(COURSE, 0): here.leases.counted(0)}
            gradients = [torch.ones(t.shape, dtype=dtype_of(t.dtype)) for t in TENSORS]
            for table in opened:
                table.push(gradients, [SGD], leases={COURSE: [0]}, counted=counted, samples=8.0)
        assert here.samples + 8.0 * again == 8.0
        for number in range(tables):
            assert here.weights(number) == {-1.0}
        client.close()
        until(lambda: 50 in here.left)
        assert here.leases.over
        assert not here.services[0].fault


def test_a_push_with_the_next_batch_says_that_the_last_one_is_everywhere() -> None:
    with placed(2) as here:
        settled: list[Mapping[str, Sequence[int]]] = []
        here.services[0].settle = lambda rank, leases: settled.append(leases)
        client, (table,) = here.client(0)
        gradients = [torch.ones(t.shape, dtype=dtype_of(t.dtype)) for t in TENSORS]
        table.push(gradients, [SGD], leases={COURSE: [3, 4]})
        assert settled == []
        table.push(gradients, [SGD], leases={COURSE: [4, 5]})  # of a window that another optimizer keeps open
        assert settled == [{COURSE: (3,)}]
        table.rest()
        until(lambda: len(settled) == 2)
        assert settled[1] == {COURSE: (4, 5)}
        table.push(gradients, [SGD], leases={COURSE: [6]})
        client.close()
        until(lambda: here.left == [0])
        assert settled[2:] == [{COURSE: (6,)}]


def test_the_first_server_waits_for_what_is_still_on_its_way_to_others() -> None:
    with placed(2) as here:
        here.leases.take(0)
        worker = Dying(here, 0, life=5)
        worker.push(0, [1, 1], {})
        worker.connections[0].close()
        until(lambda: here.services[0].session(0) is None)
        until(lambda: here.services[1].agreement._wanted == {(0, 5)})
        assert here.left == []
        worker.connections[1].close()
        until(lambda: here.left == [0])
        assert here.leases.take(1) == 0
        assert here.leases.counted(0) == {(0, 0): 1, (0, 1): 1}


def test_one_that_has_said_goodbye_to_some_servers_is_known_to_have_pushed() -> None:
    with placed(2) as here:
        here.leases.take(0)
        worker = Dying(here, 0)
        worker.push(0, [len(here.placement.of(server)) for server in range(2)], {})
        worker.connections[1].channel.send(m.encode(m.Leave()))
        until(lambda: here.services[1].session(0) is None)
        worker.die()
        until(lambda: here.left == [0])
        assert here.leases.over


def test_one_that_never_came_to_other_servers_has_left_nothing_there() -> None:
    with placed(3) as here:
        here.leases.take(0)
        theirs, mine = pair(0, shared=False)
        theirs.life = 8
        here.services[0].attach(theirs)
        mine.close()
        until(lambda: here.left == [0])
        assert here.leases.take(1) == 0
        assert here.leases.counted(0) == {}


def test_what_cannot_be_dealt_again_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    with placed(2) as here:
        worker = Dying(here, 3)
        head = m.Push(table=0, view=1, step=1, read=0, weight=1.0, groups=[SGD])  # of data that nobody deals
        chunk = here.placement.of(0)[0]
        worker.connections[0].channel.send(m.encode(head))
        worker.connections[0].channel.send(m.encode(m.Part(chunk=0, nbytes=chunk.nbytes)))
        worker.connections[0].channel.send_raw(memoryview(bytes(chunk.nbytes)))
        worker.connections[0].channel.recv(10)
        worker.die()
        until(lambda: here.left == [3])
        said = "member 3 was lost in the middle of its push 1: server 1 has none of it, server 0 has only a part of it"
        assert said in capfd.readouterr().err
        assert here.services[0].readings()["halves"] == 1


def test_a_batch_that_is_dealt_again_says_where_it_counts() -> None:
    again: list[tuple[int, float]] = []
    lent = threading.Event()

    def member(group: Group) -> list[Any]:
        wires = group._wires
        assert wires is not None
        if wires.rank == 2:
            dealing = Dealing(wires, range(2), pushes=True)
            dealing.again = lambda rank, samples: again.append((rank, samples))
            until(lambda: "x" in dealing._courses and not dealing._courses["x"]._kinds[""].left)
            until(lambda: dealing._ends[0] == 1)
            torn = {("x", 0): Begun({(0, 0): 3}, 8.0), ("x", 1): Begun({(0, 1): 2}, 4.0), ("y", 1): Begun({}, 2.0)}
            dealing.torn(0, torn)
            dealing.left(0)
            until(lambda: dealing._courses["x"].over)
            group.barrier()
            dealing.close()
            return []
        dealer = Dealer(wires, 2)
        take: Callable[[], int | None] = lambda: dealer.take("x", 3, wait=True, waits=lambda: None)  # noqa: E731
        if wires.rank == 0:
            assert [take(), take(), take()] == [0, 1, 2]
            lent.set()
            dealer.done("x", [0])
            dealer.close()
            group.barrier()
            return []
        lent.wait(10)
        found: list[Any] = []
        while (number := take()) is not None:
            found.append((number, dict(dealer.counted)))
            dealer.done("x", [number])
        assert dealer.counted == {}
        group.barrier()
        return found

    _, found, _ = together(3, member)
    assert found == [(1, {("x", 1): {(0, 1): 2}}), (2, {})]
    assert again == [(0, 4.0)]  # of those that had not been said to be done


def test_in_one_loss_with_another_a_batch_does_not_count_twice() -> None:
    with placed(2) as here:
        client, (table,) = here.client(0)
        counted = {(COURSE, 0): {(0, 0): 2, (0, 1): 1}}
        parameters = [slot.parameter.requires_grad_() for slot in table.slots]
        held = Held(table, torch.optim.SGD(parameters, **SGD), list(parameters), 1, None)
        for p in parameters:
            p.grad = torch.full_like(p, 7.0)  # of the last step
        assert not held.draws([(COURSE, 0)], counted, kept=False)
        assert held.draws([("1/7/1", 5)], counted, kept=True)
        for p in parameters:
            p.grad = torch.full_like(p, 11.0)
        held.redone.end()
        table.push([p.grad for p in parameters], [SGD], leases={COURSE: [0], "1/7/1": [5]}, counted=counted)
        for server, service in enumerate(here.services):
            for index, weights in enumerate(service.tables[0].shard.stock.weights):
                assert set(weights.tolist()) == {0.0 if index < counted[COURSE, 0][0, server] else -11.0}
        client.close()


@pytest.mark.parametrize("order", [[0, 1, 2], [1, 0, 2], [1, 2, 0]])
def test_among_others_in_a_push_a_batch_adds_only_what_is_missing(order: Sequence[int]) -> None:
    """Batch 0 was begun; a turn of batch n adds 10 to the n-th to every gradient."""
    with placed(2) as here:
        client, (table,) = here.client(0)
        counted = {(COURSE, 0): {(0, 0): 2, (0, 1): 1}}
        parameters = [slot.parameter.requires_grad_() for slot in table.slots]
        held = Held(table, torch.optim.SGD(parameters, **SGD), list(parameters), 1, None)
        for turn, number in enumerate(order):
            held.draws([(COURSE, number)], counted, kept=turn > 0)
            for p in parameters:
                p.grad = torch.full_like(p, 10.0**number) + (0 if p.grad is None else p.grad)
        held.redone.end()
        table.push([p.grad for p in parameters], [SGD], leases={COURSE: order}, counted=counted)
        for server, service in enumerate(here.services):
            for index, weights in enumerate(service.tables[0].shard.stock.weights):
                there = index < counted[COURSE, 0][0, server]
                assert set(weights.tolist()) == {-110.0 if there else -111.0}
        client.close()
