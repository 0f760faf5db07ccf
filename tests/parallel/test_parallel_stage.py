"""Replicas in stages: what they equal, what a member holds, and how checkpoints pass between meshes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from paceline.testing.hosts import Hosts
from tests.parallel._runs import SAVED, check_killed, check_meshes, run, saved

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
        self.norm, self.head = nn.LayerNorm(wide), nn.Linear(wide, 11, bias=False)
        nn.init.normal_(self.table.weight, std=0.1)
        self.head.weight = self.table.weight  # used by the first and the last stage

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
        x = begin = torch.tanh(self.first(x.to(self.scale)))
        kept = []
        for layer in self.down:
            kept.append(x)
            x = torch.relu(layer(x))
        x, state = self.memory(x[:, None])
        rows = x.size(0)
        for layer in self.up:
            x = torch.relu(layer(x.reshape(rows, -1) + kept.pop()))
        return self.last((x + begin * 0.5 + state[0]) * self.scale)

class Apart(nn.Module):  # the second of three stages gives out something that the first has no part in
    def __init__(self, wide=24):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(10, wide), nn.Linear(3, wide), nn.Linear(wide, wide)
        self.norm, self.d = nn.LayerNorm(wide), nn.Linear(wide, 7)

    def forward(self, x):
        x = self.a(x.to(self.a.weight))
        free = self.b(torch.ones(1, 3))
        x = torch.relu(self.c(x))
        return self.d(self.norm(x) * free)

class Twice(nn.Module):  # changes what comes from another stage in place, and uses its weights two times
    def __init__(self, wide=24):
        super().__init__()
        self.inner = nn.Linear(wide, wide)

    def forward(self, x):
        return self.inner(torch.tanh(self.inner(F.relu(x, inplace=True))))

def again():
    return nn.Sequential(nn.Linear(10, 24), *(Twice() for _ in range(5)), nn.Linear(24, 7))

def sequential():
    return nn.Sequential(nn.Linear(10, 40), nn.Tanh(), nn.Linear(40, 30), nn.Sequential(nn.ReLU(), nn.Linear(30, 20)),
                         nn.Linear(20, 20), nn.LayerNorm(20), nn.Linear(20, 30), nn.Linear(30, 20), nn.Linear(20, 7))

MADE = {"sequential": sequential, "gpt": GPT, "skips": Skips, "apart": Apart, "again": again}
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
torch.set_default_dtype(torch.float64)  # so that rounding, which AdamW enlarges, is far from an error
rows = 43 * run._share()[1]  # batches of 12, 12, 12, 7 for each share: the last has fewer samples than micro-batches
data = torch.utils.data.TensorDataset(torch.randint(11, (rows, 10)), torch.randint(7, (rows,)))
if kind in ("sequential", "again"):
    data.tensors = (torch.randn(rows, 10), data.tensors[1])
loader = run.loader(data, batch_size=12)
made = MADE[kind]()
sides = []
for name, make in OPTIMIZERS.items():
    whole = copy.deepcopy(made)
    options = {"cut": ["b", "norm"]} if kind == "apart" else {"recompute": name == "adamw" and kind == "gpt"}
    part = run.model(copy.deepcopy(made), schedule=schedule, **options)
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
            assert abs(float(mine - alone)) < 1e-9, (name, steps, mine, alone)
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
    assert apart < 1e-9, (name, apart)
    ours = run.evaluate(lambda a, b: {"loss": F.cross_entropy(part(a), b, reduction="none")}, data, batch_size=20)
    with torch.no_grad():
        theirs = float(F.cross_entropy(whole(data.tensors[0]), data.tensors[1]))
    assert abs(ours["loss"] - theirs) < 1e-9, (ours, theirs)
print(f"EQUAL {run.rank} {held:.3f}", flush=True)
"""
)


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
            if (kind, schedule) not in (("gpt", "1f1b"), ("skips", "zero-bubble"))
        ),
        *(
            pytest.param("4", "stage=4", kind, schedule, marks=SLOW)
            for kind, schedule in [("gpt", "1f1b"), ("skips", "interleaved"), ("sequential", "zero-bubble")]
        ),
        pytest.param("3", "stage=3", "apart", "zero-bubble", marks=SLOW),
        pytest.param("2", "stage=2", "again", "interleaved", marks=SLOW),
        pytest.param("2", "stage=2", "again", "zero-bubble", marks=SLOW),
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


