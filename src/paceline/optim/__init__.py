"""Optimizers that torch.optim lacks: ordinary ones, for any script; servers apply them too.

>>> import paceline
>>> paceline.optim.Adagrad([torch.nn.Parameter(torch.zeros(3))], lr=0.1, decay=0.9).param_groups[0]["decay"]
0.9
"""

from __future__ import annotations

import torch

from paceline.optim.adagrad import Adagrad
from paceline.optim.delayed import DelayedNesterov

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {  # by the name that travels
    "paceline.Adagrad": Adagrad,
    "paceline.DelayedNesterov": DelayedNesterov,
}

__all__ = ["OPTIMIZERS", "Adagrad", "DelayedNesterov"]
