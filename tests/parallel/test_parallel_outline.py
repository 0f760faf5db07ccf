"""Models that functions make, without memory at first: they get the weights that their constructors give them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from paceline.core.errors import ConfigError
from paceline.parallel.history import named
from paceline.parallel.outline import check_offload, initialise, outline, to_memory, whole_model

CPU = torch.device("cpu")


class Net(nn.Module):
    """As torch makes it, with something done to it afterwards."""

    def __init__(self, afterwards: Callable[[Net], object] = lambda net: None) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(50, 30, padding_idx=0), nn.Linear(30, 40)
        self.conv, self.norm, self.lstm = nn.Conv2d(3, 3, 3), nn.BatchNorm1d(3), nn.LSTM(30, 30)
        self.attention = nn.MultiheadAttention(8, 2)
        self.head = nn.Linear(30, 50, bias=False)
        afterwards(self)


class Own(nn.Module):
    """With tensors of its own, and no reset_parameters()."""

    def __init__(self) -> None:
        super().__init__()
        position = torch.arange(6).unsqueeze(1)
        rate = torch.exp(torch.arange(0, 4, 2) * (-math.log(10_000.0) / 4))
        waves = torch.zeros(6, 4)
        waves[:, 0::2] = torch.sin(position * rate)
        waves[:, 1::2] = torch.cos(position * rate)
        self.register_buffer("waves", waves, persistent=False)
        self.register_buffer("mask", torch.ones(5, 5).tril().view(1, 5, 5).bool())
        self.register_buffer("mean", torch.tensor([0.4, 0.5]).view(1, 2))
        self.register_buffer("kept", torch.Tensor([1.0, 2.0]))  # has values whatever the device is
        self.weight = nn.Parameter(torch.full((3, 4), 2.0))
        self.scale = nn.Parameter(1e-6 * torch.ones(4))
        self.twice = nn.Parameter(self.weight.detach().t().clone() * 2)
        with torch.no_grad():
            self.weight[1, :2] = 7.0
            self.weight.view(-1)[-1] = torch.as_tensor(9.0)
        self.short = nn.Parameter(self.weight.detach().half())


def small(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


def test_constants_are_those_of_the_constructor() -> None:
    plain, made = Own(), whole_model(Own, CPU, seed=3)
    found = dict(named(made))
    assert list(found) == [name for name, _ in named(plain)]
    for name, tensor in named(plain):
        assert torch.equal(found[name], tensor), name
        assert (found[name].dtype, found[name].stride()) == (tensor.dtype, tensor.stride()), name


def near(tensor: torch.Tensor, std: float) -> None:
    assert float(tensor.std()) == pytest.approx(std, rel=0.15)
    assert float(tensor.mean()) == pytest.approx(0, abs=0.15 * std)


def orthogonal(weight: torch.Tensor) -> None:
    assert torch.allclose(weight.T @ weight, torch.eye(weight.shape[1]), atol=1e-5)


def identity(weight: torch.Tensor) -> None:
    x = torch.randn(1, 3, 5, 5)
    assert torch.allclose(nn.functional.conv2d(x, weight, padding=1), x)


@pytest.mark.parametrize(
    ("afterwards", "holds"),
    [
        (lambda net: None, lambda net: near(net.linear.weight, 1 / math.sqrt(3 * 30))),
        (lambda net: net.apply(small), lambda net: near(net.head.weight, 0.02)),
        (lambda net: net.linear.weight.data.mul_(0.1), lambda net: near(net.linear.weight, 0.1 / math.sqrt(3 * 30))),
        (lambda net: nn.init.trunc_normal_(net.table.weight, std=0.02), lambda net: near(net.table.weight, 0.02)),
        (lambda net: nn.init.orthogonal_(net.lstm.weight_hh_l0), lambda net: orthogonal(net.lstm.weight_hh_l0)),
        (lambda net: nn.init.dirac_(net.conv.weight), lambda net: identity(net.conv.weight)),
        (
            lambda net: nn.init.sparse_(net.linear.weight, sparsity=0.5),
            lambda net: (net.linear.weight == 0).sum(0).tolist() == [20] * 30 or pytest.fail("not sparse"),
        ),
    ],
)
def test_random_weights_are_drawn_as_the_constructor_says(
    afterwards: Callable[[Net], object], holds: Callable[[Net], object]
) -> None:
    made = whole_model(lambda: Net(afterwards), CPU, seed=5)
    assert isinstance(made, Net)
    with torch.no_grad():
        holds(made)
    assert made.norm.running_var is not None
    assert made.norm.running_var.tolist() == [1.0] * 3
    assert int(made.norm.num_batches_tracked or 0) == 0
    assert (made.attention.in_proj_bias == 0).all()
    assert len({p.flatten()[-1].item() for p in (made.linear.weight, made.head.weight, made.lstm.weight_hh_l0)}) == 3


def test_seeds_decide_and_nothing_else_does() -> None:
    def weights(seed: int) -> torch.Tensor:
        made = whole_model(lambda: Net(lambda net: net.apply(small)), CPU, seed)
        return torch.cat([p.detach().flatten() for p in made.parameters()])

    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = weights(0)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(weights(0), first)
    assert not torch.equal(weights(1), first)


def test_a_tensor_has_the_same_values_whoever_makes_it() -> None:
    """One after the other and each alone, as the members of a run make theirs."""
    _, history = outline(lambda: Net(lambda net: net.apply(small)))
    model = Net()
    alone = {name: history.whole(name, 4) for name, _ in reversed([*named(model)])}
    _, other = outline(lambda: Net(lambda net: net.apply(small)))
    for name, _ in named(model):
        assert torch.equal(other.whole(name, 4), alone[name]), name


def test_what_is_made_of_another_tensor_has_its_values() -> None:
    def copied(net: Net) -> None:
        net.head.weight = nn.Parameter(net.table.weight.detach().clone())
        nn.init.zeros_(net.table.weight)  # later: the copy stays as it is

    made = whole_model(lambda: Net(copied), CPU, seed=2)
    assert isinstance(made, Net)
    plain = whole_model(Net, CPU, seed=2)
    assert isinstance(plain, Net)
    assert (made.table.weight == 0).all()
    assert made.head.weight.std() > 0.5
    assert (made.head.weight[0] == 0).all()  # padding_idx


def test_a_tied_tensor_stays_one() -> None:
    def tied(net: Net) -> None:
        net.apply(small)
        net.head.weight = net.table.weight

    made = whole_model(lambda: Net(tied), CPU, seed=0)
    assert isinstance(made, Net)
    assert made.head.weight is made.table.weight
    near(made.table.weight.detach(), 0.02)


def test_members_make_only_what_they_have() -> None:
    model, history = outline(Net)
    assert all(tensor.is_meta for _, tensor in named(model))
    linear = model.linear
    assert isinstance(linear, nn.Module)
    to_memory(linear, CPU)
    initialise(model, history, CPU, 7)
    assert [name for name, p in model.named_parameters() if not p.is_meta] == ["linear.weight", "linear.bias"]
    whole = whole_model(Net, CPU, seed=7)
    assert torch.equal(model.get_parameter("linear.weight"), whole.get_parameter("linear.weight"))


def test_a_constructor_that_asks_for_values_is_told() -> None:
    def asks() -> nn.Module:
        net = Net()
        if net.linear.weight.max() > 1:
            net.linear.weight.data.div_(2)
        return net

    with pytest.raises(ConfigError, match=r"test_parallel_outline\.py:\d+ \(if net\.linear\.weight\.max\(\) > 1:\)"):
        outline(asks)


def test_what_is_no_model_is_told() -> None:
    with pytest.raises(ConfigError, match="returned a int"):
        outline(lambda: 3)  # type: ignore[arg-type,return-value]


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