ON_A_HOST = """
import os, runpy, sys
os.environ |= {"RANK": os.environ["HOSTS_RANK"], "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
os.environ |= {"MASTER_ADDR": os.environ["HOSTS_FIRST_IP"], "MASTER_PORT": "29511"}
import torch
torch.set_num_threads(1)
runpy.run_path(sys.argv[1], run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.skipif(bool(Hosts.missing()), reason=Hosts.missing())
def test_stages_of_two_hosts_equal_a_single_process(tmp_path: Path) -> None:
    """Through encrypted channels, at 100 Mbit/s."""
    script = EQUAL.replace("sys.argv[1:]", "'gpt', 'interleaved'").replace("join(", "join(mesh='stage=2', name='it', ")
    (tmp_path / "train.py").write_text(
        script + "assert len(set(m.host for m in run._world.wires.view.members)) == 2\n"
        "assert all(channel.encrypted for channel in run._world.wires.mesh._channels.values())\n"
    )
    with Hosts(2, rate="100mbit") as hosts:
        done = hosts.run([sys.executable, "-c", ON_A_HOST, str(tmp_path / "train.py")], limit_s=120)
    assert [member.code for member in done] == [0, 0], done
    assert all(f"EQUAL {rank}" in member.output for rank, member in enumerate(done))


TRAINED = (
    MODELS
    + """
run = paceline.join(progress="off")
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randint(11, (64, 10)), torch.randint(7, (64,)))
loader = run.loader(data, batch_size=16 // run._share()[1] if run._cut else 16 // run.size)
model = run.model(GPT())
weights = [p for p in model.parameters() if p.ndim > 1]
groups = [{"params": weights}, {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0}]
optimizer = run.optimizer(torch.optim.AdamW(groups, lr=0.01), model)
for epoch in run.epochs(int(sys.argv[1])):
    for a, b in loader:
        optimizer.zero_grad()
        loss = run.backward(model, a, b, loss=F.cross_entropy)
        optimizer.step()
"""
)


@pytest.mark.slow
def test_checkpoints_pass_between_meshes_bit_by_bit(tmp_path: Path) -> None:
    """Each loads what the first had written, and trains nothing."""
    meshes = [
        ("2", "stage=2"),
        ("4", "stage=4"),
        ("1", ""),
        ("2", "shard=2"),
        ("4", "shard=2,stage=2"),
        ("2", "stage=2"),
    ]
    _, (names, _, _) = check_meshes(tmp_path, TRAINED, meshes)
    assert len(names) == 2


@pytest.mark.slow
def test_a_run_goes_on_in_stages_where_it_stopped(tmp_path: Path) -> None:
    """One epoch on two stages and one on four end as two epochs in one process do."""
    ended = []
    for parts in ([("2", "stage=2", "1"), ("4", "stage=4", "2")], [("1", "", "2")]):
        for members, mesh, epochs in parts:
            name = f"n{len(parts)}"
            done = run(tmp_path, TRAINED + SAVED, "-n", members, "--mesh", mesh, "--name", name, more=(epochs,))
            assert done.returncode == 0, done.stderr
        ended.append(saved(tmp_path))
    (first, names), (second, called) = ended
    assert names == called
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], rtol=1e-3, atol=1e-3 if "model" in name else 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["allreduce", "local(every=2)", "diloco(every=2)"])
def test_replicas_agree_by_any_strategy(strategy: str, tmp_path: Path) -> None:
    """Replicas of two members each end as whole replicas do that train on the same batches."""
    script = "import torch\ntorch.set_default_dtype(torch.float64)\n" + TRAINED + SAVED
    ended = []
    for members, mesh in (("4", "replicate=2,stage=2"), ("2", "")):
        args = ("-n", members, "--mesh", mesh, "--strategy", strategy, "--name", f"n{members}")
        done = run(tmp_path, script, *args, more=("2",))
        assert done.returncode == 0, done.stderr
        ended.append(saved(tmp_path))
    (first, names), (second, called) = ended
    assert names == called
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], rtol=1e-7, atol=1e-9)


CONSTANT = """
class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(10, 5), nn.Linear(5, 2)
    def forward(self, x):
        return self.b(self.a(x)) + torch.full((2,), 3.0)
shifted = run.model(Shifted)
with torch.no_grad():
    print("OUT", float(shifted(torch.ones(4, 10)).sum()), flush=True)
"""


def test_a_function_makes_a_model_stage_by_stage(tmp_path: Path) -> None:
    """The same weights on any mesh, though no member has ever had all of them; stages begin where they are told to."""
    script = TRAINED.replace(
        "run.model(GPT())", "run.model(sequential, cut=['5'])\nprint('HAS', [n for n, _ in model.named_parameters()])"
    )
    script += CONSTANT
    ended, outs = [], []
    for mesh in ("stage=2", "replicate=2"):
        done = run(tmp_path, script + SAVED, "-n", "2", "--mesh", mesh, "--name", mesh[0], more=("0",))
        assert done.returncode == 0, done.stderr
        outs.append(done.stdout.split("OUT ")[1].split()[0])
        if mesh == "stage=2":
            assert "[1] HAS ['5.weight', '5.bias', '6.weight'" in done.stdout
        ended.append(saved(tmp_path))
    assert outs[0] == outs[1]
    (first, names), (second, called) = ended
    assert first["model.0.0.weight"].std() > 0.1
    assert names == called
    assert all(torch.equal(value, second[name]) for name, value in first.items())


ADDED_UP = """
        optimizer.zero_grad()
        with run.accumulate():
            run.backward(model, a[:7], b[:7], loss=lambda out, y: F.cross_entropy(out, y) * 7 / 16)
        run.backward(model, a[7:], b[7:], loss=lambda out, y: F.cross_entropy(out, y) * 9 / 16)
        optimizer.step()
"""


@pytest.mark.slow
def test_passes_that_are_added_up_are_one_step(tmp_path: Path) -> None:
    """Two passes of a part of a batch each, in stages, equal one pass of a whole model."""
    once = "import torch\ntorch.set_default_dtype(torch.float64)\n" + TRAINED + SAVED
    step = once[once.index("        optimizer.zero_grad()") : once.index("run._strategy")]
    ended = []
    for script, members, mesh in ((once.replace(step, ADDED_UP.lstrip("\n")), "2", "stage=2"), (once, "1", "")):
        done = run(tmp_path, script, "-n", members, "--mesh", mesh, "--name", mesh or "whole", more=("2",))
        assert done.returncode == 0, done.stderr
        ended.append(saved(tmp_path))
    (first, names), (second, called) = ended
    assert names == called
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], rtol=1e-7, atol=1e-9)


@pytest.mark.slow
def test_stages_compute_in_bf16_as_wholes_do(tmp_path: Path) -> None:
    ended = []
    for members, mesh in (("2", "stage=2"), ("1", "")):
        args = ["-n", members, "--mesh", mesh, "--precision", "bf16", "--name", mesh or "whole"]
        done = run(tmp_path, TRAINED + SAVED + "print('LOSS', loss.dtype)", *args, more=("2",))
        assert done.returncode == 0, done.stderr
        assert "LOSS torch.float32" in done.stdout
        ended.append(saved(tmp_path))
    (first, names), (second, called) = ended
    assert names == called
    for name, value in first.items():
        if name.startswith("model"):
            torch.testing.assert_close(value, second[name], rtol=0.1, atol=0.05)


DROPOUT = (
    MODELS
    + """
run = paceline.join(progress="off", checkpoint_keep=0)
model = run.model(nn.Sequential(*[layer for _ in range(2) for layer in (nn.Linear(50, 50), nn.Dropout(0.5))]))
optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.0), model)
seen = []
torch.nn.modules.dropout.F.dropout, real = lambda x, *more: seen.append(real(torch.ones_like(x), *more)) or x, F.dropout
torch.manual_seed(5)
for _ in range(2):
    run.backward(model, torch.ones(4, 50), torch.ones(4, 50), loss=F.mse_loss)
