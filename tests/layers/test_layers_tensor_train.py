"""Tensor trains: the SVD against its bound, every order against the dense product, layers, conversion, members."""

from __future__ import annotations

import copy
import math
import re
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from paceline.core.errors import ConfigError
from paceline.layers import SpreadTTLinear, TTEmbedding, TTLinear, to_tensor_train, verdict
from paceline.layers.tensor_train import cost, svd
from paceline.layers.tensor_train import product as contraction
from paceline.layers.tensor_train.order import Plan, Rates, plan, plans, seconds
from paceline.layers.tensor_train.product import product
from paceline.layers.tensor_train.shapes import modes, shape_of, with_ranks
from paceline.testing.cluster import Cluster
from paceline.testing.together import together
from paceline.transport.group import Group

CHEAP = settings(max_examples=40, deadline=None)


def random(*size: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# ---- modes


@CHEAP
@given(size=st.integers(1, 200_000), num=st.integers(2, 4))
def test_modes_hold_the_size_and_little_more(size: int, num: int) -> None:
    found = modes(size, num)
    assert len(found) == num
    assert list(found) == sorted(found)
    assert size <= math.prod(found) < 2 * size
    even = math.ceil(size ** (1 / num))
    assert sum(found) <= 2.5 * num * even


def test_a_wrong_shape_is_told_of() -> None:
    with pytest.raises(ConfigError, match=r"^cores=1: a tensor train has 2 to 6 of them$"):
        shape_of(4, 4, 2, 1)
    with pytest.raises(ConfigError, match=r"^rank=0: a number of at least 1 is needed"):
        TTLinear(4, 4, rank=0)
    with pytest.raises(ConfigError, match=r"or 2 of them, between cores$"):
        TTLinear(64, 64, rank=(2, 2, 2), num_cores=3)
    with pytest.raises(ConfigError, match="nothing to cut"):
        TTLinear(0, 4, rank=1)


# ---- TT-SVD


def dropped(matrix: torch.Tensor, cores: list[torch.Tensor], outs: tuple[int, ...], ins: tuple[int, ...]) -> float:
    """√Σ_k ε_k² from the singular values of the tensor's own unfoldings, which bounds the error of TT-SVD."""
    num = len(outs)
    axes = [axis for k in range(num) for axis in (k, num + k)]
    whole = matrix.reshape(*outs, *ins).permute(axes)
    total = 0.0
    for k in range(num - 1):
        rows = math.prod(outs[: k + 1]) * math.prod(ins[: k + 1])
        values = torch.linalg.svdvals(whole.reshape(rows, -1))
        total += float(values[cores[k].shape[3] :].square().sum())
    return math.sqrt(total)


@CHEAP
@given(
    outs=st.lists(st.integers(1, 4), min_size=2, max_size=4),
    data=st.data(),
    rank=st.integers(1, 6),
    seed=st.integers(0, 1000),
)
def test_tt_svd_keeps_its_bound(outs: list[int], data: st.DataObject, rank: int, seed: int) -> None:
    ins = data.draw(st.lists(st.integers(1, 4), min_size=len(outs), max_size=len(outs)))
    matrix = random(math.prod(outs), math.prod(ins), seed=seed)
    shape = with_ranks(tuple(outs), tuple(ins), rank)
    cores = svd.decompose(matrix, shape)
    away = float((svd.compose(cores) - matrix).norm())
    bound = dropped(matrix, cores, shape.outs, shape.ins)
    assert away <= bound + 1e-10
    assert away >= bound / math.sqrt(len(outs) - 1) - 1e-10  # each unfolding alone bounds it from below


@CHEAP
@given(error=st.floats(0.0, 0.9), num=st.integers(2, 4), rows=st.integers(2, 40), columns=st.integers(2, 40))
def test_the_error_asked_for_is_kept(error: float, num: int, rows: int, columns: int) -> None:
    matrix = random(rows, columns, seed=rows)
    cores = svd.decompose(matrix, shape_of(rows, columns, rows * columns, num), error)
    assert svd.relative_error(matrix, cores) <= error + 1e-9


def test_a_looser_error_gives_smaller_ranks_and_the_smallest_that_hold() -> None:
    matrix = random(64, 64)
    ranks = [svd.decompose(matrix, shape_of(64, 64, 4096), e)[0].shape[3] for e in (0.1, 0.3, 0.6)]
    assert ranks == sorted(ranks, reverse=True)
    assert len(set(ranks)) == 3
    one_less = svd.decompose(matrix, shape_of(64, 64, ranks[1] - 1))
    assert svd.relative_error(matrix, one_less) > 0.3


def test_a_large_matrix_is_cut_as_closely_by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = random(256, 256) + 8 * random(256, 4) @ random(4, 256, seed=1)
    shape = shape_of(256, 256, 12)
    exact = svd.relative_error(matrix, svd.decompose(matrix, shape))
    monkeypatch.setattr(svd, "_EXACT_BELOW", 16)
    near = svd.decompose(matrix, shape)
    assert svd.relative_error(matrix, near) <= 1.01 * exact
    assert all(torch.equal(a, b) for a, b in zip(near, svd.decompose(matrix, shape)))  # members get the same
    wide = svd.decompose(matrix, shape_of(256, 256, 256), 0.7)
    assert svd.relative_error(matrix, wide) <= 0.7


def test_cores_share_the_scale() -> None:
    first, second = svd.decompose(100 * random(30, 30), shape_of(30, 30, 5))
    left, right = first.square().sum((0, 1, 2)), second.square().sum((1, 2, 3))
    torch.testing.assert_close(left, right)


@pytest.mark.parametrize("error", [-0.1, 1.0, math.nan])
def test_a_wrong_error_is_told_of(error: float) -> None:
    with pytest.raises(ConfigError, match="a share of the norm is needed"):
        TTLinear.of(nn.Linear(4, 4), error=error)


def test_a_weight_that_is_not_finite_is_told_of() -> None:
    layer = nn.Linear(4, 4)
    nn.init.constant_(layer.weight, math.inf)
    with pytest.raises(ConfigError, match="not finite"):
        TTLinear.of(layer, rank=2)


def test_zeros_stay_zeros() -> None:
    layer = nn.Linear(6, 6)
    nn.init.zeros_(layer.weight)
    made = TTLinear.of(layer, rank=3)
    assert not made.weight.any()
    assert svd.relative_error(layer.weight, [*made.cores]) == 0


# ---- orders


CUTS = [((12, 10), 2, 3), ((24, 30), 3, 3), ((16, 81), 4, (2, 5, 3)), ((7, 1), 2, 2), ((64, 64), 5, 2)]


@pytest.mark.parametrize(("size", "num", "rank"), CUTS)
def test_every_order_is_the_dense_product(size: tuple[int, int], num: int, rank: int | tuple[int, ...]) -> None:
    shape = shape_of(*size, rank, num)
    cores = [random(*core, seed=k) for k, core in enumerate(shape.cores)]
    x = random(5, shape.columns)
    expected = x @ svd.compose(cores).T
    orders = list(plans(shape, 5))
    assert len({tuple(s[:2] for s in found.steps) for found in orders}) == [3, 11, 49, 261][num - 2]
    for found in orders if num < 5 else orders[::7]:
        for block in (2, 5):
            torch.testing.assert_close(product(x, cores, found._replace(block=block)), expected)


@pytest.mark.parametrize("num", [2, 3])
def test_gradients_of_every_order(num: int) -> None:
    shape = shape_of(6, 8, 2, num)
    cores = [random(*core, seed=k).requires_grad_() for k, core in enumerate(shape.cores)]
    x = random(3, 8, seed=9).requires_grad_()

    def through(found: Plan) -> bool:
        def f(x: torch.Tensor, *cores: torch.Tensor) -> torch.Tensor:
            return product(x, cores, found)

        return torch.autograd.gradcheck(f, (x, *cores)) and torch.autograd.gradgradcheck(f, (x, *cores))

    for found in plans(shape, 3):
        assert through(found)
    assert through(plan(shape, 1)._replace(block=2))


def test_gradients_by_a_call_for_each_product_and_by_copies_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    grad, z = random(6, 4, 5), random(6, 3, 5, seed=1)
    expected = torch.einsum("prq,pcq->rc", grad, z)
    for worth in (0, 1 << 30):
        monkeypatch.setattr(contraction, "_WORTH_A_CALL", worth)
        torch.testing.assert_close(contraction._of_matrix(grad, z), expected)


def test_the_cheapest_order_depends_on_the_batch() -> None:
    shape = shape_of(64, 64, 16)
    assert not plan(shape, 1).dense
    assert plan(shape, 100_000).dense
    many = shape_of(4096, 4096, 8, 4)
    for batch in (1, 64):
        best = plan(many, batch)
        assert seconds(best, batch, Rates()) == min(seconds(p, batch, Rates()) for p in plans(many, batch))


def test_another_device_does_a_whole_batch_at_once() -> None:
    shape = shape_of(4096, 4096, 8)
    assert plan(shape, 256).block < 256 <= plan(shape, 256, "cuda").block


# ---- layers


@pytest.mark.parametrize("sizes", [(48, 36), (13, 17), (10, 1), (1, 10)])
@pytest.mark.parametrize("num_cores", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_linear_layer_is_its_weight(sizes: tuple[int, int], num_cores: int, dtype: torch.dtype) -> None:
    layer = TTLinear(*sizes, rank=3, num_cores=num_cores, dtype=dtype)
    x = random(2, 7, sizes[0]).to(dtype)
    expected = nn.functional.linear(x, layer.weight, layer.bias)
    bounds = {"rtol": 0.1, "atol": 0.1} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(layer(x), expected, **bounds)
    torch.testing.assert_close(layer(x[0, 0]), expected[0, 0], **bounds)
    assert layer(x[:0]).shape == (0, 7, sizes[1])


def test_gradients_are_those_of_the_dense_layer() -> None:
    layer = TTLinear(20, 30, rank=4, num_cores=3, dtype=torch.float64)
    x = random(4, 20).requires_grad_()
    given = random(4, 30, seed=3)
    ours = torch.autograd.grad(layer(x), [x, *layer.parameters()], given)
    dense = torch.autograd.grad(nn.functional.linear(x, layer.weight, layer.bias), [x, *layer.parameters()], given)
    for a, b in zip(ours, dense):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("num_cores", [2, 3, 4])
def test_new_weights_have_the_variance_of_the_dense_layer(num_cores: int) -> None:
    torch.manual_seed(0)
    found = [TTLinear(256, 256, rank=8, num_cores=num_cores).weight.var().item() for _ in range(20)]
    assert sum(found) / 20 == pytest.approx(1 / (3 * 256), rel=0.25)
    found = [TTEmbedding(256, 64, rank=8, num_cores=num_cores).weight.var().item() for _ in range(20)]
    assert sum(found) / 20 == pytest.approx(1, rel=0.25)


def test_under_autocast_it_computes_in_the_shorter_type() -> None:
    layer = TTLinear(16, 16, rank=4)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(torch.randn(3, 16))
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())


def test_a_state_goes_through_a_file(tmp_path: Path) -> None:
    model = nn.Sequential(TTEmbedding(50, 12, rank=3), TTLinear(12, 20, rank=3, num_cores=3))
    safetensors.torch.save_file(model.state_dict(), tmp_path / "model.safetensors")
    other = nn.Sequential(TTEmbedding(50, 12, rank=3), TTLinear(12, 20, rank=3, num_cores=3))
    index = torch.tensor([3, 7])
    assert not torch.equal(model(index), other(index))
    other.load_state_dict(safetensors.torch.load_file(tmp_path / "model.safetensors"))
    assert torch.equal(model(index), other(index))
    assert list(model.state_dict()) == ["0.core0", "0.core1", "1.core0", "1.core1", "1.core2", "1.bias"]


def test_wrong_features_are_told_of() -> None:
    with pytest.raises(ConfigError, match=r"^TTLinear wants 4 features in the last place, got \(2, 5\)$"):
        TTLinear(4, 4, rank=1)(torch.zeros(2, 5))


@pytest.mark.parametrize("num_cores", [2, 3])
@pytest.mark.parametrize("padding_idx", [None, 5, -1])
def test_rows_of_an_embedding_are_those_of_its_table(num_cores: int, padding_idx: int | None) -> None:
    layer = TTEmbedding(101, 13, padding_idx, rank=4, num_cores=num_cores, dtype=torch.float64)
    table = layer.weight
    everything = torch.arange(101)
    torch.testing.assert_close(layer(everything), table)
    index = torch.tensor([[5, 100, 0], [5, 5, 17]], dtype=torch.int32)
    torch.testing.assert_close(layer(index), table[index.long()])
    given = random(2, 3, 13)
    ours = torch.autograd.grad(layer(index), layer.cores, given)
    dense = torch.autograd.grad(nn.functional.embedding(index.long(), table), layer.cores, given)
    for a, b in zip(ours, dense):
        torch.testing.assert_close(a, b)
    assert layer(index[:0]).shape == (0, 3, 13)
    if padding_idx is not None:
        assert not layer(torch.tensor(padding_idx % 101)).any()


def test_wrong_rows_are_told_of() -> None:
    layer = TTEmbedding(10, 4, rank=2)
    with pytest.raises(IndexError, match=r"rows 3 … 10 were asked for, there are 0 … 9"):
        layer(torch.tensor([3, 10]))
    with pytest.raises(IndexError, match="rows -1 "):
        layer(torch.tensor(-1))
    with pytest.raises(ConfigError, match="whole numbers"):
        layer(torch.zeros(2))
    with pytest.raises(ConfigError, match="padding_idx=10"):
        TTEmbedding(10, 4, 10, rank=2)


# ---- the rule


def machine(layer_s: float = 1e-5) -> cost.Machine:
    """A made-up one, whose dense layer takes 1 ns for each weight and a hundred rows."""
    dense = tuple(tuple(side * side * 1e-9 * max(1, b / 100) for b in cost._BATCHES) for side in cost._SIDES)
    return cost.Machine("cpu", layer_s, Rates(1e-6, 1e-7, 1e-11, 1e-10), dense)


@pytest.fixture
def calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "calibrate", lambda device, dtype, *, training: machine())


