"""Transfer: adapters against their base and merged, cuts, features that are kept and grow stale, probes, fusion."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from paceline.core.errors import ConfigError
from paceline.layers.transfer import (
    Concat,
    Gated,
    LoRAEmbedding,
    LoRALinear,
    WeightedSum,
    cut,
    features,
    freeze,
    head,
    load_lora,
    lora,
    merge,
    save,
    save_lora,
    suggest,
    unfreeze,
)
from paceline.layers.transfer.cutting import handed_on

CHEAP = settings(max_examples=30, deadline=None)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8, padding_idx=0)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.encoder(self.table(x)).mean(1))
        return out


ROWS = torch.randint(0, 20, (6, 5), generator=torch.Generator().manual_seed(0))


def train(model: nn.Module, steps: int = 5) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(ROWS).square().sum().backward()
        optimizer.step()


# ---- lora


@CHEAP
@given(rows=st.integers(1, 9), columns=st.integers(1, 9), data=st.data(), alpha=st.floats(0.5, 64), bias=st.booleans())
def test_a_merged_layer_is_the_layer(rows: int, columns: int, data: st.DataObject, alpha: float, bias: bool) -> None:
    base = nn.Linear(columns, rows, bias=bias)
    layer = LoRALinear(copy.deepcopy(base), data.draw(st.integers(1, min(rows, columns))), alpha)
    x = torch.randn(2, 3, columns)
    assert torch.equal(layer(x), base(x))
    nn.init.uniform_(layer.left, -0.01, 0.01)
    model = nn.Sequential(layer)
    wanted = model(x)
    assert merge(model) == ["0"]
    assert type(model[0]) is nn.Linear
    torch.testing.assert_close(model(x), wanted, rtol=1e-6, atol=1e-6)


def test_only_adapters_are_trained_and_all_can_be_merged() -> None:
    model = Words()
    plain = copy.deepcopy(model)
    names = lora(model, ["table", "encoder"], rank=2)
    assert names == ["table", "encoder.linear1", "encoder.linear2"]  # torch reads out_proj's weight past its forward
    assert isinstance(model.table, LoRAEmbedding)
    assert all(name.endswith((".left", ".right")) for name, p in model.named_parameters() if p.requires_grad)
    assert torch.equal(model(ROWS), plain(ROWS))
    train(model)
    assert not torch.allclose(model(ROWS), plain(ROWS), atol=1e-3)
    assert torch.equal(model.table.base.weight, plain.table.weight)
    assert torch.equal(model.table.weight[0], plain.table.weight[0])  # padded
    wanted = model(ROWS)
    with torch.no_grad():  # torch's fast path takes the weights themselves
        torch.testing.assert_close(model.eval()(ROWS), wanted, rtol=1e-5, atol=1e-6)
    assert merge(model.train()) == names
    torch.testing.assert_close(model(ROWS), wanted, rtol=1e-6, atol=1e-6)
    assert model.state_dict().keys() == plain.state_dict().keys()


def test_adapters_alone_are_saved_and_put_on_another_model(tmp_path: Path) -> None:
    model = Words()
    plain, there = copy.deepcopy(model), copy.deepcopy(model)
    lora(model, "encoder.linear1", rank=2, alpha=3)
    lora(model, "table", rank=4)
    assert sum(p.requires_grad for p in model.parameters()) == 4
    lora(there, "encoder.linear1", rank=2)
    train(model)
    assert save_lora(model, tmp_path / "a") == ["table", "encoder.linear1"]
    assert (tmp_path / "a").stat().st_size < 2000
    for other in (plain, there):
        assert load_lora(other, tmp_path / "a") == ["table", "encoder.linear1"]
        assert torch.equal(other(ROWS), model(ROWS))


def test_wrong_adapters_are_told_of(tmp_path: Path) -> None:
    model = Words()
    with pytest.raises(ConfigError, match=r"'encoder.norm1' matches no linear layer and no embedding"):
        lora(model, "encoder.norm1")
    with pytest.raises(ConfigError, match="rank=4: a weight of 3x8 takes 1 to 3"):
        lora(model, ["table", "head"], rank=4)
    assert type(model.table) is nn.Embedding
    with pytest.raises(ConfigError, match=r"rank=2.0: a weight of 3x8 takes 1 to 3"):
        lora(model, "head", rank=2.0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="alpha=0"):
        lora(model, "head", rank=2, alpha=0)
    for job in (merge, lambda m: save_lora(m, tmp_path / "a")):
        with pytest.raises(ConfigError, match="has no adapters"):
            job(model)
    save(model, tmp_path / "w")
    with pytest.raises(ConfigError, match="has no adapters of save_lora"):
        load_lora(model, tmp_path / "w")
    small = nn.Sequential(nn.Linear(4, 4))
    lora(small, "0", rank=1)
    save_lora(small, tmp_path / "a")
    with pytest.raises(ConfigError, match="has an adapter for '0', no layer of the model"):
        load_lora(model, tmp_path / "a")
    with pytest.raises(ConfigError, match="is for a weight of 4x4"):
        load_lora(nn.Sequential(nn.Linear(5, 4)), tmp_path / "a")
    model.head.weight = model.encoder.linear1.weight
    with pytest.raises(ConfigError, match=r"shares its weight with 'encoder.linear1'"):
        lora(model, "head")


def test_a_file_of_adapters_that_does_not_fit_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    source, model = Words(), Words()
    lora(source, ["encoder.linear1", "head"], rank=2)
    save_lora(source, tmp_path / "a")
    model.head.weight = nn.Parameter(torch.zeros(3, 8))
    model.extra = nn.Linear(8, 3)
    model.extra.weight = model.head.weight
    with pytest.raises(ConfigError, match="'head' shares its weight with 'extra'"):
        load_lora(model, tmp_path / "a")
    assert type(model.encoder.linear1) is nn.Linear
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    ("about", "told"),
    [
        ('{"head": 1.0}', "has no two matrices head.left and head.right that fit"),
        ("{", "has no adapters of save_lora"),
        ('["head"]', "has no adapters of save_lora"),
        ('{"head": "much"}', "has no adapters of save_lora"),
    ],
)
def test_torn_files_of_adapters_are_told_of(about: str, told: str, tmp_path: Path) -> None:
    save_file({"head.left": torch.zeros(3, 2)}, tmp_path / "a", {"paceline.lora": about})
    with pytest.raises(ConfigError, match=told):
        load_lora(Words(), tmp_path / "a")


# ---- cut


def chain() -> nn.Sequential:
    inner = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(), nn.Linear(5, 5))
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), inner, nn.ReLU(), nn.Linear(5, 3))


@pytest.mark.parametrize("name", ["0", "1", "2", "2.0", "2.1", "2.3", "3"])
def test_both_parts_are_the_model(name: str) -> None:
    model = chain().eval()
    bottom, top = cut(model, name)
    x = torch.randn(7, 4)
    assert torch.equal(top(bottom(x)), model(x))
    assert {id(p) for p in [*bottom.parameters(), *top.parameters()]} == {id(p) for p in model.parameters()}


def test_what_cannot_be_cut_is_told_of() -> None:
    with pytest.raises(ConfigError, match="'head' lies in a Words, whose forward is its own"):
        cut(Words(), "head")
    with pytest.raises(ConfigError, match="is the end of the model"):
        cut(chain(), "4")
    with pytest.raises(ConfigError, match="there is no module 'haed' in the model: the nearest name is 'head'"):
        cut(Words(), "haed")


# ---- features


def samples(num: int = 20, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(num, 4, generator=generator), torch.arange(num) % 3)


def test_features_are_what_the_bottom_gives(tmp_path: Path) -> None:
    model, data = chain(), samples()
    freeze(model, "0", "2")
    modes = [module.training for module in model.modules()]
    found = features(model, "2.3", data, tmp_path / "kept", batch_size=8)
    assert [module.training for module in model.modules()] == modes
    bottom, top = cut(model.eval(), "2.3")
    x, y = next(iter(DataLoader(found, batch_size=len(data))))
    torch.testing.assert_close(x, bottom(data.tensors[0]))
    assert torch.equal(y, data.tensors[1])
    assert len(found) == 20
    assert torch.equal(found[3][0], x[3])
    torch.testing.assert_close(top(x), model(data.tensors[0]))


def test_they_are_computed_once_and_stale_ones_refused(tmp_path: Path) -> None:
    model, data = chain(), samples()
    freeze(model, "0", "2")
    first = features(model, "2", data, tmp_path)
    written = [path.stat().st_mtime_ns for path in first.paths]
    with torch.no_grad():
        model[4].weight += 1  # above the cut
    again = features(model, "2", data, tmp_path)
    assert [path.stat().st_mtime_ns for path in again.paths] == written
    assert torch.equal(again[19][0], first[19][0])
    for stale, told in [
        ((model, "3", data), "at the cut '2', not '3'"),
        ((model, "2", samples(21)), "from other samples"),
        ((model, "2", samples(20, seed=1)), "from other samples"),
    ]:
        with pytest.raises(ConfigError, match=f"is stale, it was made {told}"):
            features(*stale, tmp_path)
    model[2][1].running_mean += 1  # buffers count
    with pytest.raises(ConfigError, match="is stale, it was made with other weights: remove its directory"):
        features(model, "2", data, tmp_path)
    first.paths[0].write_bytes(b"torn")
    with pytest.raises(ConfigError, match=r"no file of transfer.features, or not whole"):
        features(model, "2", data, tmp_path)


def test_features_of_a_model_with_a_forward_of_its_own(tmp_path: Path) -> None:
    model = Words().eval()
    with pytest.raises(ConfigError, match="and is trained, so its outputs change: freeze it first"):
        features(model, "encoder", TensorDataset(ROWS), tmp_path)
    freeze(model, "table", "encoder")
    found = features(model, "encoder", Inputs(), tmp_path)
    torch.testing.assert_close(found[2], model.encoder(model.table(ROWS))[2])
    with torch.no_grad():
        model.encoder.self_attn.out_proj.weight += 1  # which has no forward pass of its own
    with pytest.raises(ConfigError, match="with other weights"):
        features(model, "encoder", Inputs(), tmp_path)


class Inputs(Dataset[torch.Tensor]):
    """Without labels."""

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= len(ROWS):
            raise IndexError
        return ROWS[index]


# ---- suggest


def test_what_a_probe_can_tell_apart_is_suggested() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 3)
    )
    with torch.no_grad():
        model[4].weight.zero_()  # what comes out of it says nothing
    x = torch.randn(300, 4)
    before = copy.deepcopy(model.state_dict())
    told = suggest(model, TensorDataset(x, (x[:, 0] > 0).long()))
    assert [probe.cut for probe in told.probes] == ["0", "2", "4"]
    assert told.cut in ("0", "2")
    assert told.freeze == ("0", "2")[: 1 + (told.cut == "2")]
    assert min(probe.accuracy for probe in told.probes[:2]) >= 0.85 > told.probes[2].accuracy
    assert str(told).splitlines()[-1] == f"freeze up to {told.cut}: {', '.join(told.freeze)}"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    freeze(model, *told.freeze)
    with pytest.raises(ConfigError, match="whole numbers are wanted"):
        suggest(model, TensorDataset(x, x[:, 0]))
    with pytest.raises(ConfigError, match="nowhere to cut"):
        suggest(nn.Sequential(nn.Linear(4, 2)), TensorDataset(x, x[:, 0].long()))


class Branched(nn.Module):
    """Two layers that both read the input, one that reads numbers of words, and a last one by keyword alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.words, self.head = nn.Linear(4, 5), nn.Linear(4, 5), nn.Embedding(3, 5), nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = self.a(x) + self.b(x) + self.words(torch.zeros(len(x), dtype=torch.long))
        out: torch.Tensor = self.head(input=mixed)
        return out


