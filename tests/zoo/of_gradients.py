"""Cases of the zoo: what is done to gradients between two steps, and their precision."""

from __future__ import annotations

import torch
from case import STEPS, Branches, Result, Side, case, features, mlp, train, weights
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW


@case()
def clip_by_global_norm(side: Side) -> Result:
    """The norm that is clipped, and logged, is the global gradient's, the same on all members."""
    model = mlp()
    forward = side.wrap(model)
    optimizer = side.optimizer(SGD(model.parameters(), lr=0.5), model)
    norms = []
    for step in range(STEPS):
        x, y = features(side, step)
        optimizer.zero_grad()
        (10 * F.cross_entropy(forward(x), y)).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
    return weights(model) | {"norms": torch.stack(norms)}


@case()
def accumulation(side: Side) -> Result:
    """Three backward passes per step, of which only the last one reduces; then clip."""
    model = mlp()
    forward = side.wrap(model)
    optimizer = side.optimizer(AdamW(model.parameters(), lr=0.01), model)
    for step in range(STEPS):
        for part in range(2):
            x, y = features(side, 10 * step + part)
            with side.accumulate(forward):
                (F.cross_entropy(forward(x), y) / 3).backward()
        x, y = features(side, 10 * step + 2)
        (F.cross_entropy(forward(x), y) / 3).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@case()
def accumulation_with_unused(side: Side) -> Result:
    """The left branch has gradients only from the passes that are not reduced, and only on one member."""
    model = Branches()
    forward = side.wrap(model, find_unused_parameters=True)
    optimizer = side.optimizer(SGD(model.parameters(), lr=0.1, momentum=0.5), model)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        with side.accumulate(forward):
            x, y = features(side, 10 * step)
            F.cross_entropy(forward(x, side.rank == step % 2, True), y).backward()
        x, y = features(side, 10 * step + 1)
        F.cross_entropy(forward(x, True, side.rank == 0), y).backward()
        optimizer.step()
    return weights(model)


@case()
def two_backwards_per_step(side: Side) -> Result:
    """Two losses with a backward pass each, both reduced: gradients add up as in one process."""
    model = mlp()
    forward = side.wrap(model)
    optimizer = side.optimizer(SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(2):
            x, y = features(side, 10 * step + part)
            F.cross_entropy(forward(x), y).backward()
        optimizer.step()
    return weights(model)


def zeroing(side: Side, where: str, to_none: bool) -> Result:
    model = mlp()
    forward = side.wrap(model)
    optimizer = side.optimizer(Adam(model.parameters(), lr=0.01), model)
    for step in range(STEPS):
        x, y = features(side, step)
        if where == "before forward":
            optimizer.zero_grad(set_to_none=to_none)
        loss = F.cross_entropy(forward(x), y)
        if where == "before backward":
            model.zero_grad(set_to_none=to_none)
        loss.backward()
        optimizer.step()
        if where == "after step":
            optimizer.zero_grad(set_to_none=to_none)
    return weights(model)


@case()
def zero_in_place_before_forward(side: Side) -> Result:
    return zeroing(side, "before forward", to_none=False)


@case()
def zero_to_none_before_backward(side: Side) -> Result:
    return zeroing(side, "before backward", to_none=True)


@case()
def zero_in_place_before_backward(side: Side) -> Result:
    return zeroing(side, "before backward", to_none=False)


@case()
def zero_to_none_after_step(side: Side) -> Result:
    return zeroing(side, "after step", to_none=True)


@case()
def zero_in_place_after_step(side: Side) -> Result:
    return zeroing(side, "after step", to_none=False)


@case()
def never_zeroed(side: Side) -> Result:
    return zeroing(side, "never", to_none=False)


@case()
def gradients_edited_by_hand(side: Side) -> Result:
    """Between backward and step: scaled, replaced by a new tensor, and taken away."""
    model = mlp()
    forward = side.wrap(model)
    optimizer = side.optimizer(SGD(model.parameters(), lr=0.1), model)
    for step in range(STEPS):
        x, y = features(side, step)
        F.cross_entropy(forward(x), y).backward()
        model[0].weight.grad.mul_(0.5)
        model[2].weight.grad = model[2].weight.grad.sign() * 0.01
        if step % 2:
            model[4].bias.grad = None
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad = None
    return weights(model)


@case()
def gradient_penalty(side: Side) -> Result:
    """A second derivative: the norm of the gradient by the input is part of the loss."""
    model = mlp()
    forward = side.wrap(model)
    optimizer = side.optimizer(SGD(model.parameters(), lr=0.05), model)
    for step in range(STEPS):
        x, y = features(side, step)
        x.requires_grad_(True)
        optimizer.zero_grad()
        out = forward(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (F.cross_entropy(out, y) + (slope.norm(dim=1) - 1).pow(2).mean()).backward()
        optimizer.step()
    return weights(model)


@case(tolerance=2e-5)
def bf16_autocast(side: Side) -> Result:
    model = mlp()
    forward = side.wrap(model)
    optimizer = side.optimizer(AdamW(model.parameters(), lr=0.01), model)
    for step in range(STEPS):
        x, y = features(side, step)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(forward(x), y)
        loss.backward()
        optimizer.step()
    return weights(model)


@case()
def grad_scaler_with_an_inf(side: Side) -> Result:
    """The last member's loss overflows in one step: both skip it, both lower the scale, none is ahead."""
    model = mlp()
    forward = side.wrap(model)
    optimizer = side.optimizer(Adam(model.parameters(), lr=0.01), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    scales = []
    for step in range(STEPS + 2):
        x, y = features(side, step)
        optimizer.zero_grad()
        loss = F.cross_entropy(forward(x), y)
        if step == 2 and side.rank == side.size - 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return weights(model) | {"scales": torch.tensor(scales)}


@case()
def grad_scaler_fused(side: Side) -> Result:
    """A fused optimizer unscales and skips inside its own kernel."""
    model = mlp()
    forward = side.wrap(model)
    optimizer = side.optimizer(AdamW(model.parameters(), lr=0.01, fused=True), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    for step in range(STEPS):
        x, y = features(side, step)
        optimizer.zero_grad()
        loss = F.cross_entropy(forward(x), y)
        scaler.scale(loss * float("inf") if step == 2 and side.rank == 0 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return weights(model)


@case(tolerance=2e-3)
def mixed_dtypes(side: Side) -> Result:
    """bfloat16, float32 and float64 parameters in one model; bfloat16 rounds sums to three digits."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 16).bfloat16()
            self.b = nn.Linear(16, 16)
            self.c = nn.Linear(16, 4).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.b(self.a(x.bfloat16()).float().tanh()).tanh().double())

    model = Mixed()
    return train(side, model, SGD(model.parameters(), lr=0.05, momentum=0.9))
