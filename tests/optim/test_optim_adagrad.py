"""Adagrad with a decay: against its formula in float64, and against torch's own where they are the same."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import ConfigError
from paceline.optim import Adagrad
from paceline.strategies import Async, Sync, World
from paceline.testing.together import together
from paceline.transport.group import Group


def parameters(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(2)
    shapes: list[tuple[int, ...]] = [(5, 3), (7,), ()]
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def train(optimizer: torch.optim.Optimizer, steps: int) -> None:
    ours = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(steps):
        for i, p in enumerate(ours):
            p.grad = None if (step, i) == (1, 1) else torch.sin(p.detach() * (step + 2))
        optimizer.step()


@settings(max_examples=40, deadline=None)
@given(
    decay=st.floats(0.1, 1.0),
    lr=st.floats(0.01, 1.0),
    lr_decay=st.sampled_from([0.0, 0.1]),
    weight_decay=st.sampled_from([0.0, 0.05]),
    start=st.sampled_from([0.0, 0.3]),
    foreach=st.sampled_from([None, False, True]),
    maximize=st.booleans(),
)
def test_it_is_its_formula(
    decay: float, lr: float, lr_decay: float, weight_decay: float, start: float, foreach: bool | None, maximize: bool
) -> None:
    options: dict[str, Any] = {"lr_decay": lr_decay, "weight_decay": weight_decay, "initial_accumulator_value": start}
    [w, *_] = ours = parameters(torch.float64)
    optimizer = Adagrad(ours, lr, decay, foreach=foreach, maximize=maximize, **options)
    expected, total = w.detach().numpy().copy(), np.full(tuple(w.shape), start)
    for t in range(1, 7):
        gradient = np.sin(expected * t)
        w.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
        g = (-gradient if maximize else gradient) + weight_decay * expected
        total = decay * total + g * g
        expected = expected - lr / (1 + (t - 1) * lr_decay) * g / (np.sqrt(total) + 1e-10)
    np.testing.assert_allclose(w.detach().numpy(), expected, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(optimizer.state[w]["sum"].numpy(), total, rtol=1e-10)


@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_without_decay_it_is_torchs_bit_for_bit(dtype: torch.dtype, foreach: bool | None) -> None:
    options: dict[str, Any] = {"lr": 0.1, "lr_decay": 0.01, "weight_decay": 0.02, "initial_accumulator_value": 0.1}
    ours, theirs = parameters(dtype), parameters(dtype)
    mine = Adagrad(ours, foreach=foreach, **options)
    plain = torch.optim.Adagrad(theirs, foreach=foreach, **options)
    train(mine, 6)
    train(plain, 6)
    for a, b in zip(ours, theirs):
        assert torch.equal(a, b)
        assert mine.state[a].keys() == plain.state[b].keys()
        assert all(torch.equal(mine.state[a][key], plain.state[b][key]) for key in plain.state[b])


def test_one_form_gives_the_bits_of_the_other() -> None:
    ours, theirs = parameters(), parameters()
    train(Adagrad(ours, 0.1, 0.9, foreach=True), 6)
    train(Adagrad(theirs, 0.1, 0.9, foreach=False), 6)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs))


def test_its_state_is_saved_and_its_loss_returned() -> None:
    ours = parameters()
    optimizer = Adagrad(ours, 0.1, 0.8)
    train(optimizer, 3)
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    other = Adagrad(theirs, 0.5)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(optimizer, 3)
    train(other, 3)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs))

    def closure() -> float:
        optimizer.zero_grad()
        loss = ours[0].square().sum()
        loss.backward()
        return loss.item()

    before = ours[0].detach().clone()
    assert optimizer.step(closure) == before.square().sum().item()
    assert not torch.equal(before, ours[0])


@pytest.mark.parametrize("options", [{"decay": 0.0}, {"decay": 1.5}, {"decay": float("nan")}, {"eps": -1.0}])
def test_what_it_cannot_do_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        Adagrad(parameters(), 0.1, **options)


@pytest.mark.parametrize("strategy", [Sync, Async])
def test_servers_apply_it_as_this_worker_would(strategy: type[Sync] | type[Async]) -> None:
    """Two workers with the same gradients: their mean is theirs, bit for bit. In async one pushes."""

    def body(group: Group) -> list[torch.Tensor]:
        model = torch.nn.Module()
        for i, p in enumerate(parameters()):
            model.register_parameter(f"p{i}", p)
        optimizer = Adagrad(model.parameters(), 0.1, 0.7, initial_accumulator_value=0.2)
        served = strategy()
        served.attach(model, optimizer, World(group, wires=group._wires, limit_s=20.0))
        for step in range(4 if group.rank == 0 or served.sync else 0):
            for p in model.parameters():
                p.grad = torch.cos(p.detach() * (step + 1))
            assert not served.finish(optimizer)
        served.together(keep=True)
        sums = [optimizer.state[p]["sum"].clone() for p in model.parameters()] if group.rank == 0 else []
        served.close()
        return [p.detach().clone() for p in model.parameters()] + sums

    expected = parameters()
    optimizer = Adagrad(expected, 0.1, 0.7, initial_accumulator_value=0.2)
    for step in range(4):
        for p in expected:
            p.grad = torch.cos(p.detach() * (step + 1))
        optimizer.step()
    first, second = together(2, body)
    for i, p in enumerate(expected):
        assert torch.equal(first[i], p.detach())
        assert torch.equal(second[i], p.detach())
        assert torch.equal(first[len(expected) + i], optimizer.state[p]["sum"])
