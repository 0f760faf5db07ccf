"""A run that was killed anywhere and resumed ends with the bits of one that was not."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from paceline.core.settings import Settings
from paceline.strategies.replicas import names_of
from paceline.testing.cluster import Cluster, Finished
from paceline.train.groups import SavedOptimizer

# Everything that a resumed run could get wrong: dropout, a random transform, a scheduler stepped after the optimizer,
# momentum, buffers, an uneven last batch, an average kept by the user's own code.
SCRIPT = """
import hashlib, json, os, signal, sys, time
import torch, torch.nn.functional as F
import paceline

kill_rank, kill_at, moment = json.loads(sys.argv[1]) if len(sys.argv) > 1 else (-1, -1, "")
run = paceline.join(checkpoint_every_s=0.02)
seen = open(f"{run.dir}/seen-{run.rank}", "a")

class Noisy(torch.utils.data.Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(1)
        self.x, self.y = torch.randn(53, 6, generator=g), torch.randint(3, (53,), generator=g)
    def __len__(self):
        return 53
    def __getitem__(self, i):
        return self.x[i] + 0.1 * torch.randn(6), self.y[i], i

class Average:
    def __init__(self): self.total, self.count = torch.zeros(()), 0
    def state_dict(self): return {"total": self.total, "count": self.count}
    def load_state_dict(self, s): self.total, self.count = s["total"].clone(), s["count"]

class Centre(torch.nn.Module):  # a batch norm that takes single samples
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))
    def forward(self, x):
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return x - self.mean.clone()

torch.manual_seed(run.rank)
model = torch.nn.Sequential(torch.nn.Linear(6, 16), Centre(), torch.nn.ReLU(), torch.nn.Dropout(0.3),
                            torch.nn.Linear(16, 3))
optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.02), model)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=200)
average = Average()
run.track(scheduler=scheduler, average=average)
loader = run.loader(Noisy(), batch_size=4)
step = 0
for epoch in run.epochs(3):
    for x, y, index in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        step = run._meter.step + 1
        if (run.rank, step, "backward") == (kill_rank, kill_at, moment): os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        if (run.rank, step, "step") == (kill_rank, kill_at, moment): os.kill(os.getpid(), signal.SIGKILL)
        scheduler.step()
        average.total += loss.detach(); average.count += 1
        run.log(loss=loss)
        seen.write(f"{epoch} {index[:loader.last_real].tolist()}\\n"); seen.flush()
        time.sleep(0.005)
    if (run.rank, epoch, "epoch") == (kill_rank, kill_at, moment): os.kill(os.getpid(), signal.SIGKILL)
digest = hashlib.sha256()
for name, value in sorted(model.state_dict().items()): digest.update(name.encode() + value.numpy().tobytes())
if run.rank == 0: digest.update(average.total.numpy().tobytes())
rows = [hashlib.sha256(p.detach().numpy().tobytes()).hexdigest() for p in model.parameters()]
print("WEIGHTS", hashlib.sha256("".join(rows).encode()).hexdigest())
print("ALL", digest.hexdigest(), average.count, run._meter.step)
"""


def words(finished: list[Finished], key: str) -> list[str]:
    found = []
    for member in finished:
        assert member.code == 0, member.output
        found += re.findall(rf"^{key} (.+)$", member.output, re.M)
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What an uninterrupted run of two members ends with."""
    root = tmp_path_factory.mktemp("whole")
    return words(Cluster(2).run(SCRIPT, settings=Settings(root=str(root), name="whole")), "ALL")