drawn = torch.rand(1)
both = run.group.all_gather(torch.cat(seen))
assert (both[0] == 0).any() and not torch.equal(both[0], both[1])  # stages drop unlike elements
assert not torch.equal(both[0][:4], both[0][4:])  # and other ones the next time
assert len({float(d) for d in run.group.all_gather(drawn)}) == 1  # the script's own numbers stay the same on all
print("DROPPED")
"""
)


def test_stages_drop_unlike_elements(tmp_path: Path) -> None:
    done = run(tmp_path, DROPOUT, "-n", "2", "--mesh", "stage=2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("DROPPED") == 2


def test_a_gradient_that_is_not_finite_is_named(tmp_path: Path) -> None:
    script = TRAINED.replace("loss=F.cross_entropy", "loss=lambda out, y: F.cross_entropy(out, y) * float('inf')")
    done = run(tmp_path, script, "-n", "2", "--mesh", "stage=2", "--check-finite", more=("1",))
    assert (
        "a gradient is not finite: parameter 'places' on member 0, parameter 'table.weight' on member 1" in done.stderr
    )


def test_a_member_that_is_killed_ends_the_run_and_leaves_nothing_behind(tmp_path: Path) -> None:
    check_killed(tmp_path, TRAINED, "stage=2")


def test_members_of_a_pipeline_that_have_other_batches_are_told(tmp_path: Path) -> None:
    script = TRAINED.replace("run.backward(model, a, b,", "run.backward(model, a, b.roll(run.rank),")
    done = run(tmp_path, script, "-n", "2", "--mesh", "stage=2", more=("1",))
    assert done.returncode == 1
    assert "members that work on one batch were given different ones" in done.stderr


REFUSED = (
    MODELS
    + """
run = paceline.join(progress="off", checkpoint_keep=0)
class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(10, 10), nn.Linear(10, 7)
    def forward(self, x):
        if x.sum() > 0: x = self.one(x)  # looks at values
        return self.two(x)
