"""Cases of the zoo: which parameters take part, and their kinds."""

from __future__ import annotations

from collections.abc import Callable

import torch
from case import STEPS, Branches, Result, Side, case, features, images, mlp, train, weights, words
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer


def branches(
    side: Side, optimizer: Callable[[nn.Module], Optimizer], use: Callable[[int], tuple[bool, bool]]
) -> Result:
    model = Branches()
    forward = side.wrap(model, find_unused_parameters=True)
    stepper = side.optimizer(optimizer(model), model)
    for step in range(STEPS):
        x, y = features(side, step)
        stepper.zero_grad()
        F.cross_entropy(forward(x, *use(step)), y).backward()
        stepper.step()
    return weights(model)


@case()
def unused_on_all_members(side: Side) -> Result:
    """A gradient that is None everywhere: weight decay and momentum must leave the parameter alone."""
    make = lambda m: AdamW(m.parameters(), lr=0.01, weight_decay=0.5)  # noqa: E731
    return branches(side, make, lambda step: (step % 2 == 0, step % 3 == 0))


@case()
def unused_on_one_member(side: Side) -> Result:
    """Members use different branches in every step: who has no gradient adds zero, and all apply the mean."""
    make = lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9)  # noqa: E731
    return branches(side, make, lambda step: ((step + side.rank) % 2 == 0, (step + side.rank) % 3 == 0))


@case()
def tied_embedding(side: Side) -> Result:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Embedding(13, 8)
            self.mix = nn.Linear(8, 8)
            self.outer = nn.Linear(8, 13, bias=False)
            self.outer.weight = self.inner.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.outer(self.mix(self.inner(x)).relu())

    model = Tied()
    return train(side, model, Adam(model.parameters(), lr=0.01), batch=words)


@case()
def frozen_trunk(side: Side) -> Result:
    model = mlp()
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return train(side, model, SGD(model.parameters(), lr=0.1, weight_decay=0.1))


@case()
def frozen_then_added(side: Side) -> Result:
    """The trunk is frozen and not in the optimizer; after three steps it is thawed and added."""
    model = mlp()
    model[0].requires_grad_(False)
    head = [*model[2].parameters(), *model[4].parameters()]
    forward = side.wrap(model)
    optimizer = side.optimizer(Adam(head, lr=0.01), model)
    for step in range(2 * STEPS):
        if step == 3:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.002})
            forward = side.wrap(model)  # DDP fixes what it reduces when it wraps
        x, y = features(side, step)
        optimizer.zero_grad()
        F.cross_entropy(forward(x), y).backward()
        optimizer.step()
    return weights(model)


@case()
def grown_by_a_layer(side: Side) -> Result:
    """A layer that did not exist when training began is put into the model and into the optimizer."""
    model = mlp()
    forward = side.wrap(model)
    optimizer = side.optimizer(SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    for step in range(2 * STEPS):
        if step == STEPS:
            torch.manual_seed(5)
            layer = nn.Linear(4, 4)
            model.append(layer)
            optimizer.add_param_group({"params": layer.parameters(), "lr": 0.05})
            forward = side.wrap(model)
        x, y = features(side, step)
        optimizer.zero_grad()
        F.cross_entropy(forward(x), y).backward()
        optimizer.step()
    return weights(model)


@case()
def odd_shapes(side: Side) -> Result:
    """A scalar, an empty, a transposed and a channels-last parameter."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.5))
            self.empty = nn.Parameter(torch.zeros(0, 3))
            self.across = nn.Parameter(torch.randn(12, 192).t())
            self.conv = nn.Conv2d(3, 3, 3, padding=1).to(memory_format=torch.channels_last)

        def forward(self, x: Tensor) -> Tensor:
            h = self.conv(x.contiguous(memory_format=torch.channels_last)).flatten(1)
            return (h @ self.across)[:, :4] * self.scale + self.empty.sum()

    model = Odd()
    return train(side, model, Adam(model.parameters(), lr=0.01), batch=images)
