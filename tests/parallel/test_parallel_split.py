"""Models that are split: what they equal, what a member holds, and how checkpoints pass between meshes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.parallel._split_runs import SAVED, run

# Every member trains a whole copy beside its part, on the batches of all: both must stay equal.
EQUAL = """
import copy, sys, torch, paceline
from torch import nn
from torch.nn import functional as F
from _split_models import CASES
from paceline.parallel.pieces import local, whole as put_together
from paceline.parallel.spread import GATHERED

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.003),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.02),
}
torch.set_default_dtype(torch.float64)
run = paceline.join(progress="off", checkpoint_keep=0)
split = run._cut.mesh.split
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randint(37, (21 * run.size // split, 9)), torch.randint(37, (21 * run.size // split, 9)))
loader = run.loader(data, batch_size=4)
for case in sys.argv[1].split(","):
    make, options = CASES[case]
    made = make().eval()
    sides = []
    for name, optimizer in OPTIMIZERS.items():
        whole, part = copy.deepcopy(made), run.model(copy.deepcopy(made), **options)
        sides.append((name, part, run.optimizer(optimizer(part.parameters()), part), whole, optimizer(whole.parameters())))
    CASES[case] = sides
    GATHERED.clear()
for epoch in run.epochs(2):
    for a, b in loader:
        real = loader.last_real
        everyone = run.group.all_gather(F.pad(torch.cat([a, b], 1), (0, 0, 0, 4 - len(a))))[::split]
        counts = [int(n) for n in run.group.all_gather(torch.tensor([real]))][::split]
        rows = torch.cat([batch[:n] for batch, n in zip(everyone, counts)])
        for case in sys.argv[1].split(","):
            for name, part, optimizer, whole, other in CASES[case]:
                optimizer.zero_grad()
                out, y = part(a), b
                F.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="none").view(len(a), -1)[: real or None].mean().backward()
                other.zero_grad()
                F.cross_entropy(whole(rows[:, :9]).flatten(0, 1), rows[:, 9:].flatten()).backward()
                norms = [float(n.full_tensor() if hasattr(n, "full_tensor") else n) for n in (
                    run.clip_grad_norm(part, 0.7), nn.utils.clip_grad_norm_(whole.parameters(), 0.7))]
                assert abs(norms[0] - norms[1]) < 1e-9 * norms[1], (case, name, norms)
                optimizer.step()
                other.step()
for case in sys.argv[1].split(","):
    for name, part, optimizer, whole, other in CASES[case]:
        pairs = list(zip(part.named_parameters(), whole.parameters()))
        apart = max(float((put_together(p.detach(), p) - q).detach().abs().max()) for (_, p), q in pairs)
        assert apart < 1e-8, (case, name, apart)
        for key, p in part.named_parameters():
            if all(str(place) == "R" for place in p.placements):
                assert all(torch.equal(mine, local(p)) for mine in run.group.all_gather(local(p.detach()))), key
        ours = run.evaluate(lambda a, b: {"loss": F.cross_entropy(part(a).flatten(0, 1), b.flatten())}, data, batch_size=5)
        with torch.no_grad():
            theirs = float(F.cross_entropy(whole(data.tensors[0]).flatten(0, 1), data.tensors[1].flatten()))
        assert abs(ours["loss"] - theirs) < 1e-8, (case, ours, theirs)
    held = sum(local(p).numel() for p in part.parameters()) / sum(p.numel() for p in whole.parameters())
    print(f"EQUAL {case} {held:.3f}", flush=True)
print("GATHERED", dict(GATHERED), flush=True)
"""

TRAINED = """
import sys, torch, paceline
from torch.nn import functional as F
from _split_models import GPT, GPT_PLAN

run = paceline.join(progress="off")
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randint(37, (32, 9)), torch.randint(37, (32, 9)))
share, of = run._share()
loader = run.loader(data, batch_size=8 // of)
model = run.model(GPT(dropout=0.0))
optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01), model)
for epoch in run.epochs(int(sys.argv[1])):
    for a, b in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(a).flatten(0, 1), b.flatten()).backward()
        optimizer.step()
"""

EVERY = "mlp,gpt,gpt-unfused,gpt-tied,gpt-vocabulary,gpt-sequence,gpt-recompute,gpt-odd,encoder,encoder-sequence"


@pytest.mark.parametrize(
    ("members", "mesh", "cases"),
    [
        ("2", "split=2", "mlp,gpt-vocabulary,towers"),
        pytest.param("2", "split=2", EVERY, marks=pytest.mark.slow),
        pytest.param("4", "split=4", f"{EVERY},towers", marks=pytest.mark.slow),
        pytest.param("4", "replicate=2,split=2", f"{EVERY},towers", marks=pytest.mark.slow),
        pytest.param("4", "shard=2,split=2", EVERY, marks=pytest.mark.slow),
    ],
)
def test_it_equals_a_single_process(members: str, mesh: str, cases: str, tmp_path: Path) -> None:
    done = run(tmp_path, EQUAL, "-n", members, "--mesh", mesh, more=(cases,))
    assert done.returncode == 0, done.stderr
    told = [line.split("EQUAL ")[1].split() for line in done.stdout.splitlines() if "EQUAL " in line]
    assert len(told) == int(members) * len(cases.split(","))
    share = 1 / int(mesh.rsplit("=", 1)[1]) / (2 if "shard" in mesh else 1)
    for case, held in told:
        if case.startswith("gpt") and case != "gpt-odd":
            assert share <= float(held) < share + 0.05
