"""Models that are split: what they equal, what a member holds, and how checkpoints pass between meshes."""

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
shape = (21 * run.size // split, 9)
data = torch.utils.data.TensorDataset(torch.randint(37, shape), torch.randint(37, shape))
loader = run.loader(data, batch_size=4)
for case in sys.argv[1].split(","):
    make, options = CASES[case]
    made = make().eval()
    sides = []
    for name, optimizer in OPTIMIZERS.items():
        if name != "adamw" and case not in ("mlp", "gpt", "gpt-vocabulary", "towers"):
            continue
        whole, part = copy.deepcopy(made), run.model(copy.deepcopy(made), **options)
        own = run.optimizer(optimizer(part.parameters()), part)
        sides.append((name, part, own, whole, optimizer(whole.parameters())))
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
                each = F.cross_entropy(part(a).flatten(0, 1), b.flatten(), reduction="none")
                each.view(len(a), -1)[: real or None].mean().backward()
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
        loss = lambda a, b: {"loss": F.cross_entropy(part(a).flatten(0, 1), b.flatten())}
        ours = run.evaluate(loss, data, batch_size=5)
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


@pytest.mark.slow
def test_checkpoints_pass_between_meshes_bit_by_bit(tmp_path: Path) -> None:
    """Each loads what the first had written, and trains nothing."""
    meshes = [
        ("2", "split=2"),
        ("4", "split=4"),
        ("1", ""),
        ("2", "shard=2"),
        ("4", "shard=2,split=2"),
        ("2", "split=2"),
    ]
    state, _ = check_meshes(tmp_path, TRAINED, meshes)
    assert state["model.0.h.0.attn.c_attn.weight"].shape == (144, 48)


@pytest.mark.slow
def test_a_run_goes_on_on_another_mesh(tmp_path: Path) -> None:
    """An epoch on two members of a split and one on a single member end where two epochs on one do."""
    ended = []
    for name, meshes in (("moved", ["split=2", ""]), ("one", ["", ""])):
        for epochs, mesh in enumerate(meshes, 1):
            args = ["-n", "2" if mesh else "1", "--mesh", mesh, "--name", name]
            done = run(tmp_path, TRAINED + SAVED, *args, more=(str(epochs),))
            assert done.returncode == 0, done.stderr
        ended.append(saved(tmp_path)[0])
    assert float(ended[0]["optimizer.0.0.step"]) == 8
    for name, value in ended[0].items():
        if name.startswith("model"):
            torch.testing.assert_close(value, ended[1][name], rtol=0.02, atol=0.01)


def test_a_function_makes_a_model_part_by_part(tmp_path: Path) -> None:
    """The same weights on any mesh, though no member has ever had all of them."""
    script = TRAINED.replace("run.model(GPT(dropout=0.0))", "run.model(lambda: GPT(), split=GPT_PLAN)") + SAVED
    ended = []
    for mesh in ("split=2", "replicate=2"):
        done = run(tmp_path, script, "-n", "2", "--mesh", mesh, "--name", mesh[0], more=("0",))
        assert done.returncode == 0, done.stderr
        ended.append(saved(tmp_path)[0])
    assert ended[0]["model.0.h.0.attn.c_attn.weight"].std() > 0.05
    assert all(torch.equal(value, ended[1][name]) for name, value in ended[0].items())


# What is whole must be the same on all members of a split, though nobody has seeded anything.
DROPPED = (
    TRAINED.replace("dropout=0.0", "dropout=0.3").replace("torch.manual_seed(0)", "torch.manual_seed(run.rank)")
    + """
from paceline.parallel.pieces import is_cut, local
outs = run.group.all_gather(model(data.tensors[0][:4]).detach())
assert all(torch.equal(out, outs[0]) for out in outs)
assert not torch.equal(outs[0], model(data.tensors[0][:4]).detach())
for name, p in model.named_parameters():
    if all(str(place) == "R" for place in p.placements):
        assert all(torch.equal(mine, local(p)) for mine in run.group.all_gather(local(p.detach()))), name
print("ALIKE", flush=True)
"""
)


@pytest.mark.parametrize("how", ["", pytest.param("sequence", marks=pytest.mark.slow)])
def test_members_of_a_split_drop_the_same_of_what_is_whole(how: str, tmp_path: Path) -> None:
    script = DROPPED.replace("run.model(GPT(dropout=0.3))", "run.model(GPT(dropout=0.3), sequence=True)")
    script = script.replace("torch.manual_seed(run.rank)\ndata", "torch.manual_seed(0)\ndata")
    script = script.replace("share, of =", "torch.manual_seed(run.rank)\nshare, of =")
    done = run(
        tmp_path, script if how else script.replace(", sequence=True", ""), "-n", "2", "--mesh", "split=2", more=("1",)
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ALIKE") == 2


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["allreduce", "local(every=2)"])
def test_replicas_agree_by_any_strategy(strategy: str, tmp_path: Path) -> None:
    script = "import torch; torch.set_default_dtype(torch.float64)\n" + TRAINED + SAVED
    ended = []
    for members, mesh in (("4", "split=2"), ("2", "")):
        args = ["-n", members, "--mesh", mesh, "--strategy", strategy, "--name", f"n{members}"]
        done = run(tmp_path, script, *args, more=("2",))
        assert done.returncode == 0, done.stderr
        ended.append(saved(tmp_path)[0])
    for name, value in ended[0].items():
        torch.testing.assert_close(value, ended[1][name], rtol=1e-6, atol=1e-8)


@pytest.mark.slow
def test_parts_compute_in_bf16_as_wholes_do(tmp_path: Path) -> None:
    ended = []
    for mesh in ("split=2", "replicate=2"):
        args = ["-n", "2", "--mesh", mesh, "--precision", "bf16", "--name", mesh]
        script = TRAINED.replace("AdamW(model.parameters(), lr=0.01)", "SGD(model.parameters(), lr=0.1)") + SAVED
        done = run(tmp_path, script, *args, more=("2",))
        assert done.returncode == 0, done.stderr
        ended.append(saved(tmp_path)[0])
    for name, value in ended[0].items():
        torch.testing.assert_close(value, ended[1][name], rtol=0.05, atol=0.02)


def test_a_gradient_that_is_not_finite_is_named(tmp_path: Path) -> None:
    script = TRAINED.replace(".backward()", ".mul(float('inf')).backward()")
    done = run(tmp_path, script, "-n", "2", "--mesh", "split=2", "--check-finite", more=("1",))
    assert (
        "a gradient is not finite: parameter 'wte.weight' on member 0, parameter 'wte.weight' on member 1"
        in done.stderr
    )


REFUSED = [
    ("GPT(), split={'h.*.c_atn': 'qkv'}", "split={'h.*.c_atn': ...} matches no module of the model: did you mean"),
    ("GPT(), split={'h.*.c_attn': 'columns'}", "did you mean 'column'?"),
    ("GPT(), split={'h.*.c_attn': None}", "split={'h.*.c_attn': None}: known: 'branch', 'column'"),
    ("GPT(), split={'h.*.c_attn': True}", "split={'h.*.c_attn': True}: known: 'branch', 'column'"),
    ("GPT(), split={}", "split={} names no layers: leave split= out to have them found"),
    ("GPT(), split='column'", "split='column': kinds by patterns of names are wanted"),
    ("run.model(GPT())", "this model is cut already"),
    ("copy.deepcopy(run.model(GPT()))", "a model that is cut cannot be copied"),
    ("3", "a model is wanted, or a function that makes one; not a int"),
    ("GPT(), split={'h.0': 'column'}", "matches 'h.0', a Block: column goes with an Embedding or a Linear"),
    ("GPT(), split={'h.0': 'column'}", "name the layers within it, as in 'h.0.*'"),
    ("GPT(), split={'ln_f': 'column'}", "column goes with an Embedding or a Linear; leave it out"),
    ("GPT(heads=3)", "split=2: h.0.attn.c_attn has 3 heads, which 2 members cannot share evenly"),
    ("GPT(tied=True), split={'wte': 'vocabulary'}", "lm_head.weight and wte.weight are one tensor: name both"),
    ("nn.Linear(3, 3)", "no layers were found that are known to split"),
    ("nn.Sequential(nn.Conv2d(3, 3, 3), nn.Linear(3, 3))", "--mesh shard=N goes with any layers"),
    ("GPT(), split={'h.0.mlp': 2}", "split={'h.0.mlp': 2}: members of the split are 0 to 1"),
    ("GPT(), split={'h.0': 'branch', 'h.*.c_attn': 'qkv'}", "is within 'h.0', which is a branch"),
    ("GPT(), split={'h.*': 'branch'}, recompute=True", "goes with neither shard=N nor recompute=True"),
    ("GPT(), offload='parameters'", "parts lie in host memory where there are: --mesh shard=2"),
    ("nn.MultiheadAttention(6, 3)", "has 3 heads, which 2 members cannot share evenly"),
    ("nn.ModuleList([nn.PReLU(1)]), split={'0': 'heads'}", "heads goes with nn.MultiheadAttention"),
]
REFUSE = """
import copy, paceline, torch
from torch import nn
from _split_models import GPT
from paceline.core.errors import ConfigError

run = paceline.join(progress="off", checkpoint_keep=0)
for change, said in REFUSED:
    try:
        eval(f"run.model({change})")
    except ConfigError as error:
        assert said in str(error), (change, str(error))
    else:
        raise AssertionError(f"{change} was not refused")
model = run.model(GPT())
try:
    run.optimizer(torch.optim.Adafactor(model.parameters()), model)
except ConfigError as error:
    assert "Adafactor looks at whole tensors, of which members of a split have parts" in str(error), error
else:
    raise AssertionError("Adafactor was not refused")
print("REFUSED", flush=True)
"""


def test_what_cannot_be_split_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, REFUSE.replace("REFUSED:", f"{REFUSED!r}:"), "-n", "2", "--mesh", "split=2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("REFUSED") == 2


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["-n", "3", "--mesh", "split=2"], "needs a multiple of 2 members, and there are 3: start 2 or 4"),
        (["-n", "4", "--mesh", "split=2,stage=2"], "stages hold layers as they are, and splits change them; use one"),
        (["-n", "2", "--mesh", "split=0"], "split=0 has no members; write split=1, or leave it out"),
        (["-n", "2", "--mesh", "split=2", "--precision", "fp16"], "precision fp16 and mesh split=2"),
        (["-n", "2", "--mesh", "split=2", "--strategy", "async"], "--mesh split=2 does not go with --strategy async"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_starts(args: list[str], said: str, tmp_path: Path) -> None:
    check_refused(tmp_path, TRAINED, args, said)


def test_a_plan_is_checked_in_a_run_of_one(tmp_path: Path) -> None:
    script = TRAINED.replace("GPT(dropout=0.0)", "GPT(), split={'*.c_atn': 'qkv'}")
    done = run(tmp_path, script, "-n", "1", more=("1",))
    assert "split={'*.c_atn': ...} matches no module of the model" in done.stderr


def test_a_member_that_is_killed_ends_the_run_and_leaves_nothing_behind(tmp_path: Path) -> None:
    check_killed(tmp_path, TRAINED, "split=2")


def test_members_of_a_split_that_have_other_batches_are_told(tmp_path: Path) -> None:
    script = TRAINED.replace(
        "        optimizer.zero_grad()\n", "        a = (a + run.rank) % 5\n        optimizer.zero_grad()\n", 1
    )
    done = run(tmp_path, script, "-n", "2", "--mesh", "split=2", more=("1",))
    assert done.returncode == 1
    assert "members that work on one batch were given different ones" in done.stderr
