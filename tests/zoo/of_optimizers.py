"""Cases of the zoo: optimizers and learning-rate schedules."""

from __future__ import annotations

from typing import Any

import torch
from case import STEPS, Result, Side, case, features, mlp, train, weights
from torch.nn import functional as F
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop, lr_scheduler


@case()
def sgd_momentum_nesterov(side: Side) -> Result:
    model = mlp()
    sgd = SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-2)
    return train(side, model, sgd, schedule=lambda o: lr_scheduler.StepLR(o, 2, 0.5))


@case()
def adam_one_cycle(side: Side) -> Result:
    model = mlp()
    schedule = lambda o: lr_scheduler.OneCycleLR(o, 0.05, total_steps=STEPS + 1)  # noqa: E731
    return train(side, model, Adam(model.parameters(), lr=0.01), schedule=schedule)


@case()
def adamw_amsgrad_cosine_warmup(side: Side) -> Result:
    def schedule(optimizer: Optimizer) -> Any:
        warm = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
        return lr_scheduler.SequentialLR(optimizer, [warm, lr_scheduler.CosineAnnealingLR(optimizer, 3)], [2])

    model = mlp()
    return train(side, model, AdamW(model.parameters(), lr=0.01, amsgrad=True), schedule=schedule)


@case()
def rmsprop_centered(side: Side) -> Result:
    model = mlp()
    return train(side, model, RMSprop(model.parameters(), lr=0.01, momentum=0.5, centered=True))


@case()
def adagrad_without_foreach(side: Side) -> Result:
    model = mlp()
    return train(side, model, Adagrad(model.parameters(), lr=0.05, foreach=False))


@case()
def nadam_maximize(side: Side) -> Result:
    model = mlp()
    return train(side, model, NAdam(model.parameters(), lr=0.01, maximize=True))


@case()
def scheduler_made_first(side: Side) -> Result:
    """A scheduler that was given the optimizer before the run was; it wraps the optimizer's step."""
    model = mlp()
    forward = side.wrap(model)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer = side.optimizer(optimizer, model)
    for step in range(STEPS):
        x, y = features(side, step)
        optimizer.zero_grad()
        F.cross_entropy(forward(x), y).backward()
        optimizer.step()
        scheduler.step()
    return weights(model)


@case()
def several_groups_and_plateau(side: Side) -> Result:
    """Groups with their own rates; a schedule that depends on a figure that all members share."""
    model = mlp()
    groups = [
        {"params": model[0].parameters(), "lr": 0.01, "weight_decay": 0.1},
        {"params": [model[2].weight], "momentum": 0.0},
        {"params": [model[2].bias, *model[4].parameters()]},
    ]
    forward = side.wrap(model)
    optimizer = side.optimizer(SGD(groups, lr=0.1, momentum=0.9), model)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for step in range(STEPS):
        x, y = features(side, step)
        optimizer.zero_grad()
        F.cross_entropy(forward(x), y).backward()
        optimizer.step()
        scheduler.step(1.0 + step // 2)
    return weights(model) | {"lr": torch.tensor([g["lr"] for g in optimizer.param_groups])}
