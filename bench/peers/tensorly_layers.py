"""tensorly's linear layer in tensor-train form (`BlockTT` of tensorly-torch), steered by bench.tensor_train.

Tuned: of its two implementations, which contract the cores with x (opt_einsum looks for the order) or compute the
weight first, each cell takes the one that a trial found faster.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from tltorch import FactorizedLinear

from bench.team import serve

torch.set_num_threads(1)
WAYS = ("factorized", "reconstructed")
_held: dict[str, Any] = {}


def set_up(modes: list[int], rank: int, batch: int, training: bool) -> str:
    """Layers of both ways, of which the faster stays."""
    torch.manual_seed(0)
    side = 1
    for mode in modes:
        side *= mode
    x = torch.randn(batch, side, requires_grad=training)
    taken = {}
    for way in WAYS:
        layer = FactorizedLinear(
            tuple(modes), tuple(modes), bias=False, factorization="blocktt", rank=rank, implementation=way
        )
        with torch.no_grad():
            layer.weight.normal_(0, 0.02)
        _held[way] = (layer, x, training)
        taken[way] = min(block(way, rank, 1), block(way, rank, 1))
    best = min(taken, key=lambda way: taken[way])
    _held[str(rank)] = _held[best]
    return best


def block(way: str, rank: int, steps: int) -> float:
    """So many passes of the way, or, where it is "", of the best one of this rank; seconds."""
    layer, x, training = _held[way or str(rank)]
    began = time.perf_counter()
    for _ in range(steps):
        if training:
            y = layer(x)
            torch.autograd.grad(y, [x, *layer.parameters()], y.detach())
        else:
            with torch.no_grad():
                layer(x)
    return time.perf_counter() - began


if __name__ == "__main__":
    serve({"set_up": set_up, "block": block}, rank=0)
