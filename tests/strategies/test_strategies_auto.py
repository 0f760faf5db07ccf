"""codec="auto": all members choose alike, from what was measured, and choose again only when the link changes."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from paceline.strategies import AllReduce, World
from paceline.strategies.reducers import Coder, Method, Piece, auto
from paceline.strategies.reducers.coder import Bucket
from paceline.strategies.reducers.reducer import make_way
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


LAN, WAN = Link(latency_s=1e-4, bytes_per_s=1e8), Link(latency_s=1e-4, bytes_per_s=1e7)


class Scripted:
    """Two members that say the same, over a link and a wire that a script sets pass by pass."""

    size, position = 2, 0

    def __init__(self, links: Callable[[int], Link], wire_s: Callable[[int], float]) -> None:
        self.link = links(0)
        self.links, self.wire_s = links, wire_s
        self.measured: list[int] = []  # in which passes
        self.told: list[tuple[int, str]] = []
        self.passes = 0

    def measure(self) -> None:
        self.measured.append(self.passes)
        self.link = self.links(self.passes)

    def all_reduce(self, flat: torch.Tensor) -> None:
        flat.mul_(2)

    def all_gather(self, flat: torch.Tensor, out: torch.Tensor) -> None:
        out.view(2, -1)[:] = flat

    def all_to_all(self, flat: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(flat)

    def run(self, passes: int, chosen: Method | None = None) -> Scripted:
        coder = Coder(Method.of("auto"), tell=lambda line: self.told.append((self.passes, line)))
        coder.chosen = chosen
        chooser = auto.Chooser(coder, make_way)
        bucket, flat = Bucket.of(torch.float32, 30_000, [Piece("w", slice(0, 30_000), 1)]), torch.randn(30_000)
        for self.passes in range(1, passes + 1):
            coder.begin({})
            chooser.before(flat, bucket, [bucket], self)
            coder.cost.wire_s += self.wire_s(self.passes)
        return self

    @property
    def again(self) -> list[tuple[int, str]]:
        return [(at, line) for at, line in self.told if "choosing again" in line]


def test_a_slower_link_is_a_reason_to_choose_again() -> None:
    done = Scripted(lambda i: LAN if i < 300 else WAN, lambda i: 0.01 if i < 300 else 0.1).run(600)
    ((at, line),) = done.again
    assert 300 < at <= 450
    assert "carries 10 MB/s at 0.1 ms instead of 100 MB/s" in line
    assert "the wire takes 100 ms a step instead of" in line
    assert "the link carries 10 MB/s" in done.told[-1][1], "and the choice is made for the link as it is"
    assert len(done.told) == 3


def test_so_is_a_longer_way() -> None:
    """Where messages are short, latency counts."""
    far = Link(latency_s=5e-2, bytes_per_s=1e8)
    done = Scripted(lambda i: LAN if i < 300 else far, lambda i: 0.01 if i < 300 else 0.1).run(600)
    assert len(done.again) == 1


def test_a_busy_host_is_none() -> None:
    """The wire takes three times as long, now and then or for ever; the link is what it was, but for some noise."""

    def noisy(i: int) -> Link:
        return Link(latency_s=1e-4 * (1 + i % 3), bytes_per_s=1e8 * (1 + 0.3 * (i % 2)))

    for wire_s in (lambda i: 0.01 if i < 300 else 0.03), (lambda i: 0.01 * 3 ** (i // 100 % 2)):
        done = Scripted(noisy, wire_s).run(3000)
        assert done.again == []
        assert len(done.told) == 1
        assert len(done.measured) <= 7, "an alarm that was false makes the next look later"


def test_a_link_that_was_slow_for_a_moment_is_none() -> None:
    done = Scripted(lambda i: WAN if 310 < i < 335 else LAN, lambda i: 0.05 if 300 < i < 340 else 0.01).run(1000)
    assert any(310 < at < 335 for at in done.measured), "it was seen"
    assert done.again == []


@given(st.lists(st.tuples(st.sampled_from([0.7, 1.0, 1.4]), st.floats(0.001, 1.0)), min_size=5, max_size=40))
@settings(max_examples=30, deadline=None)
def test_whatever_the_wire_does_an_equal_link_keeps_its_codec(script: list[tuple[float, float]]) -> None:
    def links(i: int) -> Link:
        return Link(latency_s=1e-6, bytes_per_s=1e8 * (script[i // 50 % len(script)][0] if i > 10 else 1.0))

    done = Scripted(links, lambda i: script[i // 50 % len(script)][1]).run(50 * len(script))
    assert done.again == []


def test_a_choice_from_a_checkpoint_is_held_against_the_link_of_today() -> None:
    done = Scripted(lambda i: WAN, lambda i: 0.01 if i < 300 else 0.1).run(600, chosen=Method.of("sign"))
    assert done.told == []
    done = Scripted(lambda i: LAN if i < 300 else WAN, lambda i: 0.01 if i < 300 else 0.1).run(600, Method.of("sign"))
    assert len(done.again) == 1


def test_all_members_choose_again_when_the_link_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = {"by": 0.0}
    for name, passes in ("_AGAIN", 8), ("_SOON", 4):
        monkeypatch.setattr(auto, name, passes)
    gather = Ring.all_gather

    def slower(ring: Ring, flat: torch.Tensor, out: torch.Tensor) -> None:
        time.sleep(slow["by"])
        gather(ring, flat, out)

    monkeypatch.setattr(Ring, "all_gather", slower)
    monkeypatch.setattr(Ring, "_measured", lambda ring: WAN if slow["by"] else LAN)
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
                group.barrier()
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
