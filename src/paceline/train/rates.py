"""The learning rate of a step with fewer members than a run may have.

A script's rate is meant for the global batch of all members. With fewer of them that batch is smaller, and so may the
rate have to be: in proportion to it, or to its square root. The rule is applied to the step alone: param_groups hold
the script's own rate before and after, so schedulers and logs see nothing of it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch

RULES = ("keep", "linear", "sqrt")


def factor(rule: str, size: int, most: int) -> float:
    """
    >>> factor("linear", 3, 4), factor("sqrt", 1, 4), factor("keep", 1, 4)
    (0.75, 0.5, 1.0)
    """
    share = size / most
    return {"linear": share, "sqrt": math.sqrt(share)}.get(rule, 1.0)


@contextlib.contextmanager
def scaled(optimizer: torch.optim.Optimizer, by: float) -> Iterator[None]:
    """Within this, all groups of the optimizer have so many times their learning rate."""
    if by == 1.0:
        yield
        return
    rates = [group.get("lr") for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates):
        if rate is not None:
            group["lr"] = rate * by
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates):
            if rate is not None:
                group["lr"] = rate
