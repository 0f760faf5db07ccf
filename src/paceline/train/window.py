"""The window of an accumulation: gradients that `run.accumulate()` keeps here until a later pass sends their sum.

They are each member's own, weighed for the members of now, and no checkpoint holds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch


class Window:
    """`open` from a pass within `run.accumulate()` until a step is taken or the gradients are dropped."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self.open = False
        self._warn = warn
        self._warned = False

    def before_checkpoint(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Warn, once, where a checkpoint falls into an open window."""
        if not self.open or self._warned:
            return
        if any(p.grad is not None for o in optimizers for group in o.param_groups for p in group["params"]):
            self._warned = True
            self._warn(
                "gradients that run.accumulate() keeps are not in the checkpoint: a run that is resumed from it goes "
                "on without them. End the window with the epoch: its last backward pass outside run.accumulate(), "
                "then a step"
            )
