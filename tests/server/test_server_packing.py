"""Pushes as codes: nothing is lost between what is said, what is unsaid, and what was dropped."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.codecs import PayloadError, make_codec
from paceline.core.errors import ConfigError
from paceline.server import messages as m
from paceline.server.client import Client, Table
from paceline.server.connection import pair
from paceline.server.packing import Packer, most, servable, unpack
from paceline.server.placement import Tensor, place
from paceline.server.service import Service

SHAPES = [(60, 50), (7,), (2000,)]
SGD: dict[str, Any] = {"lr": 1.0}


class One:
    """A worker and its servers."""

    def __init__(self, codec: str, servers: int = 2, *, correct: str = "", shared: bool = False) -> None:
        self.services = [Service(limit_s=60) for _ in range(servers)]
        ends = [pair(0, shared=shared) for _ in self.services]
        for service, (theirs, _) in zip(self.services, ends):
            service.attach(theirs)
        self.client = Client(0, [mine for _, mine in ends], limit_s=60)
        tensors = [(Tensor(f"p{i}", shape, "float32", 0), torch.zeros(shape)) for i, shape in enumerate(SHAPES)]
        rule = m.Rule(optimizer="SGD", groups=[SGD], gate="async", codec=codec, correct=correct)
        self.table: Table = self.client.open(tensors, rule)
        self.table.store()

    def weights(self) -> torch.Tensor:
        return torch.cat([slot.parameter.view(-1) for slot in self.table.slots])

    def unsaid(self) -> torch.Tensor:
        unsaid = self.table.unsaid()
        whole = [unsaid.get(f"p{i}", torch.zeros(1, torch.Size(s).numel()))[0] for i, s in enumerate(SHAPES)]
        return torch.cat(whole)

    def close(self) -> None:
        self.client.close()
        for service in self.services:
            service.close()


def gradients(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.view(-1) for t in tensors])


@pytest.mark.parametrize("codec", ["nonzero", "quantize(8)", "sign", "topk(0.05)", "threshold(1.0)", "cast(bf16)"])
def test_what_was_said_and_what_is_unsaid_is_all_there_was(codec: str) -> None:
    one = One(codec)
    total = torch.zeros(sum(torch.Size(s).numel() for s in SHAPES))
    for step in range(5):
        one.table.push(gradients(step), [SGD])
        total += flat(gradients(step))
    torch.testing.assert_close(-one.weights() + one.unsaid(), total, rtol=1e-4, atol=1e-3)
    assert one.client.sent_bytes < (40_000 if codec == "nonzero" else 30_000) * 5 + 20_000
    one.close()


def test_what_was_dropped_is_unsaid() -> None:
    one = One("topk(0.05)", 1, correct="drop(1)")
    one.table.push(gradients(0), [SGD])
    before = one.unsaid()
    weights = one.weights().clone()
    one.services[0].tables[0].shard.version += 3  # as if others had pushed
    one.table.push(gradients(1), [SGD])
    assert len(one.table.dropped) == 1
    assert torch.equal(weights, one.weights())
    coded = torch.cat([torch.ones(3000), torch.zeros(7), torch.ones(2000)]).bool()
    torch.testing.assert_close(one.unsaid()[coded], (before + flat(gradients(1)))[coded])
    one.close()


def test_what_one_server_has_dropped_is_unsaid_and_what_another_has_applied_is_not() -> None:
    one = One("topk(0.05)", 2, correct="drop(1)")
    one.table.push(gradients(0), [SGD])
    one.services[1].tables[0].shard.version += 3
    one.table.push(gradients(1), [SGD])
    assert len(one.table.dropped) == 1
    total = flat(gradients(0)) + flat(gradients(1))
    coded = torch.cat([torch.ones(3000), torch.zeros(7), torch.ones(2000)]).bool()
    torch.testing.assert_close((one.unsaid() - one.weights())[coded], total[coded])
    one.close()


def test_what_is_unsaid_moves_to_another_number_of_servers() -> None:
    one, other = One("topk(0.05)", 1), One("topk(0.05)", 3)
    one.table.push(gradients(0), [SGD])
    other.table.add_unsaid(one.table.unsaid())
    other.table.add_unsaid(one.table.unsaid())  # of two members that are gone
    torch.testing.assert_close(other.unsaid(), 2 * one.unsaid())
    one.close()
    other.close()


def test_shared_memory_needs_no_codes() -> None:
    one = One("topk(0.01)", shared=True)
    one.table.push(gradients(0), [SGD])
    torch.testing.assert_close(one.weights(), -flat(gradients(0)))
    one.close()


@pytest.mark.parametrize("codec", ["topk(0.05)", "quantize(4)", "nonzero"])
def test_codes_that_were_altered_are_refused(codec: str) -> None:
    made = make_codec(codec)
    chunk = place([Tensor(f"p{i}", s, "float32", 0) for i, s in enumerate(SHAPES)], 1).chunks[0]
    sizes, payload = Packer(codec, rank=0).pack(chunk, flat(gradients(0))[: chunk.numel], (), 0)
    assert payload.numel() <= most(made, chunk)
    unpack(made, chunk, sizes, payload)
    for wrong, bytes_ in [
        (sizes[:-1], payload),
        (sizes, payload[:-1]),
        ((*sizes[:-1], -1), payload),
        ((sizes[0] - 1, *sizes[1:-1], sizes[-1] + 1), payload),
    ]:
        with pytest.raises(PayloadError):
            unpack(made, chunk, tuple(wrong), bytes_)


def test_codecs_that_need_the_others_are_refused() -> None:
    for words in ("auto", "lowrank(2)", "quantize(8, shared=True)", "sign, back=quantize(8, shared=True)"):
        with pytest.raises(ConfigError, match=r"all-reduce|agree"):
            servable(words)
    for words, told in (
        ("sign, feedback=False", "is for all-reduce"),
        ("sign, back=sign, warmup=9", "is for all-reduce"),
        ("sign, back=dgc(0.01)", "is for gradients, not for weights"),
        ("sign, back=auto", "unknown codec 'auto'"),
        ("none, back=sign", "unknown codec 'none'"),
    ):
        with pytest.raises(ConfigError, match=told):
            servable(words)
    assert servable("sign, back=none").back is servable("sign").back is None
