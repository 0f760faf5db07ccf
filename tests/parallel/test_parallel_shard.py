"""Replicas that are cut into shards: what they equal, what a member holds, and how checkpoints pass between meshes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.parallel._runs import SAVED, check_killed, check_meshes, check_refused, run, saved

# Every member trains a whole copy beside its part, on the batches of all: both must stay equal.
EQUAL = """
import copy, sys, torch, paceline
from torch import nn
from torch.nn import functional as F

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.02),
}
run = paceline.join(progress="off", checkpoint_keep=0)
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(99, 10), torch.randint(7, (99,)))
loader = run.loader(data, batch_size=8)
made = nn.Sequential(nn.Linear(10, 133), nn.BatchNorm1d(133), nn.ReLU(), nn.Linear(133, 101), nn.Linear(101, 7)).eval()
sides = []
for name, make in OPTIMIZERS.items():
    whole = copy.deepcopy(made)
    part = run.model(copy.deepcopy(made), recompute=name == "adamw")
    optimizer = run.optimizer(make(part.parameters()), part)
    sides.append((name, part, optimizer, whole, make(whole.parameters())))
held = sum(p.to_local().numel() for p in part.parameters()) / sum(p.numel() for p in whole.parameters())
for epoch in run.epochs(3):
    for a, b in loader:
        real = loader.last_real
        everyone = run.group.all_gather(F.pad(torch.cat([a, b[:, None].float()], 1), (0, 0, 0, 8 - len(a))))
        counts = [int(n) for n in run.group.all_gather(torch.tensor([real]))]
        rows = torch.cat([batch[:n] for batch, n in zip(everyone, counts)])
        for name, part, optimizer, whole, other in sides:
            optimizer.zero_grad()
            F.cross_entropy(part(a)[:real] if real else part(a), b[:real] if real else b).backward()
            other.zero_grad()
            F.cross_entropy(whole(rows[:, :10]), rows[:, 10].long()).backward()
            norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.7) for m in (part, whole)]
            torch.testing.assert_close(norms[0].full_tensor(), norms[1])
            optimizer.step()
            other.step()
assert run.step >= 10
for name, part, optimizer, whole, other in sides:
    pairs = zip(part.parameters(), whole.parameters())
    apart = max(float((p.full_tensor() - q).detach().abs().max()) for p, q in pairs)
    assert apart < 2e-6, (name, apart)
    ours = run.evaluate(lambda a, b: {"loss": F.cross_entropy(part(a), b, reduction="none")}, data, batch_size=20)
    with torch.no_grad():
        theirs = float(F.cross_entropy(whole(data.tensors[0]), data.tensors[1]))
    assert abs(ours["loss"] - theirs) < 1e-5, (ours, theirs)
print(f"EQUAL {run.rank} {held:.3f}", flush=True)
"""

TRAINED = """
import sys, torch, paceline
from torch import nn
from torch.nn import functional as F

run = paceline.join(progress="off")
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(64, 10), torch.randint(7, (64,)))
loader = run.loader(data, batch_size=16 // run.size)
model = run.model(nn.Sequential(nn.Linear(10, 133), nn.ReLU(), nn.Linear(133, 101), nn.Linear(101, 7)))
optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01), model)
for epoch in run.epochs(int(sys.argv[1])):
    for a, b in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(a), b).backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("members", "mesh"),
    [
        ("2", "shard=2"),
        pytest.param("4", "shard=2", marks=pytest.mark.slow),
        pytest.param("4", "replicate=1,shard=4", marks=pytest.mark.slow),
    ],
)
def test_it_equals_a_single_process(members: str, mesh: str, tmp_path: Path) -> None:
    done = run(tmp_path, EQUAL, "-n", members, "--mesh", mesh)
    assert done.returncode == 0, done.stderr
    told = [line.split("EQUAL ")[1].split() for line in done.stdout.splitlines() if "EQUAL " in line]
    assert len(told) == int(members)
    share = 1 / int(mesh.rsplit("=", 1)[1])
    assert all(float(held) == pytest.approx(share, abs=0.03) for _, held in told)


