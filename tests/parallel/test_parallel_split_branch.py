"""Branches of a model, each on one member: that they run side by side, both ways, and what they keep there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.parallel._runs import SAVED, run, saved

# A branch goes on only when the other one has begun: one after the other they would wait for ever.
MEET = """
import pathlib, sys, time, torch, paceline
from torch import nn
from torch.nn import functional as F


def meet(name, others):
    pathlib.Path(name).touch()
    until = time.monotonic() + 60
    while not all(pathlib.Path(other).exists() for other in others):
        assert time.monotonic() < until, f"{name} has waited for {others} in vain"
        time.sleep(0.005)


class Met(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, name, others):
        ctx.of = name, others
        meet(f"forward-{name}", [f"forward-{o}" for o in others])
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        name, others = ctx.of
        meet(f"backward-{name}", [f"backward-{o}" for o in others])
        return g, None, None


class Tower(nn.Module):
    def __init__(self, name, others):
        super().__init__()
        self.name, self.others, self.net = name, others, nn.Linear(6, 6)

    def forward(self, x):
        return Met.apply(self.net(x), self.name, self.others)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(4, 6)
        self.left, self.right = Tower("left", ["right"]), Tower("right", ["left"])
        self.out = nn.Linear(6, 3)

    def forward(self, x):
        JOIN


run = paceline.join(progress="off", checkpoint_keep=0)
model = run.model(Model(), split={"left": 0, "right": 1})
optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
torch.manual_seed(run.seed)
x, y = torch.randn(5, 4), torch.randint(3, (5,))
F.cross_entropy(model(x), y).backward()
optimizer.step()
print("MET", sorted(p.name for p in pathlib.Path(".").glob("*ward-*")), flush=True)
"""
JOINS = {
    "called first": "l, r = self.left(self.a(x)), self.right(self.b(x)); return self.out(torch.tanh(l) * r)",
    "one input": "x = self.a(x); return self.out(torch.stack([self.left(x), self.right(x)]).sum(0))",
    "weighed sum": "x = self.a(x); return self.out(0.5 * self.left(x) + x * self.right(x))",
    "a loop": "x = self.a(x); return self.out(sum(tower(x) for tower in (self.left, self.right)))",
}


@pytest.mark.parametrize("join", ["called first", *[pytest.param(j, marks=pytest.mark.slow) for j in list(JOINS)[1:]]])
def test_branches_run_side_by_side_both_ways(join: str, tmp_path: Path) -> None:
    done = run(tmp_path, MEET.replace("JOIN", JOINS[join]), "-n", "2", "--mesh", "split=2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("MET ['backward-left', 'backward-right', 'forward-left', 'forward-right']") == 2


def test_a_branch_that_needs_another_waits_for_it(tmp_path: Path) -> None:
    """The same towers one after the other: the first can only wait in vain."""
    script = MEET.replace("JOIN", "return self.out(self.right(self.left(self.a(x))))").replace("+ 60", "+ 2")
    done = run(tmp_path, script, "-n", "2", "--mesh", "split=2")
    assert "left has waited for ['forward-right'] in vain" in done.stderr


TRAINED = """
import sys, torch, paceline
from torch import nn
from torch.nn import functional as F
from paceline.parallel.pieces import local

torch.set_default_dtype(torch.float64)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        def tower(width):
            return nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 5))
        self.stem, self.towers = nn.Linear(6, 8), nn.ModuleList(tower(width) for width in (40, 10, 30))

    def forward(self, x):
        x = self.stem(x)
        return torch.stack([tower(x) for tower in self.towers]).sum(0)


run = paceline.join(progress="off")
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(48, 6), torch.randint(5, (48,)))
loader = run.loader(data, batch_size=8, shuffle=False)
model = run.model(Model(), split={"towers.*": "branch"})
optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01), model)
for epoch in run.epochs(int(sys.argv[1])):
    for a, b in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(a), b).backward()
        optimizer.step()
state = sum(local(v).numel() for own in optimizer.state.values() for k, v in own.items() if k == "exp_avg")
weights = sum(local(p).numel() for p in model.parameters())
assert state in (0, weights), (state, weights)  # none where a resumed run had nothing left to train
print("HELD", run.rank, weights, flush=True)
"""


@pytest.mark.slow
def test_a_branch_lives_on_one_member_and_checkpoints_have_all(tmp_path: Path) -> None:
    ended = []
    for members, mesh in (("2", "split=2"), ("1", ""), ("2", "split=2")):
        done = run(tmp_path, TRAINED + SAVED, "-n", members, "--mesh", mesh, "--name", "it", more=("2",))
        assert done.returncode == 0, done.stderr
        held = {line.split("HELD ")[1] for line in done.stdout.splitlines() if "HELD " in line}
        if mesh:  # 56 of the stem; towers of 645, 165 and 485
            assert held == {"0 701", "1 706"}
        ended.append(saved(tmp_path)[0])
    done = run(tmp_path, TRAINED + SAVED, "-n", "1", "--name", "alone", more=("2",))
    assert done.returncode == 0, done.stderr
    alone = saved(tmp_path)[0]
    assert "model.0.towers.1.1.running_mean" in alone
    for name, value in ended[0].items():
        torch.testing.assert_close(value, alone[name], rtol=1e-6, atol=1e-9)
        assert torch.equal(value, ended[1][name])
        assert torch.equal(value, ended[2][name])


def test_what_a_branch_may_not_return_is_said(tmp_path: Path) -> None:
    script = MEET.replace("JOIN", JOINS["called first"]).replace(
        "return Met.apply(self.net(x), self.name, self.others)", "return x, x"
    )
    done = run(tmp_path, script, "-n", "2", "--mesh", "split=2")
    assert "a branch returned a tuple: let it return one tensor" in done.stderr
