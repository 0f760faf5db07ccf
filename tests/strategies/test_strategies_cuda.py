"""Codecs on a CUDA device: encoded there, the same bits on all members, and what the CPU would have made of it.

Members are processes: threads of one process would share autograd's one thread per device, and wait for each other.
"""

from __future__ import annotations

import pytest
import torch

from paceline.testing.cluster import Cluster

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

SCRIPT = """
import hashlib, sys, torch, paceline
from torch import nn
from paceline.strategies import AllReduce, World
from paceline.transport.device_arena import DeviceArena

WAYS = [
    {"codec": "cast(bf16)"}, {"codec": "quantize(8)"}, {"codec": "quantize(4)", "back": "sign"},
    {"codec": "quantize(8, shared=True)"}, {"codec": "sign"}, {"codec": "ternary"}, {"codec": "topk(0.05)"},
    {"codec": "dgc(0.05)"}, {"codec": "threshold(density=0.05)"}, {"codec": "lowrank(2)"}, {"codec": "none"},
]
run = paceline.join(device="cuda:0")

def train(device, way, spoil=-1):
    model = nn.Sequential(nn.Linear(64, 200), nn.Tanh(), nn.Linear(200, 40))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / 10)
    model.to(device)
    strategy, optimizer = AllReduce(**way), torch.optim.SGD(model.parameters(), lr=0.05)
    strategy.attach(model, optimizer, World(run.group))
    for step in range(5):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(10 * step + run.rank)).to(device)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        (loss * float("inf") if step == spoil and run.rank else loss).backward()
        spoilt = not all(bool(torch.isfinite(p.grad).all()) for p in model.parameters())
        assert spoilt == (step == spoil), (way, step)
        if not spoilt:
            optimizer.step()
    (engine,) = strategy._engines.values()
    coded = device == "cuda" and way["codec"] != "none"
    assert all(isinstance(arena, DeviceArena) == coded for arena in engine._layout.arenas), way
    strategy.close()
    return torch.cat([p.detach().cpu().view(-1) for p in model.parameters()])

for way in WAYS:
    for spoil in -1, 3:
        ours, on_cpu = train("cuda", way, spoil), train("cpu", way, spoil)
        away = float((ours - on_cpu).norm() / on_cpu.norm())
        print("WAY", way, spoil, hashlib.sha256(ours.numpy().tobytes()).hexdigest(), flush=True)
        assert away < 0.02, (way, away)
"""


def test_members_agree_and_the_cpu_says_the_same() -> None:
    first, second = Cluster(2).run(SCRIPT, limit_s=300.0)
    assert first.code == 0, first.output
    assert second.code == 0, second.output
    said = [[line for line in member.output.splitlines() if "WAY" in line] for member in (first, second)]
    assert len(said[0]) == 22
    assert [line.partition("WAY")[2] for line in said[0]] == [line.partition("WAY")[2] for line in said[1]]
