"""Pushes name the batches that they were made of, which are done when all servers have them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.trained import Work
from paceline.data.partition import Strided
from paceline.data.sampler import Sampler
from paceline.server import messages as m
from paceline.server.client import Client
from paceline.server.connection import Connection, pair
from paceline.server.counting import Batch
from paceline.server.dealing import Dealer, Dealing
from paceline.server.lasts import Begun, Lasts
from paceline.server.lasts import told as in_words
from paceline.server.placement import Tensor, place
from paceline.server.service import Service
from paceline.server.shard import Shard
from paceline.server.stock import room
from paceline.testing.together import together
from paceline.transport.group import Group

SGD = {"lr": 0.1}
TENSORS = [Tensor(f"p{i}", (40, 10), "float32", 0) for i in range(4)]


class Book:
    """What was settled, by rank."""

    def __init__(self) -> None:
        self.settled: list[tuple[int, dict[str, tuple[int, ...]]]] = []
        self.left: list[int] = []

    def settle(self, rank: int, leases: Mapping[str, Sequence[int]]) -> None:
        self.settled.append((rank, {course: tuple(numbers) for course, numbers in leases.items()}))


def served(servers: int) -> tuple[list[Service], list[Book], Client]:
    services, books, ends = [Service(limit_s=10) for _ in range(servers)], [], []
    for service in services:
        books.append(Book())
        service.settle, service.left = books[-1].settle, books[-1].left.append
        theirs, mine = pair(0, shared=False)
        service.attach(theirs)
        ends.append(mine)
    return services, books, Client(0, ends, limit_s=10)


@pytest.mark.parametrize("said", [True, False])
def test_what_a_lost_worker_has_done_is_known_to_the_first_server(said: bool) -> None:
    services, _, client = served(2)
    lost: list[tuple[int, int, Work]] = []
    for number, service in enumerate(services):
        service.lost = lambda rank, work, number=number: lost.append((number, rank, work))  # type: ignore[misc]
    table = client.open(
        [(t, torch.zeros(t.shape)) for t in TENSORS], m.Rule(optimizer="SGD", groups=[SGD], gate="async")
    )
    table.store()
    for samples in (8.0, 8.0, 3.0):
        table.push([torch.ones(t.shape) for t in TENSORS], [SGD], samples=samples)
    client.close(said=said)
    assert all(service.wait(5) for service in services)
    expected = [] if said else [(0, 0, Work(samples=19.0, pushes=3)), (1, 0, Work(samples=0.0, pushes=3))]
    assert sorted(lost, key=lambda each: each[0]) == expected
    for service in services:
        service.close()


@pytest.mark.parametrize("servers", [1, 3])
def test_all_servers_know_the_batches_of_a_push(servers: int) -> None:
    services, books, client = served(servers)
    rule = m.Rule(optimizer="SGD", groups=[SGD], gate="async")
    table = client.open([(t, torch.zeros(t.shape)) for t in TENSORS], rule)
    table.store()
    gradients = [torch.ones(t.shape) for t in TENSORS]
    table.push(gradients, [SGD], leases={"0/5/1": [3, 4]})
    table.push(gradients, [SGD])
    table.push(gradients, [SGD], leases={"0/5/1": [7], "1/5/1": [0]})
    client.close()
    assert all(service.wait(5) for service in services)
    assert [book.settled for book in books] == [[(0, {"0/5/1": (3, 4)}), (0, {"0/5/1": (7,), "1/5/1": (0,)})]] * servers
    assert [book.left for book in books] == [[0]] * servers
    for service in services:
        service.close()


def test_a_server_that_is_gone_holds_up_nobody() -> None:
    services, _, client = served(2)
    rule = m.Rule(optimizer="SGD", groups=[SGD], gate="async")
    table = client.open([(t, torch.zeros(t.shape)) for t in TENSORS], rule)
    table.store()
    services[0].close()
    began = time.monotonic()
    for _ in range(2):  # while it goes, and when it is known to be gone
        with pytest.raises(m.Interrupted):
            table.push([torch.ones(t.shape) for t in TENSORS], [SGD], leases={"x": [1]})
    assert time.monotonic() - began < 8
    client.close(said=False)
    services[1].close()


@settings(deadline=None)
@given(data=st.data(), gate=st.sampled_from(["async", "bounded(staleness=1)", "sync(backups=1)", "sync"]))
def test_what_has_changed_a_weight_is_settled_and_what_is_settled_is_taken(data: st.DataObject, gate: str) -> None:
    """Workers push in any interleaving of chunks and may die anywhere."""
    placement = place([Tensor(f"p{i}", (8,), "float32", 0) for i in range(3)], 1, chunk_bytes=32)
    rule = m.Rule(optimizer="SGD", groups=[SGD], gate=gate, correct="drop(1)" if "sync" not in gate else "")
    settled: list[int] = []
    shard = Shard(
        placement,
        0,
        rule,
        torch.zeros(room(placement.of(0)), dtype=torch.uint8),
        lambda rank, chunk: None,
        settle=lambda rank, push: settled.extend(push.leases["x"]),
    )
    chunks = len(shard.chunks)
    assert chunks == 3
    here = list(range(3))
    for rank in here:
        shard.join(rank)
    parts = dict.fromkeys(here, chunks)  # of the push under way that were sent
    steps, number, of = dict.fromkeys(here, 0), 0, dict[int, int]()
    sent: dict[int, int] = {}  # by batch: chunks
    for _ in range(data.draw(st.integers(0, 40))):
        rank = data.draw(st.sampled_from(here))
        if len(here) > 1 and gate != "sync" and data.draw(st.integers(0, 9)) == 0:
            shard.leave(rank)
            here.remove(rank)
            continue
        if parts[rank] == chunks:
            if rank in shard._under:
                continue  # its round is not over
            number, steps[rank], parts[rank], of[rank] = number + 1, steps[rank] + 1, 0, number
            push = m.Push(
                table=0,
                view=1,
                step=steps[rank],
                read=shard.named_version(rank),
                weight=1.0,
                groups=[SGD],
                round=shard.round,
                leases={"x": (number - 1,)},
            )
            shard.begin(rank, push)
            sent[of[rank]] = 0
        else:
            shard.part(rank, parts[rank], torch.ones(8))
            parts[rank] += 1
            sent[of[rank]] += 1
        need = chunks if gate == "sync" else 1
        due = [batch for batch, count in sent.items() if count >= need]
        assert sorted(settled) == ([] if "backups" in gate else due)  # rounds with backups: when they are closed


def test_a_lost_workers_batches_wait_for_its_last_push() -> None:
    """The word that it is gone may come before what it has pushed."""
    gone, pushed = threading.Event(), threading.Event()

    def member(group: Group) -> list[int | None]:
        wires = group._wires
        assert wires is not None
        if wires.rank == 2:
            dealing = Dealing(wires, range(2), pushes=True)
            gone.wait(10)
            time.sleep(0.2)  # the dealer has hung up, and the batches are not dealt again
            assert dealing._courses["x"].parts()[0].returned == 0
            dealing.settle(0, {"x": [0], "unknown": [1]})
            dealing.left(0)
            pushed.wait(10)
            dealing.close()
            return []
        dealer = Dealer(wires, 2)
        take: Callable[[], int | None] = lambda: dealer.take("x", 3, wait=True, waits=lambda: None)  # noqa: E731
        if wires.rank == 0:
            mine = [take(), take()]
            dealer.close()
            gone.set()
            return mine
        gone.wait(10)
        mine = []
        while (number := take()) is not None:
            mine.append(number)
            dealer.done("x", [number])
        pushed.set()
        return mine

    lost, other, _ = together(3, member)
    assert lost == [0, 1]
    assert sorted(n for n in other if n is not None) == [1, 2]


class Deals:
    """A dealer with so many batches."""

    deals = True

    def __init__(self, total: int) -> None:
        self.numbers, self.told = iter(range(total)), list[int]()

    def take(self, course: str, total: int, *, wait: bool, waits: Callable[[], None], bound: object = ()) -> int | None:
        number = next(self.numbers, None)
        if number is None:
            waits()
        return number

    def done(self, course: str, numbers: Sequence[int]) -> None:
        self.told += numbers

    def named(self, course: str) -> str:
        return f"0/{course}"

    def rest(self) -> None: ...


def test_gradients_that_are_kept_settle_their_batches_with_the_push_that_has_them() -> None:
    deals = Deals(5)
    sampler = Sampler(length=10, partition=Strided(), shuffle=False, batch_size=2, rank=0, size=1)
    course = sampler.dealt(7, 0, deals)
    turns = course.turns()

    def draw(*, owed: bool) -> bool:
        course.asked(owed=owed)
        if next(turns, None) is None:
            course.end()
            return False
        course.done += 1
        return True

    assert draw(owed=False)
    assert course.leases() == {"0/7/0": (0,)}
    assert draw(owed=True)
    assert draw(owed=True)
    assert deals.told == []
    assert course.leases() == {"0/7/0": (0, 1, 2)}  # what the next push is made of
    assert draw(owed=False)  # after that push
    assert deals.told == [0, 1, 2]
    done = course.hold()  # a thread trains it, whoever asks
    assert course.leases() == {}
    assert draw(owed=False)
    assert deals.told == [0, 1, 2]
    done()
    assert not draw(owed=True)  # the window is open at the end: nobody is to wait for it
    assert deals.told == [0, 1, 2, 3, 4]
    assert course.leases() == {}


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ([(7, 7), (7, 7)], None),
        ([(0, 0), (0, 0)], None),
        ([(7, 7), (7, 6)], "push 7: server 1 has only a part of it; the rest stays applied"),
        ([(7, 6), (6, 6)], "push 7: server 1 has none of it, server 0 has only a part of it; the rest stays applied"),
        ([(6, 6), (7, 7)], "server 0 has none of it; the rest stays applied"),
    ],
)
def test_a_push_that_is_only_partly_there_is_told(told: list[tuple[int, int]], words: str | None) -> None:
    for again in (False, True):  # what can be dealt again is not told
        accounts = {
            server: m.Account(1, 5, (m.Last(table=0, begun=begun, whole=whole, again=again),))
            for server, (begun, whole) in enumerate(told)
        }
        lasts = Lasts(2)
        assert lasts.hear(0, accounts[0]) is None
        assert lasts.hear(1, m.Account(1, 6)) is None  # of another life
        assert lasts.hear(1, accounts[1]) == accounts
        said = in_words(accounts)
        assert len(said) == (words is not None and not again)
        assert all((words or "") in each for each in said)


def test_a_worker_that_dies_within_a_push_leaves_its_batch_to_another(capfd: pytest.CaptureFixture[str]) -> None:
    service = Service(limit_s=10)
    book = Book()
    service.settle, service.left = book.settle, book.left.append
    torn: list[tuple[int, Mapping[Batch, Begun]]] = []
    service.torn = lambda rank, begun: torn.append((rank, begun))
    theirs, mine = pair(3, shared=False)
    service.attach(theirs)
    tensors = (Tensor("p0", (2 << 20,), "float32", 0),)
    wish = m.Open(
        rank=3,
        table=0,
        tensors=tensors,
        servers=1,
        server=0,
        cut=True,
        rule=m.Rule(optimizer="SGD", groups=[SGD], gate="async"),
        shared=False,
    )
    push = m.Push(table=0, view=1, step=1, read=0, weight=1.0, groups=[SGD], leases={"x": (4,)}, samples=8.0)
    nbytes = place(tensors, 1).chunks[0].nbytes
    _say(mine, wish)
    _say(mine, push)
    assert book.settled == []
    _say(mine, m.Part(chunk=0, nbytes=nbytes))
    mine.channel.send_raw(memoryview(bytes(nbytes)))
    mine.close()
    assert service.wait(5)
    assert (book.settled, book.left) == ([], [3])
    assert torn == [(3, {("x", 4): Begun({(0, 0): 1}, 8.0)})]
    assert service.readings()["halves"] == 0
    assert capfd.readouterr().err == ""
    service.close()


def _say(connection: Connection, message: m.ToServer) -> None:
    connection.channel.send(msgspec.msgpack.encode(message))
