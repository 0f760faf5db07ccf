"""Codecs on a CUDA device: encoded there, the same bits on all members, and what the CPU would have made of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.strategies import AllReduce, World
from paceline.testing.together import together
from paceline.transport.device_arena import DeviceArena
from paceline.transport.group import Group

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

WAYS = [
    {"codec": "cast(bf16)"},
    {"codec": "quantize(8)"},
    {"codec": "quantize(4)", "back": "sign"},
    {"codec": "quantize(8, shared=True)"},
    {"codec": "sign"},
    {"codec": "ternary"},
    {"codec": "topk(0.05)"},
    {"codec": "threshold(density=0.05)"},
    {"codec": "lowrank(2)"},
    {"codec": "none"},
]


def train(group: Group, device: str, way: dict[str, str]) -> list[torch.Tensor]:
    model = nn.Sequential(nn.Linear(64, 200), nn.Tanh(), nn.Linear(200, 40))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / 10)
    model.to(device)
    strategy, optimizer = AllReduce(**way), torch.optim.SGD(model.parameters(), lr=0.05)
    strategy.attach(model, optimizer, World(group))
    for step in range(5):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(10 * step + group.rank)).to(device)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    (engine,) = strategy._engines.values()
    assert engine._layout is not None
    coded = device == "cuda" and way["codec"] != "none"
    assert all(isinstance(arena, DeviceArena) == coded for arena in engine._layout.arenas)
    return [p.detach().cpu() for p in model.parameters()]


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("hosts", [["a", "b"], ["a", "b", "c"], ["a", "a"]])
def test_members_agree_and_the_cpu_says_the_same(hosts: list[str], way: dict[str, str]) -> None:
    first, *others = together(len(hosts), lambda group: train(group, "cuda", way), hosts=hosts)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other))
    on_cpu = together(len(hosts), lambda group: train(group, "cpu", way), hosts=hosts)[0]
    for a, b in zip(first, on_cpu):
        assert float((a - b).norm() / b.norm()) < 0.02


def test_a_gradient_that_is_not_finite_spoils_the_pass() -> None:
    def body(group: Group) -> bool:
        model = nn.Linear(100, 40).cuda()
        strategy = AllReduce(codec="quantize(8)")
        strategy.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), World(group))
        x = torch.randn(4, 100, generator=torch.Generator().manual_seed(3)).cuda()
        model(x).sum().backward()
        model.zero_grad()
        (model(x).sum() * (float("inf") if group.rank else 1.0)).backward()
        assert model.weight.grad is not None
        spoilt = not bool(torch.isfinite(model.weight.grad).any())
        model.zero_grad()
        model(x).sum().backward()
        return spoilt and bool(torch.isfinite(model.weight.grad).all())

    assert all(together(2, body, hosts=["a", "b"]))