@pytest.mark.slow
def test_checkpoints_pass_between_meshes_bit_by_bit(tmp_path: Path) -> None:
    """Each loads what the first had written, and trains nothing."""
    meshes = [("2", "shard=2"), ("4", "shard=2"), ("1", ""), ("4", "shard=4"), ("2", "")]
    check_meshes(tmp_path, TRAINED, meshes)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["-n", "3", "--mesh", "shard=2"], "needs a multiple of 2 members, and there are 3: start 2 or 4"),
        (["-n", "2", "--mesh", "shards=2"], "unknown dimension 'shards': did you mean 'shard'?"),
        (["-n", "2:4", "--mesh", "shard=2"], "--mesh replicate=2,shard=2 does not go with -n MIN:MAX"),
        (["-n", "2", "--mesh", "shard=2", "--precision", "fp16"], "precision fp16 and mesh shard=2"),
        (["-n", "2", "--mesh", "shard=2", "--strategy", "async"], "--mesh shard=2 does not go with --strategy async"),
        (
            ["-n", "2", "--mesh", "shard=2", "--strategy", "zero(stage=1)"],
            "does not go with --strategy zero(stage=1): zero",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_starts(args: list[str], said: str, tmp_path: Path) -> None:
    check_refused(tmp_path, TRAINED, args, said)


def test_a_script_that_does_not_cut_its_model_is_told_how(tmp_path: Path) -> None:
    done = run(tmp_path, TRAINED.replace("run.model(", "("), "-n", "2", "--mesh", "shard=2", more=("1",))
    assert "write model = run.model(model) before the optimizer is made" in done.stderr


@pytest.mark.slow
def test_parts_compute_in_bf16_as_wholes_do(tmp_path: Path) -> None:
    ended = []
    for mesh in ("shard=2", ""):
        args = ["-n", "2", "--mesh", mesh, "--precision", "bf16", "--name", mesh or "whole"]
        done = run(tmp_path, TRAINED + SAVED, *args, more=("2",))
        assert done.returncode == 0, done.stderr
        ended.append(saved(tmp_path)[0])
    for name, value in ended[0].items():
        torch.testing.assert_close(value, ended[1][name], rtol=0.05, atol=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["allreduce", "local(every=2)", "diloco(every=2)"])
def test_replicas_agree_by_any_strategy(strategy: str, tmp_path: Path) -> None:
    """Replicas of two members each end as whole replicas do that train on the same batches."""
    script = TRAINED.replace("batch_size=16 // run.size", "batch_size=4") + SAVED
    ended = []
    for members, mesh in (("4", "shard=2"), ("2", "")):
        text = script if mesh else script.replace("batch_size=4", "batch_size=8")
        done = run(
            tmp_path, text, "-n", members, "--mesh", mesh, "--strategy", strategy, "--name", f"n{members}", more=("2",)
        )
        assert done.returncode == 0, done.stderr
        ended.append(saved(tmp_path)[0])
    for name, value in ended[0].items():
        torch.testing.assert_close(value, ended[1][name], rtol=1e-4, atol=2e-6)


OWN_WEIGHTS = """
import torch
from torch import nn

def small(module):
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(10, 64), nn.Linear(64, 10)
        self.first, self.last = nn.Linear(10, 7), nn.Linear(10, 7, bias=False)
        self.scale = nn.Parameter(0.5 * torch.ones(10))
        self.register_buffer("mask", torch.tensor([1.0, 0.0]).repeat(5))
        self.apply(small)
        self.last.weight = self.first.weight
    def forward(self, x):
        h = x * self.scale + self.down(torch.relu(self.up(x))) * self.mask
        return self.first(h) + self.last(h)
"""


def test_a_function_makes_a_model_part_by_part(tmp_path: Path) -> None:
    """The same weights on any mesh, though no member has ever had all of them: those that the constructor gives."""
    of_layers = "nn.Sequential(nn.Linear(10, 133), nn.ReLU(), nn.Linear(133, 101), nn.Linear(101, 7))"
    assert of_layers in TRAINED
    script = OWN_WEIGHTS + TRAINED.replace(of_layers, "Own") + SAVED
    ended = []
    for mesh in ("shard=2", "split=2", "replicate=2"):
        text = script.replace("16 // run.size", "16") if mesh == "split=2" else script  # its members read the same
        done = run(tmp_path, text, "-n", "2", "--mesh", mesh, "--name", mesh[:2], more=("1",))
        assert done.returncode == 0, done.stderr
        ended.append(saved(tmp_path)[0])
    for other in ended[:2]:
        for name, value in other.items():
            torch.testing.assert_close(value, ended[2][name], rtol=1e-4, atol=2e-6)


ADDED_UP = """
        optimizer.zero_grad()
        with run.accumulate():
            F.cross_entropy(model(a[:2]), b[:2]).mul(0.5).backward()
        F.cross_entropy(model(a[2:]), b[2:]).mul(0.5).backward()
        optimizer.step()
"""


@pytest.mark.slow
def test_passes_that_are_added_up_are_one_step(tmp_path: Path) -> None:
    """Two passes of half a batch each, on replicas that are cut, equal one pass on whole ones."""
    once = TRAINED.replace("batch_size=16 // run.size", "batch_size=4") + SAVED
    step = once[once.index("        optimizer.zero_grad()") : once.index("run._strategy")]
    ended = []
    for script, mesh in ((once.replace(step, ADDED_UP.lstrip("\n")), "shard=2"), (once, "")):
        done = run(tmp_path, script, "-n", "4", "--mesh", mesh, "--name", mesh or "whole", more=("2",))
        assert done.returncode == 0, done.stderr
        ended.append(saved(tmp_path)[0])
    for name, value in ended[0].items():
        torch.testing.assert_close(value, ended[1][name], rtol=1e-4, atol=2e-6)


TIED = """
import copy, torch, paceline
from torch import nn
from torch.nn import functional as F

run = paceline.join(progress="off", checkpoint_keep=0)
torch.manual_seed(0)
shared = nn.Linear(64, 64)
made = nn.Sequential(nn.Embedding(200, 64), shared, nn.Linear(64, 160), nn.ReLU(), nn.Linear(160, 64), shared,
                     nn.Linear(64, 200, bias=False))
made[6].weight = made[0].weight
whole, model = copy.deepcopy(made), run.model(made)
assert model[6].weight is model[0].weight
sides = [(whole, torch.optim.SGD(whole.parameters(), lr=0.5))]
sides.append((model, run.optimizer(torch.optim.SGD(model.parameters(), lr=0.5), model)))
x, y = torch.randint(200, (16,)), torch.randint(200, (16,))
for step in range(4):
    for side, optimizer in sides:
        optimizer.zero_grad()
        F.cross_entropy(side(x), y).backward()
        optimizer.step()
for p, q in zip(model.parameters(), whole.parameters(), strict=True):
    torch.testing.assert_close(p.full_tensor(), q)
print("TIED", flush=True)
"""


def test_layers_that_share_tensors_keep_sharing_them(tmp_path: Path) -> None:
    done = run(tmp_path, TIED, "-n", "2", "--mesh", "shard=2")
    assert done.stdout.count("TIED") == 2, done.stderr


def test_a_gradient_that_is_not_finite_is_named(tmp_path: Path) -> None:
    script = TRAINED.replace("F.cross_entropy(model(a), b)", "(F.cross_entropy(model(a), b) * float('inf'))")
    done = run(tmp_path, script, "-n", "2", "--mesh", "shard=2", "--check-finite", more=("1",))
    assert "a gradient is not finite: parameter '0.weight' on member 0, parameter '0.weight' on member 1" in done.stderr


def test_a_member_that_is_killed_ends_the_run_and_leaves_nothing_behind(tmp_path: Path) -> None:
    check_killed(tmp_path, TRAINED, "shard=2")


@pytest.mark.slow
def test_parts_in_host_memory_are_stepped_by_fused_kernels_and_learn_the_same(tmp_path: Path) -> None:
    seen = """
fused = []
optimizer.register_step_pre_hook(lambda *_: fused.append(optimizer.param_groups[0]["fused"]))
for epoch in"""
    end = """
total = sum(float(p.full_tensor().detach().double().square().sum()) for p in model.parameters())
print("END", total, set(fused), optimizer.param_groups[0]["fused"], flush=True)
"""
    found = []
    for options in "", ", offload='parameters'":
        script = TRAINED.replace("nn.Linear(101, 7)))", f"nn.Linear(101, 7)){options})").replace("\nfor epoch in", seen)
        done = run(tmp_path, script + end, "-n", "2", "--mesh", "shard=2", "--fresh", more=("3",))
        assert done.returncode == 0, done.stderr
        found.append(next(line.split("END ")[1] for line in done.stdout.splitlines() if "END" in line))
    plain, hosted = (float(text.split()[0]) for text in found)
    assert hosted == pytest.approx(plain, rel=1e-6)
    assert [text.split(maxsplit=1)[1] for text in found] == ["{None} None", "{True} None"]
