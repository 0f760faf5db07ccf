"""The small CNN of bench.serve, for ours and for the peers: needs torch alone."""

from __future__ import annotations

import torch
from torch import nn

ITEM = (1, 28, 28)


def make() -> nn.Module:
    """LeNet-5 with ReLU and max pooling: 62 thousand parameters."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, 10),
    ).eval()


def example_inputs() -> torch.Tensor:
    return torch.zeros(1, *ITEM)
