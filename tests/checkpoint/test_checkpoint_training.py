"""Every optimizer and scheduler goes on bit for bit from a checkpoint, as if it had never stopped."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lrs

from paceline.checkpoint import Checkpoints, pack, random_states, set_random_states, unpack

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.8, 0.95)),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adam-tensor-lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


class Warmup:
    """A callable object, whose attributes LambdaLR saves."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return min(1.0, (step + 1) / self.steps) / (1 + 0.001 * self.calls)


def sequential(o: torch.optim.Optimizer) -> lrs.LRScheduler:
    return lrs.SequentialLR(o, [lrs.LinearLR(o, 0.1, 1.0, 2), lrs.CosineAnnealingLR(o, 10)], milestones=[3])


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda o: lrs.StepLR(o, 2, 0.5),
    "multistep": lambda o: lrs.MultiStepLR(o, [2, 2, 5], 0.5),
    "cosine": lambda o: lrs.CosineAnnealingLR(o, 10),
    "restarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 3),
    "onecycle": lambda o: lrs.OneCycleLR(o, 0.1, total_steps=20, cycle_momentum=False),
    "cyclic": lambda o: lrs.CyclicLR(o, 0.01, 0.1, step_size_up=3, cycle_momentum=False),
    "lambda-function": lambda o: lrs.LambdaLR(o, lambda step: 0.9**step),
    "lambda-object": lambda o: lrs.LambdaLR(o, Warmup(5)),
    "sequential": sequential,
    "chained": lambda o: lrs.ChainedScheduler([lrs.ConstantLR(o, 0.5, 3), lrs.ExponentialLR(o, 0.9)]),
    "plateau": lambda o: lrs.ReduceLROnPlateau(o, patience=1),
}


class Net(nn.Module):
    """Tied weights, batch norm and dropout: everything that a checkpoint must carry."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 6, bias=False)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(6, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(torch.relu(self.norm(self.embed(x)))))  # type: ignore[no-any-return]


class Training:
    """A plain loop, one step at a time."""

    def __init__(self, optimizer: str, scheduler: str) -> None:
        self.model = Net()
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scheduler = SCHEDULERS[scheduler](self.optimizer)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)

    def steps(self, count: int) -> None:
        for _ in range(count):
            x = torch.randn(8, 6) * random.random() + np.random.rand()
            self.optimizer.zero_grad()
            loss = (self.model(x) ** 2).mean()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            if isinstance(self.scheduler, lrs.ReduceLROnPlateau):
                self.scheduler.step(loss)
            else:
                self.scheduler.step()

    def parts(self) -> dict[str, Any]:
        return {n: getattr(self, n) for n in ("model", "optimizer", "scheduler", "scaler")}

    def state(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.parts().items()}

    def load(self, state: dict[str, Any]) -> None:
        for name, part in self.parts().items():
            part.load_state_dict(state[name])


def seed(value: int) -> None:
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small only get slower by more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


PAIRS = [(name, "cosine") for name in OPTIMIZERS]
PAIRS += [("adam", name) for name in SCHEDULERS if name != "cosine"]


@pytest.mark.parametrize(("optimizer", "scheduler"), PAIRS)
def test_resumed_equals_uninterrupted(tmp_path: Path, optimizer: str, scheduler: str) -> None:
    warnings.simplefilter("ignore")
    checkpoints = Checkpoints(tmp_path)
    seed(1)
    first = Training(optimizer, scheduler)
    first.steps(4)
    own = [pack(random_states())]
    checkpoints.write(4, checkpoints.snapshot(first.state()), own, {"scheduler": scheduler}).result(30)
    first.steps(5)

    seed(2)  # another process: other weights, other random states
    second = Training(optimizer, scheduler)
    second.steps(1)
    loaded = checkpoints.load_latest(pytest.fail)
    assert loaded is not None
    second.load(loaded.shared)
    set_random_states(unpack(loaded.own[0]))
    second.steps(5)
    assert pack(first.state()) == pack(second.state())  # bytes: weights, moments, rates, counters
    assert pack(random_states()) != own[0]


def test_both_names_of_a_tied_weight_load() -> None:
    state = Net().state_dict()
    again = unpack(pack(state))
    assert set(again) >= {"embed.weight", "head.weight"}
    other = Net()
    assert str(other.load_state_dict(again)) == "<All keys matched successfully>"
    assert torch.equal(other.head.weight, state["embed.weight"])
    untied = Net()
    untied.head.weight = nn.Parameter(torch.zeros(6, 6))  # a model that no longer ties them can load it too
    untied.load_state_dict(again)
    assert torch.equal(untied.head.weight, untied.embed.weight)


def draws() -> list[float]:
    values = [random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.randn())]
    return [*values, float(torch.rand(())), float(torch.randn(()))]


def test_every_stream_of_random_numbers_goes_on() -> None:
    draws()  # leaves a spare gaussian in Python's and numpy's generators
    saved = pack(random_states())
    expected = draws()
    draws()
    set_random_states(unpack(saved))
    assert draws() == expected


def test_random_states_do_not_wake_cuda() -> None:
    states = random_states()
    assert ("cuda" in states) == torch.cuda.is_initialized()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_snapshot_and_random_states(tmp_path: Path) -> None:
    live = {
        "w": torch.randn(3_000_000, device="cuda"),
        "t": torch.randn(50, 60, device="cuda").T,
        "c": torch.ones(3),
    }
    saved = pack(random_states())
    expected = torch.rand(4, device="cuda")
    before = live["w"].cpu()
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        snapshot = checkpoints.snapshot(live)
        assert snapshot.buffer.is_pinned()
        future = checkpoints.write(step, snapshot, [saved], {})
        live["w"].add_(1)
        loaded = checkpoints.load(future.result(30).path)
        assert torch.equal(loaded.shared["w"], before)
        assert torch.equal(loaded.shared["t"], live["t"].cpu())
        before = live["w"].cpu()
    set_random_states(unpack(saved))
    assert torch.equal(torch.rand(4, device="cuda"), expected)
