"""What is frozen is not sent and has no state, in every strategy, and it can thaw while a run goes on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from paceline.core.errors import ConfigError
from paceline.strategies import AllReduce, Async, AsyncLocal, Bounded, Local, Strategy, Sync, World, Zero
from paceline.strategies.presets import DiLoCo
from paceline.testing.together import together
from paceline.transport.group import Group

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "allreduce": AllReduce,
    "zero-1": lambda: Zero(stage=1),
    "zero-2": lambda: Zero(stage=2),
    "sync": Sync,
    "bounded": lambda: Bounded(2),
    "async": Async,
    "local": lambda: Local(every=1),
    "diloco": lambda: DiLoCo(every=1),
    "async_local": lambda: AsyncLocal(every=1),
}
FROZEN_BYTES = 4 * (100 * 1000 + 1000)
TRAINED_BYTES = 4 * (1000 * 2 + 2)


class Seen(NamedTuple):
    """What a member saw."""

    sent: int  # bytes, in some steps
    state: int  # elements of the largest thing in the optimizer's state, fetched as for a checkpoint
    still: bool  # whether the frozen part is as it was
    weights: list[torch.Tensor]


torch.manual_seed(0)
MODEL = nn.Sequential(nn.Linear(100, 1000), nn.ReLU(), nn.Linear(1000, 2))
MODEL[0].requires_grad_(False)


def make() -> nn.Sequential:
    return copy.deepcopy(MODEL)  # members are threads here, and would take turns at one generator


def steps(group: Group, strategy: Strategy, *, thaw: bool, num: int = 6) -> Seen:
    """The optimizer has all parameters, and decay and momentum that would move any that it touched."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9, weight_decay=0.1)  # far from diverging
    world = World(group, wires=group._wires, limit_s=30.0)
    strategy.attach(model, optimizer, world)
    before = model[0].weight.detach().clone()

    def total() -> int:
        client = getattr(strategy, "_client", None)
        rounds = getattr(strategy, "_rounds", None)
        return group.sent_bytes + (client.sent_bytes if client else 0) + (rounds.sent_bytes if rounds else 0)

    start = 0
    for step in range(num):
        if step == 1:  # before, buckets are laid out and links measured
            start = total()
        if thaw and step == num // 2:
            model[0].requires_grad_(True)
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + group.rank)
        model(torch.randn(8, 100, generator=generator)).square().mean().backward()
        if strategy.finish(optimizer):
            optimizer.step()
        strategy.stepped(optimizer)
    sent = total() - start
    strategy.together(keep=True)
    with strategy.showing():
        state = max((v.numel() for s in optimizer.state.values() for v in s.values() if v is not None), default=0)
        weights = [p.detach().clone() for p in model.parameters()]
        own: Any = [optimizer.state_dict(), strategy.state_dict(), strategy.own_state()]
    largest = max([state, *(t.numel() for t in _tensors(own))])
    strategy.close()
    return Seen(sent, largest, torch.equal(model[0].weight, before), weights)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    values = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list | tuple) else []
    return [t for each in values for t in _tensors(each)]


@pytest.mark.parametrize("name", STRATEGIES)
def test_frozen_parameters_are_not_sent_and_have_no_state(name: str) -> None:
    for seen in together(2, lambda g: steps(g, STRATEGIES[name](), thaw=False), hosts=["a", "b"], limit_s=60.0):
        assert seen.sent < 5 * 4 * TRAINED_BYTES < FROZEN_BYTES  # in five steps
        assert seen.state <= 2000
        assert seen.still


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "async_local"])
def test_what_thaws_is_trained_by_all_alike(name: str) -> None:
    a, b = together(2, lambda g: steps(g, STRATEGIES[name](), thaw=True), hosts=["a", "b"], limit_s=60.0)
    assert not a.still
    for mine, other in zip(a.weights, b.weights):
        torch.testing.assert_close(mine, other)
    assert max(a.state, b.state) >= 100_000  # the first member's has all; with zero, each has some


@pytest.mark.parametrize("name", ["zero-1", "zero-2", "sync"])
def test_what_thaws_is_trained_as_by_all_reduce(name: str) -> None:
    (a, _), (b, _) = (
        together(2, lambda g, n=n: steps(g, STRATEGIES[n](), thaw=True), hosts=["a", "b"], limit_s=60.0)  # type: ignore[misc]
        for n in ("allreduce", name)
    )
    for mine, other in zip(a.weights, b.weights):
        torch.testing.assert_close(mine, other)


def test_async_local_says_that_it_cannot_take_over_what_thaws() -> None:
    with pytest.raises(ConfigError, match=r"Thaw it before run\.optimizer"):
        together(2, lambda g: steps(g, AsyncLocal(every=1), thaw=True), limit_s=60.0)


def test_servers_say_that_nothing_is_trained() -> None:
    def body(group: Group) -> None:
        model = make().requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        strategy = Sync()
        strategy.attach(model, optimizer, World(group, wires=group._wires, limit_s=30.0))
        strategy.finish(optimizer)

    with pytest.raises(ConfigError, match="all parameters of this optimizer are frozen"):
        together(2, body)
