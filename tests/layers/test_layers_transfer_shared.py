"""Parts that models and tasks have in common: trained once, by whoever has samples; nobody else moves a head."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from paceline.core.errors import ConfigError
from paceline.core.settings import Settings
from paceline.layers.transfer import TaskData, Tasks, freeze, share
from paceline.strategies import AllReduce, Async, Bounded, Local, Strategy, Sync, World, Zero
from paceline.testing.cluster import Cluster
from paceline.testing.together import together
from paceline.transport.group import Group

# ---- share


class Net(nn.Module):
    """A trunk with a norm, a scale of its own, and a head."""

    def __init__(self, classes: int, width: int = 8) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.trunk = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.ReLU())
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.trunk(x * self.scale))
        return out


def test_what_is_shared_is_one_thing() -> None:
    source, target = Net(3), Net(5)
    assert share(source, target, "trunk.*", "scale") == ["trunk.0", "trunk.1", "scale"]
    assert target.trunk[0] is source.trunk[0]
    assert target.scale is source.scale
    both = nn.ModuleDict({"a": source, "b": target})
    assert sum(p.numel() for p in both.parameters()) == 4 + 40 + 16 + 27 + 45
    optimizer = torch.optim.SGD(both.parameters(), lr=0.1)
    before = target(torch.ones(2, 4)).detach()
    source(torch.randn(6, 4)).square().mean().backward()
    optimizer.step()
    assert not torch.equal(target(torch.ones(2, 4)), before)
    both.to(torch.float64)  # which must not part them
    assert target.trunk[1].running_mean is source.trunk[1].running_mean
    assert target.trunk[1].running_mean.dtype == torch.float64


def test_numbers_of_another_kind_are_not_shared() -> None:
    target = Net(3)
    name = next(name for name, _ in target.named_children())
    with pytest.raises(ConfigError, match=r"is torch.float64 in the source and torch.float32 in the target"):
        share(Net(3).double(), target, name)


def test_a_name_that_no_module_can_have_is_told_of() -> None:
    for name in ("a.b", "", "keys"):
        with pytest.raises(ConfigError, match="becomes part of a parameter's, so it needs another one"):
            Tasks(nn.Linear(2, 2), {name: nn.Linear(2, 2)})


def test_parts_with_other_names_are_shared_by_giving_them() -> None:
    source, target = Net(3), nn.Sequential(Net(3).trunk, nn.Linear(8, 2))
    share(source.trunk, target[0], "*")
    assert target[0][0].weight is source.trunk[0].weight


def test_what_is_not_alike_is_told_of_and_nothing_changes() -> None:
    source = Net(3)
    for target, patterns, told in [
        (Net(3), ["trnk"], "'trnk' matches no parameter of the model: the nearest name is 'trunk'"),
        (Net(3, width=9), ["trunk"], "0.weight is 8x4 in the source and 9x4 in the target"),
        (Net(5), ["scale", "head.weight"], "'head.weight' is 3x8 in the source and 5x8 in the target"),
        (nn.Sequential(nn.Linear(4, 8)), ["trunk"], "the target has no module 'trunk'"),
        (nn.Sequential(nn.Linear(4, 8)), ["scale"], "the target has no parameter 'scale'"),
    ]:
        before = list(target.parameters())
        with pytest.raises(ConfigError, match=re.escape(told)):
            share(source, target, *patterns)
        assert all(a is b for a, b in zip(before, target.parameters()))
    other = Net(3)
    other.trunk[1].eps = 1e-3
    with pytest.raises(ConfigError, match=r"eps=1e-05.* and .*eps=0\.001"):
        share(source, other, "trunk")
    with pytest.raises(ConfigError, match="one model"):
        share(source, source, "trunk")


# ---- data


def made(num: int, seed: int, classes: int = 3) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(num, 4, generator=generator), torch.arange(num) % classes)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=4), st.integers(1, 6), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_members_have_the_samples_of_their_tasks(sizes: list[int], members: int, seed: int) -> None:
    data = TaskData({str(i): made(num, i) for i, num in enumerate(sizes)})
    rest = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
    shares = data.by_rank.share(rest, len(data), members, 4)
    assert sorted(torch.cat(shares).tolist()) == list(range(len(data)))
    names = data.labels
    for rank, own in enumerate(shares):
        tasks = {int(names[i]) for i in own.tolist()}
        if members >= len(sizes):
            assert tasks <= {rank % len(sizes)}
        else:
            assert all(task % members == rank for task in tasks)


def test_a_batch_has_its_samples_by_task_whatever_their_labels_are() -> None:
    values = TensorDataset(torch.randn(5, 4), torch.randn(5, 2))  # numbers, in place of classes
    data = TaskData({"kind": made(7, 0), "value": values})
    (batch,) = DataLoader(data, batch_size=12, collate_fn=data.collate)
    assert [tuple(t.shape) for t in batch["kind"]] == [(7, 4), (7,)]
    assert torch.equal(batch["value"][1], values.tensors[1])
    model = Tasks(nn.Linear(4, 8), {"kind": nn.Linear(8, 3), "value": nn.Linear(8, 2)})
    losses: dict[str, Callable[..., torch.Tensor]] = {"kind": F.cross_entropy, "value": F.mse_loss}
    loss = model.loss(batch, losses)
    kind = F.cross_entropy(model(made(7, 0).tensors[0], "kind"), made(7, 0).tensors[1])
    value = F.mse_loss(model(values.tensors[0], "value"), values.tensors[1])
    torch.testing.assert_close(loss, (7 * kind + 5 * value) / 12)
    for wrong, told in [
        (lambda: model.loss(batch, {"kind": F.cross_entropy}), "no loss for the task 'value'"),
        (lambda: model(torch.ones(1, 4), "knd"), "no head for the task 'knd': the nearest name is 'kind'"),
        (lambda: model.loss([1, 2], losses), r"collate=data\.collate"),  # type: ignore[arg-type]
        (lambda: TaskData({}), "a dataset for each task"),
        (lambda: TaskData({"a": made(3, 0), "b": []}), "the task 'b' needs a length, and at least one sample"),
        (lambda: Tasks(nn.Linear(2, 2), {}), "a head for each task"),
        (lambda: TaskData({"a": torch.zeros(3)})[0], "not an input and a label"),
    ]:
        with pytest.raises(ConfigError, match=told):
            wrong()


# ---- members

torch.manual_seed(0)
HEADS = {"a": nn.Linear(8, 3), "b": nn.Linear(8, 3), "idle": nn.Linear(8, 3)}
MODEL = Tasks(nn.Sequential(nn.Linear(4, 8), nn.Tanh()), HEADS)
DATA = {"a": made(60, 1), "b": made(60, 2)}


def batch_of(task: str, step: int) -> dict[str, list[torch.Tensor]]:
    at = slice(6 * step, 6 * step + 6)
    return {task: [column[at] for column in DATA[task].tensors]}


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def apart(
    group: Group, strategy: Strategy, make: Callable[[nn.Module], torch.optim.Optimizer], late: int = 0
) -> dict[str, torch.Tensor]:
    """Each member trains a task of its own; the second only from step `late` on, and before both have the first."""
    model = copy.deepcopy(MODEL)
    optimizer = make(model)
    strategy.attach(model, optimizer, World(group, wires=group._wires, limit_s=30.0))
    for step in range(8):
        task = "ab"[group.rank] if step >= late else "a"
        optimizer.zero_grad()
        model.loss(batch_of(task, step), F.cross_entropy).backward()
        if strategy.finish(optimizer):
            optimizer.step()
        strategy.stepped(optimizer)
    strategy.together()
    found = {name: t.clone() for name, t in model.state_dict().items()}
    strategy.close()
    return found


def alone(make: Callable[[nn.Module], torch.optim.Optimizer], late: int = 0) -> dict[str, torch.Tensor]:
    model = copy.deepcopy(MODEL)
    optimizer = make(model)
    for step in range(8):
        optimizer.zero_grad()
        both = ["a", "b"] if step >= late else ["a"]
        torch.stack([model.loss(batch_of(task, step), F.cross_entropy) for task in both]).mean().backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("late", [0, 3])
@pytest.mark.parametrize("make", [adam, momentum])
@pytest.mark.parametrize("strategy", [AllReduce, lambda: Zero(stage=1), lambda: Zero(stage=2), Sync])
def test_members_with_other_tasks_are_one_process_with_all(
    strategy: Callable[[], Strategy], make: Callable[[nn.Module], torch.optim.Optimizer], late: int
) -> None:
    """Also with weight decay and momentum: a head begins to move with its first gradient, and the idle one never."""
    expected = alone(make, late)
    for found in together(2, lambda group: apart(group, strategy(), make, late)):
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-5)
        assert torch.equal(found["heads.idle.weight"], MODEL.heads["idle"].weight)


@pytest.mark.parametrize("strategy", [Async, lambda: Bounded(3), lambda: Async("dana(0.9)"), lambda: Local(every=2)])
def test_a_head_moves_by_the_pushes_of_its_own_task_alone(strategy: Callable[[], Strategy]) -> None:
    """Gradients of the heads are zeros, so that they only decay: each eight times, by the eight steps of its member."""

    def body(group: Group) -> dict[str, torch.Tensor]:
        model = copy.deepcopy(MODEL)
        made_by = strategy()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1.0)
        made_by.attach(model, optimizer, World(group, wires=group._wires, limit_s=30.0))
        for _ in range(8):
            optimizer.zero_grad()
            (model(torch.ones(2, 4), "ab"[group.rank]) * 0).sum().backward()
            if made_by.finish(optimizer):
                optimizer.step()
            made_by.stepped(optimizer)
        made_by.together(end=True)
        found = {name: t.clone() for name, t in model.state_dict().items()}
        made_by.close()
        return found

    for found in together(2, body):
        for head in "ab":
            start = MODEL.heads[head].weight
            if isinstance(strategy(), Local):  # the mean of who trained it and who did not, every second step
                expected = start * ((0.9**2 + 1) / 2) ** 4
            else:
                expected = start * 0.9**8
            torch.testing.assert_close(found[f"heads.{head}.weight"], expected, rtol=1e-4, atol=1e-6)
        assert torch.equal(found["heads.idle.weight"], MODEL.heads["idle"].weight)


SCRIPT = """
import sys
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
import paceline
from paceline import transfer

