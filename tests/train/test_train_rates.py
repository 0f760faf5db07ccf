"""The learning rate with fewer members: of the step alone, and not of what the script sees."""

from __future__ import annotations

import copy

import pytest
import torch

from paceline.train.rates import factor, scaled


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_step_has_the_scaled_rate_and_the_groups_keep_theirs(kind: type[torch.optim.Optimizer]) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    twin = copy.deepcopy(model)
    ours = kind([{"params": [model.weight]}, {"params": [model.bias], "lr": 0.02}], lr=0.1)
    plain = kind([{"params": [twin.weight], "lr": 0.05}, {"params": [twin.bias], "lr": 0.01}], lr=0.1)
    for net, optimizer, by in ((model, ours, factor("linear", 2, 4)), (twin, plain, 1.0)):
        net(torch.ones(4, 3)).square().sum().backward()
        with scaled(optimizer, by):
            optimizer.step()
    assert torch.equal(model.weight, twin.weight)
    assert torch.equal(model.bias, twin.bias)
    assert [group["lr"] for group in ours.param_groups] == [0.1, 0.02]


def test_the_rate_is_given_back_after_a_failure() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(ZeroDivisionError), scaled(optimizer, 0.5):
        raise ZeroDivisionError
    assert optimizer.param_groups[0]["lr"] == 0.1
