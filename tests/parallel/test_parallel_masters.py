"""Parameters in bf16 whose masters lose nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

Join = Callable[..., Any]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3))


def adam(run: Any, model: nn.Module) -> Any:
    return run.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), model)


def train(model: nn.Module, optimizer: Any, steps: int, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x, y = torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def test_parameters_are_bf16_between_steps_and_state_is_float32(join: Join) -> None:
    run, model = join("bf16(weights)"), net()
    given = list(model.parameters())
    optimizer = adam(run, model)
    train(model, optimizer, 2)
    assert [p.dtype for p in model[0].parameters()] == [torch.bfloat16] * 2
    assert [p.dtype for p in model[1].parameters()] == [torch.float32] * 2  # of a norm
    assert all(p is q and p is r for p, q, r in zip(given, model.parameters(), optimizer.param_groups[0]["params"]))
    assert all(s["exp_avg"].dtype == torch.float32 for s in optimizer.state.values())
    assert model[0].weight.grad.dtype == torch.bfloat16
    state = model.state_dict()
    assert all(value.dtype == torch.float32 for value in state.values())
    assert torch.equal(state["0.weight"].bfloat16(), model[0].weight)


def test_tiny_updates_are_not_lost(join: Join) -> None:
    """Each is a thousandth of what bf16 can tell apart at 1; two thousand of them are one and a half of that."""
    run, model = join("bf16(weights)"), nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
    for _ in range(2000):
        optimizer.zero_grad()
        model.weight.grad = torch.full((1, 1), -6e-6, dtype=torch.bfloat16)
        optimizer.step()
    assert model.weight.item() == pytest.approx(1.012, abs=0.004)
    assert model.state_dict()["weight"].item() == pytest.approx(1.012, abs=1e-4)


def test_options_and_schedulers_go_on(join: Join) -> None:
    run, model = join("bf16(weights)"), nn.Linear(1, 1, bias=False)
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    before = model.state_dict()["weight"].item()
    for _ in range(3):
        model.weight.grad = torch.ones(1, 1, dtype=torch.bfloat16)
        optimizer.step()
        scheduler.step()
    assert before - model.state_dict()["weight"].item() == pytest.approx(1.75, abs=1e-6)


def test_what_a_script_does_to_weights_counts(join: Join) -> None:
    run, model = join("bf16(weights)"), nn.Linear(4, 1, bias=False)
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.0), model)
    exact = model.state_dict()["weight"].clone()
    model.weight.data[0, 0] = 5.0
    model.weight.grad = torch.ones(1, 4, dtype=torch.bfloat16)
    optimizer.step()
    assert torch.equal(model.state_dict()["weight"][0, 1:], exact[0, 1:])
    assert model.state_dict()["weight"][0, 0] == model.weight[0, 0] == 5.0


@pytest.mark.parametrize("after", ["bf16(weights)", "fp32"])
def test_resumed_is_uninterrupted_and_either_checkpoint_serves_the_other(join: Join, after: str) -> None:
    def run_of(name: str, precision: str, epochs: int, seed: int = 0) -> tuple[nn.Module, Any]:
        run, model = join(precision, name), net()
        optimizer = adam(run, model)
        for epoch in run.epochs(epochs):
            train(model, optimizer, 5, seed=epoch)
        run.close()
        return model, optimizer

    whole, of_whole = run_of("whole", "bf16(weights)", 2)
    run_of("parts", "bf16(weights)", 1)
    model, optimizer = run_of("parts", after, 2)
    if after == "bf16(weights)":
        states = zip(of_whole.state.values(), optimizer.state.values(), strict=True)
        assert all(torch.equal(a["exp_avg_sq"], b["exp_avg_sq"]) for a, b in states)
    for key, value in whole.state_dict().items():
        if after == "fp32":
            torch.testing.assert_close(model.state_dict()[key], value, atol=0.01, rtol=0.1)
        else:
            assert torch.equal(model.state_dict()[key], value), key
    run_of("other", "fp32", 1)
    model, optimizer = run_of("other", "bf16(weights)", 2)
    assert model[0].weight.dtype == torch.bfloat16
    assert optimizer.state[model[0].weight]["exp_avg"].dtype == torch.float32


def test_groups_that_are_added_later_have_masters_too(join: Join) -> None:
    run, model = join("bf16(weights)"), net()
    optimizer = run.optimizer(torch.optim.SGD(model[0].parameters(), lr=0.1), model)
    optimizer.add_param_group({"params": list(model[3].parameters())})
    train(model, optimizer, 1)
    assert model.state_dict()["3.weight"].dtype == torch.float32
    assert not torch.equal(model.state_dict()["3.weight"], model[3].weight.float())