how, strategy = sys.argv[1:]
torch.manual_seed(0)
made = lambda num, seed: TensorDataset(torch.randn(num, 4, generator=torch.Generator().manual_seed(seed)),
                                       torch.arange(num) % 3)
data = transfer.TaskData({"a": made(90, 1), "b": made(50, 2)})
model = transfer.Tasks(nn.Sequential(nn.Linear(4, 8), nn.Tanh()), {"a": nn.Linear(8, 3), "b": nn.Linear(8, 3)})
run = paceline.join() if strategy == "-" else paceline.join(strategy=strategy)
optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01), model)
options = {"all": {}, "rank": {"partition": data.by_rank}, "label": {"bound": data.labels}}[how]
loader = run.loader(data, batch_size=10, collate=data.collate, **options)
seen = set()
for epoch in run.epochs(2):
    for batch in loader:
        optimizer.zero_grad()
        model.loss(batch, F.cross_entropy).backward()
        optimizer.step()
        seen |= set(batch) if loader.last_real else set()
total = torch.tensor(sum(float(p.double().sum()) for p in model.parameters()))
print("trained", "".join(sorted(seen)), "ends with", f"{float(total):.4f}", flush=True)
run.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("how", "strategy"), [("all", "allreduce"), ("rank", "sync"), ("rank", "diloco(every=3)")])
def test_runs_of_several_tasks(how: str, strategy: str, tmp_path: Path) -> None:
    ended = Cluster(2).run(SCRIPT, [how, strategy], settings=Settings(root=str(tmp_path), progress="off"))
    outputs = [member.output for member in ended]
    assert [member.code for member in ended] == [0, 0], outputs
    trained = [re.search(r"trained (\w+) ends with (\S+)", output) for output in outputs]
    assert [found and found[1] for found in trained] == (["ab", "ab"] if how == "all" else ["a", "b"])
    assert len({found and found[2] for found in trained}) == 1


@pytest.mark.slow
def test_labels_decide_who_trains_which_task(tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text(SCRIPT)
    words = ["run", "-n", "2", "--strategy", "async", "--label", "b:0", "--label", "a:1", "tasks.py", "label", "-"]
    done = subprocess.run(
        [sys.executable, "-m", "paceline", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"\[(\d)\] trained (\w+)", done.stdout) in ([("0", "b"), ("1", "a")], [("1", "a"), ("0", "b")])


def test_what_is_frozen_in_a_shared_body_stays(tmp_path: Path) -> None:
    model = copy.deepcopy(MODEL)
    freeze(model, "body")
    model.loss(batch_of("a", 0), F.cross_entropy).backward()
    assert model.body[0].weight.grad is None
    assert model.heads["b"].weight.grad is None
    assert model.heads["a"].weight.grad is not None
