"""Weights that come back as codes: both sides hold the same, nothing that is unsaid gathers, and Pull is exact."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import Interrupted
from paceline.server import messages as m
from paceline.server.client import Client, Table
from paceline.server.connection import Connection, pair
from paceline.server.packing import Trace, servable
from paceline.server.placement import Tensor
from paceline.server.service import Service
from paceline.server.session import Session

SHAPES = [(60, 50), (7,), (2000,), (40, 60)]
HALF = len(SHAPES) - 1  # the last one is in half precision
SGD: dict[str, Any] = {"lr": 1.0}
EIGHT = "nonzero, back=quantize(8)"  # pushes lose nothing


class Many:
    """Workers and their servers, each worker on a host of its own."""

    def __init__(
        self, codec: str, workers: int = 1, servers: int = 2, *, correct: str = "", shared: bool = False
    ) -> None:
        self.services = [Service(limit_s=60, replaces=True) for _ in range(servers)]
        self.rule = m.Rule(optimizer="SGD", groups=[SGD], gate="async", codec=codec, correct=correct)
        self.ends: list[list[Connection]] = []  # of the servers, by worker
        self.clients: list[Client] = []
        self.tables = [self.join(rank, shared=shared) for rank in range(workers)]
        self.tables[0].store()
        for table in self.tables:
            table.pull()

    def join(self, rank: int, *, shared: bool = False) -> Table:
        ends = [pair(rank, shared=shared) for _ in self.services]
        for service, (theirs, _) in zip(self.services, ends):
            service.admit(theirs)
        self.ends.append([theirs for theirs, _ in ends])
        self.clients.append(Client(rank, [mine for _, mine in ends], limit_s=60))
        tensors = [Tensor(f"p{i}", s, "float16" if i == HALF else "float32", 0) for i, s in enumerate(SHAPES)]
        return self.clients[-1].open([(t, torch.zeros(t.shape, dtype=t.torch_dtype)) for t in tensors], self.rule)

    @property
    def weights(self) -> list[torch.Tensor]:
        """The servers', as parameters are."""
        whole = [torch.zeros(shape).view(-1) for shape in SHAPES]
        for service in self.services:
            table = service.tables[0]
            for chunk, flat in zip(table.chunks, table.shard.stock.weights):
                for piece in chunk.pieces:
                    whole[piece.tensor][piece.start : piece.stop] = flat[piece.at : piece.at + piece.numel]
        return [flat.view(shape) for flat, shape in zip(whole, SHAPES)]

    def traces(self, rank: int) -> list[Trace]:
        sessions = [service.session(rank) for service in self.services]
        return [session._traces[0] for session in sessions if isinstance(session, Session)]

    @property
    def sent_bytes(self) -> int:
        """By servers, to all workers."""
        return sum(end.channel.sent_bytes for ends in self.ends for end in ends)

    def close(self) -> None:
        for client in self.clients:
            client.close()
        for service in self.services:
            service.close()


def has(table: Table) -> list[torch.Tensor]:
    return [slot.parameter.to(torch.float32, copy=True) for slot in table.slots]


def push(table: Table, seed: int | None, scale: float = 1.0, thread: int = 0) -> None:
    """Gradients by chance; None: zeros."""
    generator = torch.Generator().manual_seed(seed or 0)
    gradients = [torch.randn(shape, generator=generator) * (0.0 if seed is None else scale) for shape in SHAPES]
    gradients[HALF] = gradients[HALF].half()
    table.push(gradients, [SGD], thread=thread)


def equal(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def distance(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(some, others))


def test_weights_come_back_within_the_error_of_one_code() -> None:
    many, bound = Many(EIGHT), servable(EIGHT).back
    assert bound
    for step in range(20):
        before = has(many.tables[0])
        push(many.tables[0], step)
        moved = [w - b for w, b in zip(many.weights, before)]
        assert 0 < distance(has(many.tables[0]), many.weights) <= max(bound.bound(each.view(-1)) for each in moved)
        for number in (1, HALF):  # small ones, and other types, come as they are
            assert torch.equal(has(many.tables[0])[number], many.weights[number])
    many.tables[0].pull()
    assert equal(has(many.tables[0]), many.weights)
    many.close()


BACKS = ["quantize(8)", "quantize(4)", "quantize(2, stochastic=True)", "sign", "topk(0.05)", "cast(fp8)", "nonzero"]


@settings(max_examples=25, deadline=None)
@given(
    back=st.sampled_from(BACKS),
    servers=st.integers(1, 3),
    events=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5)), max_size=14),
)
def test_both_sides_hold_the_same_bit_for_bit(back: str, servers: int, events: list[tuple[int, int]]) -> None:
    """Whoever pushes, pulls and is replaced, in whatever order."""
    many = Many(f"nonzero, back={back}", 3, servers)
    for step, (rank, event) in enumerate(events):
        if event == 0:
            many.tables[rank].pull()
            assert equal(has(many.tables[rank]), many.weights)
        elif event == 1:
            many.tables[rank]._client.close(said=False)
            many.tables[rank] = many.join(rank)
            push(many.tables[rank], step)
            assert equal(has(many.tables[rank]), many.weights)  # the first ones come as they are
        else:
            push(many.tables[rank], step)
        for worker, table in enumerate(many.tables):
            for part, trace in zip(table._parts, many.traces(worker)):
                for index, flat in trace._has.items():
                    for p in part.chunks[index].pieces:
                        mine = table.slots[p.tensor].flat[p.start : p.stop]
                        assert torch.equal(mine, flat[p.at : p.at + p.numel])
    many.close()