@pytest.mark.usefixtures("calibrated")
def test_the_rule_follows_batch_size_and_rank() -> None:
    assert verdict(4096, 4096, rank=8, batch=1).pays
    assert not verdict(4096, 4096, rank=64, batch=256).pays
    assert not verdict(64, 64, rank=2, batch=1).pays
    assert verdict(4096, 4096, rank=4, batch=1).train_s < verdict(4096, 4096, rank=32, batch=1).train_s
    assert not verdict(1024, 1024, rank=1024, batch=1)._replace(train_s=0.0).pays  # faster, but larger
    joined = verdict(256, 256, rank=64, batch=4096)  # as a dense weight, which cannot be faster than that
    assert joined.train_s >= joined.dense_s
    with pytest.raises(ConfigError, match="batch=0"):
        verdict(64, 64, rank=2, batch=0)


def test_a_machine_recalls_what_was_measured() -> None:
    found = machine()
    assert found.dense(1024, 1024, 256) == pytest.approx(1024**2 * 2.56e-9)
    assert found.dense(2048, 2048, 1) == pytest.approx(2048**2 * 1e-9)
    assert found.dense(8192, 8192, 1) == pytest.approx(8192**2 * 1e-9)


def test_calibration_is_made_once_and_predicts_what_it_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time here is what the model itself says, so that no clock is asked."""
    truth = Rates(3e-6, 2e-7, 1e-11, 1e-10)
    asked = []

    def timed(work: cost._Work, device: torch.device) -> float:
        asked.append(work.layer)
        if isinstance(work.layer, TTLinear):
            batch = work.x.shape[0]
            return 5e-5 + seconds(plan(work.layer.shape, batch), batch, truth)
        return 1e-9 * work.layer.weight.numel() * work.x.shape[0] ** 0.5

    monkeypatch.setattr(cost, "_best", timed)
    monkeypatch.setattr(cost, "_known", {})
    found = cost.calibrate()
    times = len(asked)
    assert cost.calibrate() is found
    assert len(asked) == times
    for side, rank, batch in ((512, 8, 4), (4096, 32, 16), (1024, 64, 1)):
        shape = shape_of(side, side, rank)
        expected = 5e-5 + seconds(plan(shape, batch), batch, truth)
        assert found.train(shape, batch) == pytest.approx(expected, rel=0.05)
    cost.calibrate(dtype=torch.float64)
    assert len(asked) == 2 * times


def test_both_passes_are_real_and_timed() -> None:
    layer = TTLinear(16, 16, rank=2)
    for training in (False, True):
        work = cost._Work(layer, torch.randn(2, 16).requires_grad_(training), training)
        assert isinstance(work(), tuple) is training
        assert 0 < cost._best(work, torch.device("cpu")) < math.inf
    assert layer.core0.grad is None


# ---- conversion


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024), nn.ReLU(), nn.Linear(1024, 10))


@pytest.mark.usefixtures("calibrated")
def test_layers_are_replaced_where_it_pays() -> None:
    model = mlp().eval()
    model[0].weight.requires_grad_(False)
    found = to_tensor_train(model, rank=8, batch=4)
    assert [layer.replaced for layer in found.layers] == [True, True, False]
    assert [type(m).__name__ for m in model] == ["TTLinear", "ReLU", "TTLinear", "ReLU", "Linear"]
    assert not model[0].training
    assert [p.requires_grad for p in model[0].parameters()] == [False, False, True]
    assert found.parameters_after == sum(p.numel() for p in model.parameters())
    assert found.smaller > 50
    table = str(found)
    assert re.search(r"^0 +4096x1024 +8 +0\.\d+ +replaced +batch 4: .* it pays$", table, flags=re.M)
    assert re.search(r"^4 +10x1024 +- +- +kept +batch 4, rank 8: .* it is slower$", table, flags=re.M)
    model(torch.randn(4, 1024)).sum().backward()


@pytest.mark.usefixtures("calibrated")
def test_a_loser_is_refused_and_the_model_left_as_it_was() -> None:
    model = mlp()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ConfigError, match=r"^no layer gains from a tensor train, so none was replaced:\n") as told:
        to_tensor_train(model, rank=64, batch=256)
    assert str(told.value).count("it is slower") == 2
    assert re.search(r"^4 +10x1024 .* kept +at rank 64 it would not be smaller$", str(told.value), flags=re.M)
    with pytest.raises(ConfigError, match="at rank 5000 it would not be smaller"):
        to_tensor_train(model, rank=5000, gain="size")
    with pytest.raises(ConfigError, match=r"kept +it would not be smaller"):
        to_tensor_train(model, error=0.0, gain="size", only="4")
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values()))
    assert to_tensor_train(model, rank=64, gain="size").smaller > 1  # asked for size, it is done


def test_a_model_with_an_embedding_is_converted_to_an_error() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"words": nn.Embedding(400, 36, padding_idx=0), "head": nn.Linear(36, 400)})
    low = random(400, 2, dtype=torch.float32) @ random(2, 36, dtype=torch.float32)
    with torch.no_grad():
        model["words"].weight.copy_(torch.kron(low[:20, :6], low[20:40, 6:12]))
        model["words"].weight[0] = 0
    table = model["words"].weight.detach().clone()
    found = to_tensor_train(model, error=0.01, rank=8, gain="size", only="words")
    [layer] = found.layers
    assert layer.ranks[0] <= 2
    assert layer.error <= 0.01
    rows = model["words"](torch.arange(400))
    assert (rows - table).norm() <= 0.011 * table.norm()
    assert not rows[0].any()
    assert isinstance(model["head"], nn.Linear)


class Odd(nn.Linear):
    """More than a plain layer."""


@pytest.mark.usefixtures("calibrated")
def test_what_cannot_be_replaced_is_kept_with_its_reason() -> None:
    model = nn.ModuleDict({
        "plain": nn.Linear(64, 64), "odd": Odd(64, 64), "hooked": nn.Linear(64, 64), "words": nn.Embedding(64, 64),
        "head": nn.Linear(64, 64, bias=False), "normed": nn.Embedding(64, 64, max_norm=1.0),
        "parted": nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)), "attention": nn.MultiheadAttention(64, 2),
    })  # fmt: skip
    model["head"].weight = model["words"].weight
    model["hooked"].register_forward_hook(lambda *_: None)
    found = {layer.name: layer for layer in to_tensor_train(model, rank=2, gain="size").layers}
    reasons = {
        "odd": "Odd is more than a plain layer", "hooked": "it has hooks", "words": "shares its weight with head",
        "head": "shares its weight with words", "normed": "max_norm", "parted": "more than a plain",
        "attention.out_proj": "more than a plain",
    }  # fmt: skip
    assert [name for name, layer in found.items() if layer.replaced] == ["plain"]
    for name, reason in reasons.items():
        assert reason in found[name].why, found[name]
    with pytest.raises(ConfigError, match="a lookup copies a row"):
        to_tensor_train(nn.Sequential(nn.Embedding(64, 64)), rank=2, batch=8)
    with pytest.raises(ConfigError, match=r"the model itself: use TTLinear\.of"):
        to_tensor_train(nn.Linear(64, 64), rank=2, gain="size")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 8}, "batch= is needed"),
        ({"batch": 8}, "say how closely"),
        ({"rank": 8, "gain": "siez"}, "gain='siez': did you mean 'size'?"),
        ({"rank": 8, "gain": "size", "only": "fc*"}, "only='fc*' matches no linear layer and no embedding"),
    ],
)
def test_wrong_wishes_are_told_of(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        to_tensor_train(mlp(), **options)  # type: ignore[arg-type]


def test_a_converted_layer_learns_what_it_lost() -> None:
    torch.manual_seed(0)
    trained = nn.Linear(36, 36)
    layer = TTLinear.of(trained, rank=6)
    x = torch.randn(256, 6) @ torch.randn(6, 36)  # the SVD keeps what matters to all inputs, not to these
    target = torch.relu(trained(x)).detach()
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.01)
    losses = []
    for _ in range(200):
        loss = nn.functional.mse_loss(torch.relu(layer(x)), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]


# ---- spread over members


def whole(num_cores: int = 2) -> TTLinear:
    torch.manual_seed(3)
    return TTLinear(30, 26, rank=5, num_cores=num_cores, dtype=torch.float64)


@pytest.mark.parametrize("num_cores", [2, 3, 4])
def test_parts_make_the_whole(num_cores: int) -> None:
    """Outputs, and the gradients of x, of cores held in parts and of those that everyone holds."""
    layer = whole(num_cores)
    x = random(7, 30).requires_grad_()
    given = random(7, 26, seed=5)
    y = layer(x)
    of_x, *of_cores, of_bias = torch.autograd.grad(y, [x, *layer.cores, layer.bias], given)

    def member(group: Group) -> tuple[torch.Tensor, ...]:
        part = SpreadTTLinear(layer, group)
        mine = x.detach().clone().requires_grad_()
        out = part(mine)
        return (out.detach(), *torch.autograd.grad(out, [mine, *part.cores, part.bias], given))

    found = together(2, member)
    bond = num_cores // 2
    for out, to_x, *to_cores, to_bias in found:
        torch.testing.assert_close(out, y.detach())
        torch.testing.assert_close(to_x, of_x)
        torch.testing.assert_close(to_bias, of_bias)
        for k in range(num_cores):
            if k not in (bond - 1, bond):
                torch.testing.assert_close(to_cores[k], of_cores[k])
    torch.testing.assert_close(torch.cat([cores[2 + bond - 1] for cores in found], 3), of_cores[bond - 1])
    torch.testing.assert_close(torch.cat([cores[2 + bond] for cores in found], 0), of_cores[bond])


def test_a_rank_that_is_too_small_is_told_of() -> None:
    class Many:
        rank, size = 0, 9

    with pytest.raises(ConfigError, match="rank 5 cannot be cut into 9 parts"):
        SpreadTTLinear(whole(), Many())


def _train_apart() -> None:
    import torch

    import paceline
    from paceline.layers import SpreadTTLinear, TTLinear

    run = paceline.join()
    torch.manual_seed(0)
    whole = TTLinear(48, 40, rank=8)
    x, y = torch.randn(16, 48), torch.randn(16, 40)
    layers = [whole, SpreadTTLinear(whole, run.group)]
    for layer in layers:
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(layer(x), y).backward()
            optimizer.step()
    alone, spread = (layer(x).detach() for layer in layers)
    assert (alone - y).norm() < (TTLinear(48, 40, rank=8)(x) - y).norm()
    print("apart by less than 1e-5:", bool((alone - spread).abs().max() < 1e-5), run.size)


def test_two_processes_train_one_layer_as_one_does() -> None:
    for member in Cluster(2).run(_train_apart):
        assert member.code == 0, member.output
        assert "apart by less than 1e-5: True 2" in member.output


# ---- on a GPU


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_it_computes_and_is_calibrated_there() -> None:
    layer = TTLinear(1024, 768, rank=8, device="cuda")
    x = torch.randn(300, 1024, device="cuda", requires_grad=True)
    given = torch.randn(300, 768, device="cuda")
    ours = torch.autograd.grad(layer(x), [x, *layer.parameters()], given)
    dense = torch.autograd.grad(nn.functional.linear(x, layer.weight, layer.bias), [x, *layer.parameters()], given)
    for a, b in zip(ours, dense):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    words = TTEmbedding(1000, 64, rank=8, device="cuda")
    index = torch.tensor([3, 999], device="cuda")
    torch.testing.assert_close(words(index), words.weight[index], rtol=1e-3, atol=1e-3)
    assert not verdict(64, 64, rank=64, batch=256, device="cuda").pays