@pytest.mark.parametrize(
    "kill",
    [
        (0, 3, "backward"),
        (1, 9, "step"),
        *(pytest.param(k, marks=pytest.mark.slow) for k in [(0, 12, "step"), (1, 1, "epoch"), (1, 18, "backward")]),
    ],
)
def test_killed_and_resumed_equals_uninterrupted(tmp_path: Path, whole: list[str], kill: tuple[int, int, str]) -> None:
    settings = Settings(root=str(tmp_path), name="run")
    first = Cluster(2).run(SCRIPT, [json.dumps(kill)], settings=settings)
    assert any(member.code == -9 for member in first)
    assert words(Cluster(2).run(SCRIPT, settings=settings), "ALL") == whole


def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_used(tmp_path: Path, whole: list[str]) -> None:
    settings = Settings(root=str(tmp_path), name="run")
    Cluster(2).run(SCRIPT, [json.dumps((1, 1, "epoch"))], settings=settings)
    kept = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert len(kept) >= 2
    shared = kept[-1] / "shared.safetensors"
    data = bytearray(shared.read_bytes())
    data[len(data) // 2] ^= 1
    shared.write_bytes(data)
    again = Cluster(2).run(SCRIPT, settings=settings)
    assert words(again, "ALL") == whole
    assert kept[-1].name in again[0].output


@pytest.mark.parametrize("size", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_resumes_on_another_number_of_members(tmp_path: Path, size: int) -> None:
    """No sample of the interrupted epoch is lost or repeated, and members end with the same weights."""
    settings = Settings(root=str(tmp_path), name="run", checkpoint_keep=50)
    Cluster(2).run(SCRIPT, [json.dumps((1, 11, "step"))], settings=settings)
    folder = tmp_path / "run"
    manifest = max((folder / "checkpoints").glob("step-*/manifest.json"))
    saved = json.loads(manifest.read_text())
    step, epoch = saved["step"], saved["meta"]["epoch"]
    before: list[int] = []
    for rank in range(2):  # what was committed when the checkpoint was taken; later steps are done again
        lines = [line.split(" ", 1) for line in (folder / f"seen-{rank}").read_text().splitlines()][:step]
        before += [i for e, row in lines if int(e) == epoch for i in json.loads(row)]
    for path in folder.glob("seen-*"):
        path.unlink()
    weights = words(Cluster(size).run(SCRIPT, settings=settings), "WEIGHTS")
    assert len(weights) == size
    assert len(set(weights)) == 1
    after: list[int] = []
    for rank in range(size):
        for line in (folder / f"seen-{rank}").read_text().splitlines():
            e, row = line.split(" ", 1)
            after += json.loads(row) if int(e) == epoch else []
    assert sorted(before + after) == list(range(53))


@pytest.mark.parametrize(
    ("strategy", "every_s", "told"),
    [
        ("async", 5.0, True),
        pytest.param("async", Settings().checkpoint_every_s, False, marks=pytest.mark.slow),
        ("sync", 5.0, False),
    ],
)
def test_seconds_that_have_no_effect_are_told_of(tmp_path: Path, strategy: str, every_s: float, told: bool) -> None:
    script = """
import torch, paceline
run = paceline.join()
model = torch.nn.Linear(2, 1)
run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
for epoch in run.epochs(1):
    pass
"""
    settings = Settings(root=str(tmp_path), name="run", strategy=strategy, checkpoint_every_s=every_s)
    assert all(member.code == 0 for member in Cluster(2).run(script, settings=settings))
    events = "".join(path.read_text() for path in (tmp_path / "run").rglob("*.jsonl"))
    assert (f"checkpoint_every_s={every_s:g} has no effect" in events) == told


def test_a_script_that_changed_is_told_so(tmp_path: Path) -> None:
    settings = Settings(root=str(tmp_path), name="run")
    Cluster(1).run(SCRIPT, [json.dumps((0, 1, "epoch"))], settings=settings)
    changed = SCRIPT.replace("scheduler=scheduler, average=average", "scheduler=scheduler")
    (member,) = Cluster(1).run(changed, settings=settings)
    assert member.code != 0
    assert "'average' is in the checkpoint only" in member.output
    inside = SCRIPT.replace("for epoch in run.epochs(3):", "for epoch in run.epochs(3):\n    loader = made()").replace(
        "loader = run.loader(Noisy(), batch_size=4)", "made = lambda: run.loader(Noisy(), batch_size=4)"
    )
    (member,) = Cluster(1).run(inside, settings=settings)
    assert "or makes it within the loop over run.epochs" in member.output
    other = SCRIPT.replace("torch.nn.Linear(6, 16)", "torch.nn.Linear(6, 8)").replace(
        "torch.zeros(16)", "torch.zeros(8)"
    )
    other = other.replace("torch.nn.Linear(16, 3)", "torch.nn.Linear(8, 3)")
    (member,) = Cluster(1).run(other, settings=settings)
    assert "'model.0' does not fit its checkpoint" in member.output
    assert Cluster(1).run(other, settings=settings.with_(fresh=True))[0].code == 0


@pytest.mark.skipif(shutil.which("mount") is None, reason="mount is not there")
def test_a_full_disk_stops_no_training_and_loses_nothing(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=120k", "none", str(disk)], check=False).returncode:
        pytest.skip("mounting needs root")
    try:
        settings = Settings(root=str(disk), name="run", checkpoint_keep=50)
        (member,) = Cluster(1).run(SCRIPT, settings=settings)
        assert member.code == 0, member.output
        assert "ALL" in member.output
        assert "No space left" in member.output
        complete = list((disk / "run" / "checkpoints").glob("step-*/manifest.json"))
        assert complete  # those before it filled up
    finally:
        subprocess.run(["umount", str(disk)], check=False)


def test_two_runs_with_one_seed_are_equal(tmp_path: Path, whole: list[str]) -> None:
    again = words(Cluster(2).run(SCRIPT, settings=Settings(root=str(tmp_path), name="again")), "ALL")
    assert again == whole
    other = words(Cluster(2).run(SCRIPT, settings=Settings(root=str(tmp_path), name="other", seed=1)), "ALL")
    assert other != whole
    assert hashlib.sha256(b"").hexdigest() not in other


GROUPS = """
import hashlib, os, sys
import torch, torch.nn.functional as F
import paceline

kill = int(sys.argv[1])
run = paceline.join()
torch.manual_seed(0)
body, head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)
model = torch.nn.Sequential(body, head)
optimizer = run.optimizer(torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9), model)
data = torch.utils.data.TensorDataset(torch.randn(32, 8), torch.randint(4, (32,)))
loader = run.loader(data, 4)
for epoch in run.epochs(4):
    if epoch == 1:
        optimizer.add_param_group({"params": body.parameters(), "lr": 0.05})
    if epoch == kill: os._exit(9)
    for x, y in loader:
        optimizer.zero_grad(); F.cross_entropy(model(x), y).backward(); optimizer.step()
        if epoch == 1 and kill == -2: run.checkpoint(); os._exit(9)
print("ENDS", [group["lr"] for group in optimizer.param_groups],
      hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest())
"""


@pytest.mark.parametrize("kill", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_group_that_was_added_on_the_way_comes_back(tmp_path: Path, kill: int) -> None:
    whole = words(Cluster(2).run(GROUPS, ["-1"], settings=Settings(root=str(tmp_path), name="whole")), "ENDS")
    settings = Settings(root=str(tmp_path), name="run")
    assert all(member.code == 9 for member in Cluster(2).run(GROUPS, [str(kill)], settings=settings))
    assert words(Cluster(2).run(GROUPS, ["-1"], settings=settings), "ENDS") == whole


def test_a_group_that_the_script_adds_again_is_the_same(tmp_path: Path) -> None:
    """Resumed in the very epoch in which the script adds it."""
    settings = Settings(root=str(tmp_path), name="run")
    assert all(member.code == 9 for member in Cluster(2).run(GROUPS, ["-2"], settings=settings))
    (end, other) = words(Cluster(2).run(GROUPS, ["-1"], settings=settings), "ENDS")
    assert end == other
    assert end.startswith("[0.1, 0.05]")


LOOPS = """
import contextlib, hashlib, os, signal, sys, time
import torch, torch.nn.functional as F
import paceline

mode, kill = sys.argv[1], int(sys.argv[2])
run = paceline.join(checkpoint_every_s=1e-9)
torch.manual_seed(0)
body, head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)
model = torch.nn.Sequential(body, head)
body.requires_grad_(mode != "unfreeze")
given = head.named_parameters() if mode == "unfreeze" else model.parameters()
optimizer = run.optimizer(torch.optim.SGD(given, lr=0.1, momentum=0.9), model)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
average = torch.optim.swa_utils.AveragedModel(model)
run.track(scheduler=scheduler, average=average)
generator = torch.Generator().manual_seed(1)
inputs, targets = torch.randn(80, 8, generator=generator), torch.randint(4, (80,), generator=generator)
data = torch.utils.data.TensorDataset(inputs, targets)
loader, other = run.loader(data, 4), run.loader(data, 8, shuffle=False)
def cycle(batches):
    while True: yield from batches
more = cycle(run.loader(data, 6))  # seven batches, and ten steps of an epoch
if mode == "kept": pictures = iter(other); next(pictures)
for epoch in run.epochs(3):
    if mode == "unfreeze" and epoch == 1:
        body.requires_grad_(True)
        optimizer.add_param_group({"params": list(body.named_parameters()), "lr": 0.05})
    for i, (x, y) in enumerate(loader):
        last = mode != "accumulate" or (i + 1) % 4 == 0 or i + 1 == len(loader)
        with contextlib.nullcontext() if last else run.accumulate():
            loss = F.cross_entropy(model(x), y)
            if mode == "cycle": u, v = next(more); loss = loss + F.cross_entropy(model(u), v)
            loss.backward()
        if not last: continue
        optimizer.step(); optimizer.zero_grad()
        if mode == "evaluate":
            with torch.no_grad():
                sum(float(F.cross_entropy(model(a), b)) for a, b in other)
        if run._meter.step == kill and run.is_first: time.sleep(0.3); os.kill(os.getpid(), signal.SIGKILL)
        scheduler.step(); average.update_parameters(model)
print("ENDS", optimizer.param_groups[0]["lr"], hashlib.sha256(b"".join(
    p.detach().numpy().tobytes() for m in (model, average) for p in m.parameters())).hexdigest())
"""


@pytest.mark.parametrize(
    ("mode", "kill"),
    [
        ("unfreeze", 25),
        ("cycle", 13),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [("evaluate", 14), ("accumulate", 5), ("kept", 5)]),
        pytest.param("cycle", 21, marks=pytest.mark.slow),
    ],
)
def test_loops_as_people_write_them_resume_exactly(tmp_path: Path, mode: str, kill: int) -> None:
    """Layers unfrozen on the way; an evaluation within the loop body; the last, shorter window of an accumulation; an
    iterator that is kept, and one that goes on from epoch to epoch."""
    whole = words(Cluster(2).run(LOOPS, [mode, "-1"], settings=Settings(root=str(tmp_path), name="whole")), "ENDS")
    settings = Settings(root=str(tmp_path), name="run")
    assert any(member.code == -9 for member in Cluster(2).run(LOOPS, [mode, str(kill)], settings=settings))
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert words(Cluster(2).run(LOOPS, [mode, "-1"], settings=settings), "ENDS") == whole


def test_loading_an_optimizer_names_the_parameters_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(1, 1) for _ in range(5)])
    saved = SavedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, print)
    state = saved.state_dict()
    calls = []
    monkeypatch.setattr("paceline.train.groups.names_of", lambda model: calls.append(model) or names_of(model))
    saved.load_state_dict(state)
    assert len(calls) == 1