NEARER = {"quantize(8)": 1000, "quantize(4)": 1000, "topk(0.125, values=2bit)": 100, "sign": 1.5}  # so many times


@pytest.mark.parametrize("back", NEARER)
def test_what_is_unsaid_does_not_gather(back: str) -> None:
    """When pushes stop, workers come to the weights of the servers; and then they are the same, once asked for."""
    many = Many(f"nonzero, back={back}", 2)
    far = []
    for step in range(30):
        push(many.tables[step % 2], step, scale=0.1)
        far.append(max(distance(has(table), many.weights) for table in many.tables))
    assert max(far[20:]) < 3 * max(far[:10])
    for _ in range(40):
        push(many.tables[0], None)
        push(many.tables[1], None)
    assert max(distance(has(table), many.weights) for table in many.tables) < max(far) / NEARER[back]
    for table in many.tables:
        table.pull()
        assert equal(has(table), many.weights)
    many.close()


def test_both_ways_take_as_few_bytes_as_codes_have() -> None:
    def bytes_of(codec: str) -> tuple[int, int]:
        many = Many(codec)
        sent, back = many.clients[0].sent_bytes, many.sent_bytes
        for step in range(10):
            push(many.tables[0], step)
        sent, back = many.clients[0].sent_bytes - sent, many.sent_bytes - back
        many.close()
        return sent, back

    words = 10 * 1100  # heads of messages
    coded, plain = 10 * 5000, 10 * (2 * 2400 + 4 * 7)
    for codec, bits in {"quantize(8), back=quantize(8)": 8.2, "quantize(4), back=quantize(4)": 4.2}.items():
        for way in bytes_of(codec):
            assert plain < way < coded * bits / 8 + plain + words
    there, back = bytes_of("quantize(4)")
    assert there < coded * 4.2 / 8 + plain + words < coded * 4 < back


def test_weights_follow_a_dropped_push_as_after_any_other() -> None:
    many = Many(EIGHT, 2, 1, correct="drop(1)")
    for step in range(4):
        push(many.tables[0], step)
    before, there = has(many.tables[1]), many.weights
    push(many.tables[1], 9)
    assert len(many.tables[1].dropped) == 1
    assert equal(many.weights, there)
    assert distance(has(many.tables[1]), there) < distance(before, there) / 50
    many.close()


def test_threads_of_a_worker_have_what_a_correction_sends_to_them() -> None:
    """With dana, weights that others have not: whoever pushes, all threads of a worker share its memory."""
    many = Many(EIGHT, 2, correct="dana(0.9)")
    for step in range(12):
        push(many.tables[step % 2], step, scale=0.1, thread=step % 3)
    shards = [service.tables[0].shard for service in many.services]
    for shard, trace, part in zip(shards, many.traces(1), many.tables[1]._parts):
        for index, flat in trace._has.items():
            ahead = shard.weights(1, index)
            assert 0 < distance([flat], [ahead]) < distance([shard.stock.weights[index]], [ahead]) / 50
            for p in part.chunks[index].pieces:
                mine = many.tables[1].slots[p.tensor].flat[p.start : p.stop]
                assert torch.equal(mine, flat[p.at : p.at + p.numel])
    many.close()


def test_what_is_written_into_parameters_is_gone_with_the_next_weights() -> None:
    """As without codes, where all of them come."""
    many = Many(EIGHT)
    for slot in many.tables[0].slots:
        slot.parameter.fill_(100.0)
    push(many.tables[0], 1)
    assert distance(has(many.tables[0]), many.weights) < 0.1
    many.close()


def test_weights_that_are_no_numbers_come_as_they_are() -> None:
    many = Many(EIGHT, servers=1)
    push(many.tables[0], 1)
    stock = many.services[0].tables[0].shard.stock
    for value in (torch.inf, 0.5):
        stock.weights[0][3] = value
        push(many.tables[0], None)
        assert has(many.tables[0])[0].view(-1)[3] == value
    many.close()


def test_shared_memory_needs_no_codes() -> None:
    many = Many("quantize(2), back=quantize(2)", shared=True)
    push(many.tables[0], 1)
    assert equal(has(many.tables[0]), many.weights)
    assert many.sent_bytes < 4000
    assert not any(session._traces for s in many.services if (session := s.session(0)))
    many.close()


@pytest.mark.parametrize("codec", [EIGHT, "nonzero"])
@pytest.mark.parametrize("wrong", ["sizes", "bytes", "too many"])
def test_codes_that_cannot_be_read_end_the_connection(wrong: str, codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are they taken where none were asked for."""
    many = Many(codec)

    def say(self: Session, message: m.ToWorker, body: torch.Tensor | None = None, *, exact: bool = False) -> None:
        if isinstance(message, m.Weights):
            body = torch.zeros(1 << 20 if wrong == "too many" else 2000, dtype=torch.uint8)
            sizes = (-1, 2001) if wrong == "sizes" else (body.numel(),)
            message = msgspec.structs.replace(message, nbytes=body.numel(), sizes=sizes)
        self._out.append((message, body, exact))

    monkeypatch.setattr(Session, "_say", say)
    monkeypatch.setattr(Trace, "say", lambda self, index, weights, exact: ((weights.numel(),), weights))
    expected = codec == EIGHT and wrong != "too many"
    told = "codes that cannot be read" if expected else r"\d+ bytes of codes for a chunk"
    with pytest.raises(Interrupted, match=rf"server \d sent {told}"):
        push(many.tables[0], 1)
    for client in many.clients:
        client.close(said=False)
    for service in many.services:
        service.close()
