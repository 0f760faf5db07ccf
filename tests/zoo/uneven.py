"""Cases of the zoo in which the last batch is uneven: the mean is over the samples that exist.

DDP gives a member with one sample as much say as one with four, so here the reference is one process that
takes each global batch whole. Which samples were in it is what the members saw: the rows carry their number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from case import Result, mlp, weights
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

EPOCHS, BATCH = 2, 4
SIZES = {"uneven_21": 21, "uneven_19": 19, "uneven_17": 17, "uneven_18_accumulated": 18}


def samples(count: int) -> TensorDataset:
    g = torch.Generator().manual_seed(3)
    return TensorDataset(
        torch.randn(count, 8, generator=g), torch.randint(4, (count,), generator=g), torch.arange(count)
    )


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = mlp()
    return model, torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def _train(side: Any, count: int, accumulated: bool) -> Result:
    run = side.run
    model, optimizer = make()
    optimizer = run.optimizer(optimizer, model)
    loader = run.loader(samples(count), batch_size=BATCH)
    seen: list[list[int]] = []
    for epoch in range(EPOCHS):
        loader.set_epoch(epoch)
        for number, (x, y, index) in enumerate(loader):
            optimizer.zero_grad()
            if accumulated:  # the batch in two passes, the first of them kept here
                cut = (len(x) + 1) // 2
                with run.accumulate():
                    (F.cross_entropy(model(x[:cut]), y[:cut], reduction="sum") / len(x)).backward()
                rest = F.cross_entropy(model(x[cut:]), y[cut:], reduction="sum") / len(x)
                rest.backward()
            else:
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            real = index[: loader.last_real].tolist()
            seen.append([epoch, number, *real, *[-1] * (BATCH - len(real))])
    return weights(model) | {"seen": torch.tensor(seen)}


def reference(count: int, seen: list[Tensor]) -> Result:
    """One process that takes what all members saw in a step as one batch."""
    model, optimizer = make()
    x, y, _ = samples(count).tensors
    visited = []
    for rows in zip(*(s.tolist() for s in seen)):
        batch = [i for row in rows for i in row[2:] if i >= 0]
        visited += batch
        optimizer.zero_grad()
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
    assert sorted(visited) == sorted(list(range(count)) * EPOCHS), "samples were lost or repeated"
    return weights(model)


UNEVEN: dict[str, Callable[[Any], Result]] = {
    name: lambda side, name=name, count=count: _train(side, count, "accumulated" in name)  # type: ignore[misc]
    for name, count in SIZES.items()
}
