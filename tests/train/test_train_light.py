"""What newcomers get at once, and what comes later: together all of it, and only the run's own weights are heavy."""

from __future__ import annotations

import copy

import torch
from torch import nn

from paceline.train.groups import SavedOptimizer
from paceline.train.light import load_heavy, load_light, split


def trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 / (1 + seed))
    for _ in range(2):
        model(torch.randn(5, 3)).sum().backward()
        optimizer.step()
    return model, optimizer


def equal(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    return a == b


def test_both_halves_are_the_whole() -> None:
    (there, kept), (here, own) = trained(0), trained(1)
    for name, theirs, ours in (
        ("model.0", there, here),
        ("optimizer.0", SavedOptimizer(kept, there, print), SavedOptimizer(own, here, print)),
    ):
        state = copy.deepcopy(theirs.state_dict())
        light, heavy = split(name, theirs, state)
        load_light(ours, light)
        assert not equal(ours.state_dict(), state)
        load_heavy(ours, heavy)
        assert equal(ours.state_dict(), state)


def test_what_a_turn_may_look_at_is_light() -> None:
    model, optimizer = trained(0)
    light, heavy = split("model.0", model, model.state_dict())
    assert set(light) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert set(heavy) == {name for name, _ in model.named_parameters()}
    light, heavy = split("optimizer.0", SavedOptimizer(optimizer, model, print), optimizer.state_dict())
    assert light["param_groups"][0]["lr"] == 0.1
    assert not light["state"]
    assert set(heavy) == {0, 1, 2, 3}


def test_a_model_that_is_only_tracked_comes_whole() -> None:
    """An average of weights is nobody else's: no server holds it, and no step changes it."""
    average, _ = trained(0)
    light, heavy = split("average", average, average.state_dict())
    assert equal(light, average.state_dict())
    assert heavy is None
