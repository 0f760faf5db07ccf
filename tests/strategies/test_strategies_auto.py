"""codec="auto": all members choose alike, from what was measured, and look again when the wire changes."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from paceline.strategies import AllReduce, World
from paceline.strategies.reducers import auto
from paceline.testing.together import together
from paceline.transport.group import Group
from paceline.transport.link import Link
from paceline.transport.ring import Ring


def train(group: Group, codec: str, passes: int) -> tuple[AllReduce, list[str], torch.Tensor]:
    told: list[str] = []
    model = nn.Linear(300, 100)
    with torch.no_grad():
        model.weight.copy_(torch.arange(30_000).view(100, 300) / 30_000)
    strategy, optimizer = AllReduce(codec=codec), torch.optim.SGD(model.parameters(), lr=0.01)
    strategy.attach(model, optimizer, World(group, tell=told.append))
    generator = torch.Generator().manual_seed(group.rank)
    for _ in range(passes):
        optimizer.zero_grad()
        model(torch.randn(4, 300, generator=generator)).square().mean().backward()
        optimizer.step()
    return strategy, told, model.weight.detach().clone()


@pytest.mark.parametrize(("fidelity", "allowed"), [("exact", 2), ("high", 5), ("low", 11)])
def test_a_slow_link_gets_a_codec(monkeypatch: pytest.MonkeyPatch, fidelity: str, allowed: int) -> None:
    """The link is said to be slow, so what sends least is expected to be fastest; all members choose the same."""
    monkeypatch.setattr(Ring, "_measured", lambda ring: Link(latency_s=1e-4, bytes_per_s=1e5))

    def body(group: Group) -> tuple[str, list[str], torch.Tensor]:
        strategy, told, weight = train(group, f"auto(fidelity={fidelity})", 30)
        return strategy.readings()["codec"], told, weight

    (first, told, weight), (second, _, other) = together(2, body, hosts=["a", "b"])
    assert first == second
    assert torch.equal(weight, other)
    assert len(told) == 1
    assert told[0].startswith("codec auto: ")
    assert "predicted" in told[0]
    assert "measured" in told[0]
    assert "0.1 MB/s" in told[0]
    chosen = first.partition(": ")[2]
    assert chosen in [m.words for m in auto.CANDIDATES[fidelity]]
    assert len(auto.CANDIDATES[fidelity]) == allowed
    if fidelity == "low":
        assert chosen.startswith(("sign", "topk", "lowrank"))
    if fidelity == "high":
        assert chosen.startswith(("cast", "quantize(bits=8"))  # the trials are on a fast one


def test_a_fast_link_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ring, "_measured", lambda ring: Link(latency_s=1e-6, bytes_per_s=1e12))
    monkeypatch.setattr(auto, "_TRIED", 1)  # as predicted
    (codec, *_), *_ = together(2, lambda group: train(group, "auto", 14)[0].readings().values(), hosts=["a", "b"])
    assert codec == "auto(fidelity=low): none"


def test_on_one_host_there_is_nothing_to_choose() -> None:
    for strategy, told, _ in together(2, lambda group: train(group, "auto", 3)):
        assert strategy.readings()["codec"].endswith(": none")
        assert told == ["codec auto: none, since all members share this host"]


def test_it_looks_again_when_the_wire_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = {"by": 0.0}
    monkeypatch.setattr(auto, "_AGAIN", 8)
    gather = Ring.all_gather

    def slower(ring: Ring, flat: torch.Tensor, out: torch.Tensor) -> None:
        time.sleep(slow["by"])
        gather(ring, flat, out)

    monkeypatch.setattr(Ring, "all_gather", slower)
    monkeypatch.setattr(auto, "CANDIDATES", {"low": auto.CANDIDATES["low"][5:7]})

    def body(group: Group) -> list[str]:
        told: list[str] = []
        model = nn.Linear(300, 100)
        strategy, optimizer = AllReduce(codec="auto"), torch.optim.SGD(model.parameters(), lr=0.01)
        strategy.attach(model, optimizer, World(group, tell=told.append))
        for step in range(80):
            if step == 40:
                group.barrier()
                slow["by"] = 0.02
            optimizer.zero_grad()
            model(torch.ones(4, 300)).square().mean().backward()
            optimizer.step()
        return told

    for told in together(2, body, hosts=["a", "b"]):
        assert any("choosing again" in line for line in told)
        assert told[-1].startswith("codec auto: ")


def test_what_was_chosen_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ring, "_measured", lambda ring: Link(latency_s=1e-4, bytes_per_s=1e5))

    def body(group: Group) -> tuple[str, str]:
        strategy, _, _ = train(group, "auto", 30)
        model = nn.Linear(300, 100)
        again = AllReduce(codec="auto")
        again.load_state_dict(strategy.state_dict())
        again.attach(model, torch.optim.SGD(model.parameters(), lr=0.01), World(group))
        return strategy.readings()["codec"], again.readings()["codec"]

    for before, after in together(2, body, hosts=["a", "b"]):
        assert before == after
        assert "none" not in after


def test_a_model_of_one_bucket_has_nothing_to_hide_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its exchange begins when the backward pass has ended, so it is predicted to be waited for."""
    monkeypatch.setattr(Ring, "_measured", lambda ring: Link(latency_s=1e-4, bytes_per_s=1e5))

    def body(group: Group) -> list[float]:
        told: list[str] = []
        model = nn.Linear(300, 100)
        strategy, optimizer = AllReduce(codec="auto"), torch.optim.SGD(model.parameters(), lr=0.01)
        strategy.attach(model, optimizer, World(group, tell=told.append))
        for step in range(40):
            optimizer.zero_grad()
            bad = float("inf") if step == 2 else 1.0  # nothing can be learned from the gradients of this pass
            (model(torch.ones(4, 300)).square().mean() * bad).backward()
            time.sleep(0.02)  # what the script does between two steps hides nothing
            if step != 2:
                optimizer.step()
        (engine,) = strategy._engines.values()
        assert engine.coder is not None
        assert told[-1].startswith("codec auto: ")
        none = float(told[-1].partition("predicted ")[2].rpartition(" with none")[0].split()[-1])
        return [none, engine.coder.hidden_s]

    for none, hidden_s in together(2, body, hosts=["a", "b"]):
        assert none > 1000  # 120 kB at 0.1 MB/s, there and back: more than a second
        assert hidden_s < 0.02