class Rows(Branches):
    def forward(self, x):
        for row in x: return row
class Mode(Branches):
    def forward(self, x):
        return self.two(F.dropout(self.one(x), 0.5, self.training))
class Drawn(Branches):
    def forward(self, x):
        if torch.rand(1) < 0.5: x = self.one(x)  # not once for all
        return self.two(x)
class Noise(Branches):
    def forward(self, x):
        return self.two(self.one(x) + torch.randn(10))
def tied():
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10))
    model[1].weight = model[0].weight
    return model
def tried(what, *said):
    try:
        what()
    except paceline.ConfigError as error:
        assert all(word in str(error) for word in said), str(error)
    else:
        raise AssertionError(said)
def trained(model, *batch, **options):
    part = run.model(model)
    run.optimizer(torch.optim.SGD(part.parameters(), lr=0.1), part)
    return run.backward(part, *batch, **options)
torch.manual_seed(run.seed)
x, y = torch.randn(8, 10), torch.randint(7, (8,))
two = lambda: nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 7))
tried(lambda: run.model(Branches()), "train.py:", "if x.sum() > 0", "Let forward not depend", "--mesh shard=N")
tried(lambda: run.model(Rows()), "for row in x: return row (Proxy object cannot be iterated). Let forward")
tried(lambda: run.model(Drawn()), "train.py:", "if torch.rand(1) < 0.5")
tried(lambda: run.model(Mode()), "looks at self.training", "nn.Dropout(p)")
tried(lambda: run.model(nn.Sequential(nn.Linear(10, 7))), "2 stages need as many layers with weights, and 1 were found")
tried(lambda: run.model(two(), schedule="1f1"), "1f1", "did you mean '1f1b'")
tried(lambda: run.model(two(), schedule="interleaved"), "4 stages need")
tried(lambda: run.model(two(), micro=-1), "micro=-1")
tried(lambda: run.model(two(), micro="8"), "micro='8'")
tried(lambda: run.model(run.model(two())), "this model is cut already")
tried(lambda: copy.deepcopy(run.model(two())), "a model that is cut cannot be copied")
if run.is_first:
    from paceline.parallel.balance import costs_of, layers_of
    from paceline.parallel.trace import follow
    model, odd = two(), (torch.ones(4, 3),)
    found = follow(model)
    costs = lambda: costs_of(layers_of(found.graph, model), found, model, odd, torch.device("cpu"))
    tried(costs, "cannot be called with this example, of shapes [4, 3]")
tried(lambda: run.model(two(), cut="1"), "cut=['1']")
tried(lambda: run.model(two(), cut=["7"]), "no layer '7'")
tried(lambda: run.model(two(), cut=["0"]), "would come before")
tried(lambda: run.model(two(), cut=["0", "1"]), "2 stages need 1 names")
tried(lambda: run.model(two(), offload="parameters"), "--mesh shard=2")
tried(lambda: run.model(tied), "'0.weight' and '1.weight'", "give run.model the model itself")
tried(lambda: trained(two(), x), "an input and a target")
wanted = "takes what its forward needs (input), and nothing else", "take it away from those that are wanted"
tried(lambda: trained(two(), x, x, y, loss=F.cross_entropy), *wanted)
tried(lambda: trained(two(), torch.tensor(1.0), y, loss=F.cross_entropy), "a sample in each row")
tried(lambda: run.backward(run.model(two()), x, y, loss=F.cross_entropy), "give the model and its optimizer to")
tried(lambda: run.model(two())(x), "loss = run.backward(model, x, y, loss=F.cross_entropy)")
backwards = run.model(nn.Sequential(*two(), *two()[:1], nn.Linear(10, 7)), cut=["2"])
tried(lambda: run.optimizer(torch.optim.SGD(list(backwards.parameters())[::-1], lr=0.1), backwards), "in the order of")
noise = run.model(Noise())
with torch.no_grad():
    assert not torch.equal(noise(x), noise(x))  # drawn anew in each pass
print("REFUSED", flush=True)
"""
).replace("trained(two(), x),", "trained(two(), x, loss=F.cross_entropy),")


def test_what_does_not_fit_is_refused_in_words(tmp_path: Path) -> None:
    done = run(tmp_path, REFUSED, "-n", "2", "--mesh", "stage=2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("REFUSED") == 2


@pytest.mark.slow
def test_what_does_not_go_together_is_refused(tmp_path: Path) -> None:
    script = TRAINED.replace("GPT())", "GPT(), schedule='zero-bubble')")
    done = run(tmp_path, script, "-n", "4", "--mesh", "shard=2,stage=2", more=("1",))
    assert "shards send gradients at the end of each" in done.stderr
