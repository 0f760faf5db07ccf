"""Cases of the zoo: models, compiled and checkpointed ones too."""

from __future__ import annotations

from typing import Any

import torch
from case import STEPS, Result, Side, case, features, images, mlp, train, weights, words
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop, lr_scheduler
from torch.utils.checkpoint import checkpoint


@case()
def conv_batch_norm_dropout(side: Side) -> Result:
    """Batch statistics are each member's own; dropout is seeded per member."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2),
        nn.Conv2d(8, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(32, 4),
    )  # fmt: skip
    torch.manual_seed(77 + side.rank)
    return train(side, model, SGD(model.parameters(), lr=0.05, momentum=0.9), batch=images)


@case()
def evaluation_in_between(side: Side) -> Result:
    """Forward passes without gradients in evaluation mode between steps; batch-norm uses its buffers."""
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    forward = side.wrap(model)
    optimizer = side.optimizer(SGD(model.parameters(), lr=0.1), model)
    for step in range(STEPS):
        x, y = features(side, step)
        optimizer.zero_grad()
        F.cross_entropy(forward(x), y).backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            model(features(side, 100 + step)[0])
        model.train()
    return weights(model)


@case()
def transformer_dropout(side: Side) -> Result:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(13, 16, padding_idx=0)
            layer = nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True)
            self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(16, 13)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layers(self.embed(x)))

    model = Encoder()
    torch.manual_seed(77 + side.rank)
    return train(side, model, AdamW(model.parameters(), lr=0.003), batch=words)


@case()
def lstm_truncated(side: Side) -> Result:
    """State is carried from step to step, detached."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(13, 8)
            self.lstm = nn.LSTM(8, 12, num_layers=2, batch_first=True)
            self.head = nn.Linear(12, 13)

        def forward(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
            h, state = self.lstm(self.embed(x), state)
            return self.head(h), state

    model = Recurrent()
    forward = side.wrap(model)
    optimizer = side.optimizer(RMSprop(model.parameters(), lr=0.005), model)
    state = None
    for step in range(STEPS):
        x, y = words(side, step)
        optimizer.zero_grad()
        out, state = forward(x, state)
        state = tuple(s.detach() for s in state)
        F.cross_entropy(out.flatten(0, 1), y.flatten()).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
        optimizer.step()
    return weights(model)


@case()
def sparse_embedding(side: Side) -> Result:
    """Rows of an embedding as sparse gradients, with an optimizer of their own."""
    embed, head = nn.Embedding(50, 8, sparse=True), nn.Linear(8, 13)
    model = nn.Sequential(embed, head)
    forward = side.wrap(model)
    sparse = side.optimizer(Adagrad(embed.parameters(), lr=0.05), model)
    dense = side.optimizer(SGD(head.parameters(), lr=0.1), model)
    for step in range(STEPS):
        x, y = words(side, step)
        sparse.zero_grad()
        dense.zero_grad()
        F.cross_entropy(forward(x).flatten(0, 1), y.flatten()).backward()
        sparse.step()
        dense.step()
    return weights(model)


@case()
def gan(side: Side) -> Result:
    """Two models, two optimizers; the generator's backward pass goes through the critic."""
    maker, critic = mlp(8, 16, 8), mlp(8, 16, 1)
    make, judge = side.wrap(maker), side.wrap(critic)
    maker_step = side.optimizer(Adam(maker.parameters(), lr=0.01, betas=(0.5, 0.9)), maker)
    critic_step = side.optimizer(SGD(critic.parameters(), lr=0.05), critic)
    for step in range(STEPS):
        real, _ = features(side, step)
        noise, _ = features(side, 100 + step)
        critic_step.zero_grad()
        both = judge(torch.cat([real, make(noise).detach()]))
        (F.softplus(both[len(real) :]).mean() + F.softplus(-both[: len(real)]).mean()).backward()
        critic_step.step()
        maker_step.zero_grad()
        F.softplus(-judge(make(noise))).mean().backward()
        maker_step.step()
    return weights(maker, critic)


@case()
def two_models_one_grows(side: Side) -> Result:
    """Parameters that are added to one model's optimizer are no concern of the other model."""
    first, second = mlp(), mlp()
    forward, other = side.wrap(first), side.wrap(second)
    optimizer = side.optimizer(SGD(list(first[2:].parameters()), lr=0.1), first)
    other_step = side.optimizer(SGD(second.parameters(), lr=0.1), second)
    for step in range(STEPS):
        if step == 2:
            optimizer.add_param_group({"params": list(first[0].parameters()), "lr": 0.05})
        for call, stepper, part in (forward, optimizer, 0), (other, other_step, 50):
            x, y = features(side, step + part)
            stepper.zero_grad()
            F.cross_entropy(call(x), y).backward()
            stepper.step()
    return weights(first, second)


@case()
def two_optimizers_one_model(side: Side) -> Result:
    """Weights by one optimizer, biases by another, stepped at different paces."""
    model = mlp()
    forward = side.wrap(model)
    often = side.optimizer(SGD([p for p in model.parameters() if p.ndim > 1], lr=0.1), model)
    seldom = side.optimizer(Adam([p for p in model.parameters() if p.ndim == 1], lr=0.01), model)
    for step in range(2 * STEPS):
        x, y = features(side, step)
        often.zero_grad()
        F.cross_entropy(forward(x), y).backward()
        often.step()
        if step % 2:
            seldom.step()
            seldom.zero_grad()
    return weights(model)


@case()
def compiled(side: Side) -> Result:
    model = mlp()
    forward = side.wrap(torch.compile(model, backend="aot_eager"))
    optimizer = side.optimizer(AdamW(model.parameters(), lr=0.01), model)
    for step in range(STEPS):
        x, y = features(side, step)
        optimizer.zero_grad()
        F.cross_entropy(forward(x), y).backward()
        optimizer.step()
    return weights(model)


class Segments(nn.Module):
    """Two checkpointed segments that share a layer."""

    def __init__(self, reentrant: bool, shared: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 16)
        self.third = self.second if shared else nn.Linear(16, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        for layer in self.second, self.third:
            h = checkpoint(lambda h, layer=layer: layer(h).tanh(), h, use_reentrant=self.reentrant)
        return self.head(h)


@case()
def checkpointed(side: Side) -> Result:
    model = Segments(reentrant=False, shared=False)
    return train(side, model, SGD(model.parameters(), lr=0.1, momentum=0.9))


@case()
def checkpointed_shared(side: Side) -> Result:
    model = Segments(reentrant=False, shared=True)
    return train(side, model, SGD(model.parameters(), lr=0.1, momentum=0.9))


@case()
def checkpointed_reentrant(side: Side) -> Result:
    model = Segments(reentrant=True, shared=False)
    return train(side, model, SGD(model.parameters(), lr=0.1, momentum=0.9))


@case()
def checkpointed_reentrant_shared(side: Side) -> Result:
    """The shared layer gets its gradient in two inner backward passes; DDP wants to be told."""
    model = Segments(reentrant=True, shared=True)
    return train(side, model, SGD(model.parameters(), lr=0.1, momentum=0.9), static_graph=True)


@case(tolerance=2e-5)
def kitchen_sink(side: Side) -> Result:
    """Compiled, tied, checkpointed, autocast, accumulated, clipped, scheduled; one member skips a branch."""

    class Sink(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(13, 16)
            self.mix = torch.compile(nn.Sequential(nn.Linear(16, 16), nn.Tanh()), backend="aot_eager")
            self.extra = nn.Linear(16, 16)
            self.norm = nn.LayerNorm(16)

        def forward(self, x: Tensor, extra: bool) -> Tensor:
            h = checkpoint(self.mix, self.embed(x), use_reentrant=False)
            h = h + self.extra(h) if extra else h
            return F.linear(self.norm(h), self.embed.weight)

    model = Sink()
    forward = side.wrap(model, find_unused_parameters=True)
    norms = [p for p in model.parameters() if p.ndim == 1]
    rest = [p for p in model.parameters() if p.ndim > 1]
    optimizer = side.optimizer(AdamW([{"params": rest}, {"params": norms, "weight_decay": 0.0}], lr=0.01), model)
    scheduler = lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=STEPS + 1)

    def backward(step: int, extra: bool) -> None:
        x, y = words(side, step)
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(forward(x, extra).flatten(0, 1), y.flatten())
        (loss / 2).backward()

    for step in range(STEPS):
        with side.accumulate(forward):
            backward(10 * step, extra=False)
        backward(10 * step + 1, extra=(step + side.rank) % 2 == 0)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return weights(model)
