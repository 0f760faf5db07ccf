"""Replicas in stages: what they equal, what a member holds, and how checkpoints pass between meshes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

MODELS = """
import copy, sys, torch, paceline
from torch import nn
from torch.nn import functional as F

class Block(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(wide), nn.Linear(wide, 2 * wide), nn.Linear(2 * wide, wide)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))

class GPT(nn.Module):  # a table, positions, a list of blocks, a head
    def __init__(self, wide=56):
        super().__init__()
        self.table, self.places = nn.Embedding(11, wide), nn.Parameter(0.1 * torch.randn(12, wide))
        self.blocks = nn.ModuleList(Block(wide) for _ in range(8))
        self.norm, self.head = nn.LayerNorm(wide), nn.Linear(wide, 7)

    def forward(self, x, mask=None):
        batch, length = x.shape
        assert length <= 12, "too long"
        at = torch.arange(length, device=x.device)
        x = self.table(x) + self.places[at]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))

class Skips(nn.Module):  # values that pass stages by, also as numbers and within tuples
    def __init__(self, wide=24):
        super().__init__()
        self.first = nn.Linear(10, wide)
        self.down = nn.ModuleList(nn.Linear(wide, wide) for _ in range(4))
        self.memory = nn.GRU(wide, wide, batch_first=True)
        self.up = nn.ModuleList(nn.Linear(wide, wide) for _ in range(4))
        self.last, self.scale = nn.Linear(wide, 7), nn.Parameter(torch.ones(wide))

    def forward(self, x):
        x = begin = torch.tanh(self.first(x.float()))
        kept = []
        for layer in self.down:
            kept.append(x)
            x = torch.relu(layer(x))
        x, state = self.memory(x[:, None])
        rows = x.size(0)
        for layer in self.up:
            x = torch.relu(layer(x.reshape(rows, -1) + kept.pop()))
        return self.last((x + begin * 0.5 + state[0]) * self.scale)

def sequential():
    return nn.Sequential(nn.Linear(10, 40), nn.Tanh(), nn.Linear(40, 30), nn.Sequential(nn.ReLU(), nn.Linear(30, 20)),
                         nn.Linear(20, 20), nn.LayerNorm(20), nn.Linear(20, 30), nn.Linear(30, 20), nn.Linear(20, 7))

MADE = {"sequential": sequential, "gpt": GPT, "skips": Skips}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.02),
}
"""

# Every member trains a whole copy beside its stage, on the batches of all: both must stay equal.
EQUAL = (
    MODELS
    + """
kind, schedule = sys.argv[1:]
run = paceline.join(progress="off", checkpoint_keep=0)
torch.manual_seed(0)
rows = 43 * run._share()[1]  # batches of 12, 12, 12, 7 for each share: the last has fewer samples than micro-batches
data = torch.utils.data.TensorDataset(torch.randint(11, (rows, 10)), torch.randint(7, (rows,)))
if kind == "sequential":
    data.tensors = (torch.randn(rows, 10), data.tensors[1])
loader = run.loader(data, batch_size=12)
made = MADE[kind]()
sides = []
for name, make in OPTIMIZERS.items():
    whole = copy.deepcopy(made)
    part = run.model(copy.deepcopy(made), schedule=schedule, recompute=name == "adamw" and kind == "gpt")
    optimizer = run.optimizer(make(part.parameters()), part)
    sides.append((name, part, optimizer, whole, make(whole.parameters())))
of = dict(whole.named_parameters())
def local(p): return p.full_tensor() if hasattr(p, "full_tensor") else p
held = sum(getattr(p, "_local_tensor", p).numel() for p in part.parameters()) / sum(p.numel() for p in of.values())
shares = run._cut.mesh.along(0, "replicate", "shard")
steps = 0
for epoch in run.epochs(3):
    for a, b in loader:
        real = loader.last_real
        packed = F.pad(torch.cat([a.double(), b[:, None].double()], 1), (0, 0, 0, 12 - len(a)))
        everyone = run.group.all_gather(packed)
        counts = [int(n) for n in run.group.all_gather(torch.tensor([real]))]
        all_rows = torch.cat([everyone[r][: counts[r]] for r in shares])
        x, y = all_rows[:, :10].to(a.dtype), all_rows[:, 10].long()
        steps += 1
        for name, part, optimizer, whole, other in sides:
            optimizer.zero_grad()
            mine = run.backward(part, a, b, loss=F.cross_entropy)
            with torch.no_grad():
                alone = F.cross_entropy(whole(a), b)
            assert abs(float(mine - alone)) < 1e-5, (name, steps, mine, alone)
            other.zero_grad()
            F.cross_entropy(whole(x), y).backward()
            norms = run.clip_grad_norm(part, 0.5), nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
            torch.testing.assert_close(norms[0], norms[1])
            optimizer.step()
            other.step()
assert steps == 12
for name, part, optimizer, whole, other in sides:
    of = dict(whole.named_parameters())
    apart = max(float((local(p) - of[n]).detach().abs().max()) for n, p in part.named_parameters())
    assert apart < 5e-6, (name, apart)
    ours = run.evaluate(lambda a, b: {"loss": F.cross_entropy(part(a), b, reduction="none")}, data, batch_size=20)
    with torch.no_grad():
        theirs = float(F.cross_entropy(whole(data.tensors[0]), data.tensors[1]))
    assert abs(ours["loss"] - theirs) < 1e-5, (ours, theirs)
print(f"EQUAL {run.rank} {held:.3f}", flush=True)
"""
)


def run(tmp_path: Path, script: str, *args: str, more: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    (tmp_path / "train.py").write_text(script)
    command = [sys.executable, "-m", "paceline", "run", *args, "train.py", *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=150, env=os.environ, cwd=tmp_path)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("members", "mesh", "kind", "schedule"),
    [
        ("2", "stage=2", "gpt", "1f1b"),
        ("2", "stage=2", "skips", "zero-bubble"),
        *(
            pytest.param("2", "stage=2", kind, schedule, marks=SLOW)
            for kind in ("sequential", "gpt", "skips")
            for schedule in ("gpipe", "1f1b", "interleaved", "zero-bubble")
        ),
        *(
            pytest.param("4", "stage=4", kind, schedule, marks=SLOW)
            for kind, schedule in [("gpt", "1f1b"), ("skips", "interleaved"), ("sequential", "zero-bubble")]
        ),
        pytest.param("4", "replicate=2,stage=2", "skips", "1f1b", marks=SLOW),
        pytest.param("4", "shard=2,stage=2", "gpt", "1f1b", marks=SLOW),
        pytest.param("4", "shard=2,stage=2", "skips", "interleaved", marks=SLOW),
        pytest.param("8", "replicate=2,shard=2,stage=2", "gpt", "1f1b", marks=SLOW),
    ],
)
def test_it_equals_a_single_process(members: str, mesh: str, kind: str, schedule: str, tmp_path: Path) -> None:
    done = run(tmp_path, EQUAL, "-n", members, "--mesh", mesh, more=(kind, schedule))
    assert done.returncode == 0, done.stderr
    told = [line.split("EQUAL ")[1].split() for line in done.stdout.splitlines() if "EQUAL " in line]
    assert len(told) == int(members)
    replicas = 2 if "replicate" in mesh else 1
    assert sum(float(held) for _, held in told) == pytest.approx(replicas, abs=0.02)