def test_a_probe_is_given_what_the_next_layer_gets() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(inplace=True), nn.Linear(16, 3))
    with torch.no_grad():
        model[2].bias -= 100  # nothing passes the activation behind it
    x = torch.randn(60, 4)
    told = suggest(model, TensorDataset(x, (x[:, 0] > 0).long()))
    assert told.cut == "0"
    assert told.probes[0].accuracy > 0.75 > told.probes[1].accuracy
    other = Branched()
    row = {name: other.get_submodule(name) for name in ("a", "b", "words", "head")}
    found = handed_on(other, row, x)
    assert torch.equal(found["a"], other.a(x))
    assert torch.equal(found["b"], other.b(x))
    assert found["words"].shape == (60, 5)


def test_samples_that_no_probe_can_be_made_of_are_told_of() -> None:
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)), torch.randn(12, 4)
    with pytest.raises(ConfigError, match="all 12 samples have the label 1: a probe needs at least two classes"):
        suggest(model, TensorDataset(x, torch.ones(12, dtype=torch.long)))
    with pytest.raises(ConfigError, match="number the classes"):
        suggest(model, [(row, "cat") for row in x])  # type: ignore[arg-type]
    x[3] = float("nan")
    with pytest.raises(ConfigError, match="what '0' hands on is not finite for some sample"):
        suggest(model, TensorDataset(x, torch.arange(12) % 2))


