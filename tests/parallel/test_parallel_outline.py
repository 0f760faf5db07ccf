"""Models that functions make, without memory at first: what would not get the weights that its constructor gave."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from paceline.core.errors import ConfigError
from paceline.parallel.outline import check_offload, outline


class Net(nn.Module):
    """As torch makes it, with something done to it afterwards."""

    def __init__(self, afterwards: Callable[[Net], object] = lambda net: None) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(5, 3, padding_idx=0), nn.Linear(3, 4)
        self.conv, self.norm, self.lstm = nn.Conv2d(3, 3, 3), nn.BatchNorm1d(3), nn.LSTM(3, 4)
        self.head = nn.Linear(3, 5, bias=False)
        afterwards(self)


class Own(nn.Module):
    """With weights of its own, and a constant."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.weight, self.how = nn.Parameter(torch.empty(3)), how
        self.register_buffer("mask", torch.ones(3, 3).tril())
        if how != "late":
            self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.how == "data":
            self.weight.data.uniform_()
        else:
            nn.init.trunc_normal_(self.weight)
        if self.how == "another":
            self.mask = torch.ones(3, 3).tril()
        elif self.how != "forgets":
            self.mask.copy_(torch.ones(3, 3).tril())


def in_place(net: Net) -> None:
    with torch.no_grad():
        net.linear.bias[0] = 3.0


def small(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)


@pytest.mark.parametrize(
    ("afterwards", "named"),
    [
        (lambda net: net.apply(small), "'linear.weight' of Linear"),
        (lambda net: net.linear.weight.data.mul_(0.1), "'linear.weight' of Linear"),
        (lambda net: setattr(net.linear, "bias", nn.Parameter(torch.zeros(4))), "'linear.bias' of Linear"),
        (lambda net: nn.init.trunc_normal_(net.table.weight, std=0.02), "'table.weight' of Embedding"),
        (lambda net: nn.init.orthogonal_(net.lstm.weight_hh_l0), "'lstm.weight_hh_l0' of LSTM"),
        (lambda net: nn.init.zeros_(net.norm.weight), "'norm.weight' of BatchNorm1d"),
        (lambda net: setattr(net.head, "weight", net.table.weight), "'head.weight' of Linear"),
        (in_place, "'linear.bias' of Linear"),
    ],
)
def test_weights_that_would_be_lost_are_told(afterwards: Callable[[Net], object], named: str) -> None:
    with pytest.raises(ConfigError, match=r"would be lost\. Do it in reset_parameters") as told:
        outline(lambda: Net(afterwards))
    assert named in str(told.value)


def test_a_constant_that_nothing_fills_is_told() -> None:
    with pytest.raises(ConfigError, match=r"'0.mask' of Own is not filled by its reset_parameters\(\)"):
        outline(lambda: nn.Sequential(Own("forgets")))


@pytest.mark.parametrize("how", ["at once", "late", "data", "another"])
def test_what_reset_parameters_makes_is_taken(how: str) -> None:
    model = outline(lambda: nn.Sequential(Net(), Net(lambda net: net.linear.reset_parameters()), Own(how)))
    assert all(p.is_meta for p in model.parameters())


@pytest.mark.parametrize(
    ("offload", "device", "size", "said"),
    [
        ("parameters", "cuda", 1, "--mesh shard=1, which cuts into one part"),
        ("parameters", "cpu", 1, "is in host memory; leave it out"),
        ("parameters", "cpu", 2, "--mesh shard=2"),
        ("optimizer", "cpu", 2, r"""by --strategy 'zero\(offload="optimizer"\)'"""),
        ("parameter", "cpu", 2, "did you mean 'parameters'"),
    ],
)
def test_what_offload_would_need_is_told(offload: str, device: str, size: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_offload(offload, torch.device(device), size, cuts=False)