# ---- fusion


def test_sources_begin_with_equal_weights() -> None:
    a, b = torch.randn(5, 4), torch.randn(5, 2)
    assert torch.equal(Concat([4, 2])(a, b), torch.cat([a, b], 1))
    for kind in (WeightedSum, Gated):
        fused = kind([4, 2], 3)
        mean = (fused.project[0](a) + fused.project[1](b)) / 2
        torch.testing.assert_close(fused(a, b), mean)
        fused(a, b).square().sum().backward()
        assert all(p.grad is not None for p in fused.parameters())
    with pytest.raises(ConfigError, match=r"sources of \[4, 2\] features were said to come"):
        Concat([4, 2])(b, a)
    with pytest.raises(ConfigError, match=r"widths=\[0\]"):
        Gated([2], 0)


def test_a_head_beside_adapters_is_thawed_by_name() -> None:
    model = Words()
    lora(model, "encoder", rank=2)
    unfreeze(model, "head")
    assert model.head.weight.requires_grad
    assert not model.encoder.linear1.base.weight.requires_grad


def test_a_layer_with_an_adapter_is_no_head_to_take() -> None:
    model = Words()
    lora(model, "head", rank=2)
    for name in (None, "head"):
        with pytest.raises(ConfigError, match=r"'head' has an adapter: transfer.merge\(model\) first"):
            head(model, name, classes=5)
    with pytest.raises(ConfigError, match=r"'head.base' is not an nn.Linear of the model"):
        head(model, "head.base", classes=5)
    merge(model)
    assert head(model, classes=5).name == "head"
    lora(model, "encoder", rank=2)
    assert head(model, classes=4).name == "head"  # below it they may be
    assert model(ROWS).shape == (6, 4)
