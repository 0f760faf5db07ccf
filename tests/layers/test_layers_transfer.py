"""Transfer: what patterns mean, norms that stay, rates by depth, files, heads, what members send."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import paceline
from paceline.core.errors import ConfigError
from paceline.layers.transfer import features, freeze, gradual, groups, head, load, lora, save, suggest, unfreeze
from paceline.layers.transfer.depth import layers
from paceline.strategies import AllReduce, Strategy, Sync, World
from paceline.testing.together import together
from paceline.transport.group import Group

CHEAP = settings(max_examples=30, deadline=None)


class Net(nn.Module):
    """A trunk of blocks behind a token of the model's own, and a head."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.ones(4))
        self.stem = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3))
        self.plain = nn.BatchNorm1d(8, affine=False)
        self.head = nn.Linear(8, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x + self.token)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(self.plain(x))
        return out


def trained(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if p.requires_grad]


def test_it_is_there_by_its_short_name() -> None:
    assert paceline.transfer.freeze is freeze


# ---- freeze


def test_a_module_means_all_that_is_in_it() -> None:
    model = Net()
    assert freeze(model, "stem") == ["stem.0.weight", "stem.0.bias", "stem.1.weight", "stem.1.bias"]
    freeze(model, "blocks.[01]", "token")
    assert trained(model) == ["blocks.2.0.weight", "blocks.2.0.bias", "head.weight", "head.bias"]
    unfreeze(model, "*.bias")
    assert "blocks.0.0.bias" in trained(model)
    assert "blocks.0.0.weight" not in trained(model)


@CHEAP
@given(
    first=st.sets(st.sampled_from(["token", "stem", "blocks.0", "blocks.*", "*.weight", "head", "plain"]), min_size=1)
)
def test_unfreezing_the_same_undoes_it(first: set[str]) -> None:
    model = Net()
    modes = {name: module.training for name, module in model.named_modules()}
    frozen = freeze(model, *first)
    assert set(trained(model)) == {name for name, _ in model.named_parameters()} - set(frozen)
    assert unfreeze(model, *first) == frozen
    assert len(trained(model)) == len(list(model.parameters()))
    assert {name: module.training for name, module in model.train().named_modules()} == modes


def test_a_pattern_without_a_match_is_an_error_and_changes_nothing() -> None:
    model = Net()
    with pytest.raises(ConfigError, match=r"^'stme' matches no parameter of the model: the nearest name is 'stem'$"):
        freeze(model, "head", "stme")
    assert len(trained(model)) == len(list(model.parameters()))
    with pytest.raises(ConfigError, match="no pattern was given"):
        unfreeze(model)


def test_frozen_norms_stay_as_they_are_through_training() -> None:
    model = Net()
    freeze(model, "stem", "plain")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301
        one.train()
        one(torch.randn(16, 4)).sum().backward()
        assert [one.stem.training, one.stem[1].training, one.plain.training] == [True, False, False]
        assert all(torch.equal(value, before[name]) for name, value in one.state_dict().items())
    unfreeze(model, "stem", "plain")
    assert model.stem[1].training
    assert not model.eval().stem[1].training
    model.train()(torch.randn(16, 4))
    assert not torch.equal(model.stem[1].running_mean, before["stem.1.running_mean"])


def test_a_norm_whose_scale_is_trained_goes_on() -> None:
    model = Net()
    freeze(model, "stem.1.bias")
    assert model.train().stem[1].training


# ---- depth


def test_layers_are_a_row() -> None:
    assert [layer.name for layer in layers(Net())] == [
        *("", "stem.0", "stem.1", "blocks.0.0", "blocks.1.0", "blocks.2.0", "head")
    ]


class Residual(nn.Module):
    """A block with a single child, as those of MobileNet."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.inner(x)
        return out


class Trunk(nn.Module):
    """A backbone as in torchvision: positions of its own, and blocks in a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.stages = nn.Sequential(nn.Sequential(Residual(), Residual()), nn.Sequential(Residual()))
        self.norm = nn.LayerNorm(4)
        self.positions = nn.Parameter(torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.stages(self.stem(x + self.positions)))
        return out


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = Trunk(), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.trunk(x))
        return out


BLOCKS = ["trunk.stem", "trunk.stages.0.0", "trunk.stages.0.1", "trunk.stages.1.0", "trunk.norm"]


def test_blocks_of_a_wrapped_backbone_are_layers() -> None:
    model = Wrapped()
    row = layers(model)
    assert [layer.name for layer in row] == ["trunk", *BLOCKS, "head"]
    assert row[0].parameters == (model.trunk.positions,)
    freeze(model, "trunk")
    stages = [patterns for _, (patterns,) in gradual(model).stages]
    assert stages == [*reversed(BLOCKS), "trunk.positions"]
    lora(model, "trunk.stages", rank=2)
    assert [layer.name for layer in layers(model)] == ["trunk", *BLOCKS, "head"]


def test_what_is_suggested_to_freeze_ends_at_the_cut(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Wrapped(), torch.randn(60, 4)
    data = torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long())
    told = suggest(model, data)
    assert [probe.cut for probe in told.probes] == BLOCKS
    assert told.freeze == ("trunk.positions", *BLOCKS[: 1 + BLOCKS.index(told.cut)])
    freeze(model, *told.freeze)
    assert ("trunk.norm.weight" in trained(model)) == (told.cut != "trunk.norm")
    assert len(features(model, told.cut, data, tmp_path)) == 60


@CHEAP
@given(decay=st.floats(0.1, 1.0), frozen=st.sets(st.sampled_from(["token", "stem", "blocks.1"])))
def test_rates_fall_with_depth_and_only_what_is_trained_has_one(decay: float, frozen: set[str]) -> None:
    model = Net()
    whole = {group["name"]: group["lr"] for group in groups(model, lr=0.1, decay=decay)}
    assert whole["head"] == 0.1
    assert list(whole.values()) == sorted(whole.values())
    if frozen:
        freeze(model, *frozen)
    found = groups(model, lr=0.1, decay=decay)
    assert {id(p) for group in found for p in group["params"]} == {id(p) for p in model.parameters() if p.requires_grad}
    assert all(group["lr"] == whole[group["name"]] for group in found)
    torch.optim.Adam(found)


def test_tied_weights_are_in_one_group() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    assert [len(group["params"]) for group in groups(model, lr=1.0)] == [2, 1]


def test_wrong_rates_are_told_of() -> None:
    with pytest.raises(ConfigError, match=r"^lr=0"):
        groups(Net(), lr=0)
    with pytest.raises(ConfigError, match=r"^decay=1\.5"):
        groups(Net(), lr=1, decay=1.5)
    model = Net()
    freeze(model, "*")
    with pytest.raises(ConfigError, match="no parameter of the model is trained"):
        groups(model, lr=1)


def test_layers_thaw_from_the_top_also_after_a_gap() -> None:
    model = Net()
    freeze(model, "token", "stem", "blocks")
    plan = gradual(model, start=2, every=3)
    assert str(plan).splitlines()[0] == "epoch 2: blocks.2.0"
    assert plan.at(2) == ("blocks.2.0",)
    assert plan.at(3) == ()
    optimizer = torch.optim.SGD(groups(model, lr=1.0, decay=0.5))
    assert plan.thaw(model, 1) == []
    assert plan.thaw(model, 5) == ["blocks.1.0.weight", "blocks.1.0.bias", "blocks.2.0.weight", "blocks.2.0.bias"]
    assert plan.thaw(model, 5) == []
    for group in groups(model, lr=1.0, decay=0.5, beside=optimizer):
        optimizer.add_param_group(group)
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 0.25, 0.5]
    plan.thaw(model, 100)
    assert len(trained(model)) == len(list(model.parameters()))
    assert model.stem[1].training


def test_stages_may_be_named() -> None:
    model = Net()
    assert gradual(model, "blocks.*", ["stem", "token"], every=2).stages == ((1, ("blocks.*",)), (3, ("stem", "token")))
    with pytest.raises(ConfigError, match="matches no parameter"):
        gradual(model, "blcks.*")
    with pytest.raises(ConfigError, match="nothing is frozen"):
        gradual(model)


# ---- files


def same(a: nn.Module, b: nn.Module) -> bool:
    mine, other = a.state_dict(), b.state_dict()
    return mine.keys() == other.keys() and all(torch.equal(mine[name], other[name]) for name in mine)


@pytest.mark.parametrize("kind", ["save", "torch", "torch, wrapped"])
def test_what_was_saved_is_loaded(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, other, path = Net(), Net(), tmp_path / "new" / "weights"
    model(torch.randn(8, 4))
    if kind == "save":
        assert save(model, path) == list(model.state_dict())
        assert os.listdir(path.parent) == ["weights"]
    else:
        path.parent.mkdir()
        torch.save(model.state_dict() if kind == "torch" else {"state_dict": model.state_dict(), "epoch": 3}, path)
    found = load(other, path, strict=True)
    assert found.whole
    assert same(model, other)
    assert capsys.readouterr().out == "loaded 19 of 19 tensors\n"


def test_what_fits_is_loaded_and_the_rest_told_of(tmp_path: Path) -> None:
    model, other, said = Net(5), Net(3), []
    state = {f"module.{name}": value for name, value in model.state_dict().items() if name != "token"}
    safetensors.torch.save_file(state | {"module.more": torch.ones(1)}, tmp_path / "w")
    before = copy.deepcopy(other)
    with pytest.raises(ConfigError, match=r"(?s)nothing in .* fits the model; .*rename= maps names"):
        load(other, tmp_path / "w")
    with pytest.raises(ConfigError, match="do not fit"):
        load(other, tmp_path / "w", strict=True, rename={"module.": ""})
    assert same(other, before)
    found = load(other, tmp_path / "w", rename={"module.": ""}, show=said.append)
    assert (found.missing, found.other_shape, found.unexpected) == (("token",), ("head.weight", "head.bias"), ("more",))
    assert said[0].splitlines() == [
        "loaded 16 of 19 tensors",
        "missing: token",
        "other shape: head.weight (5x8 in the file, 3x8 in the model), head.bias (5 in the file, 3 in the model)",
        "unexpected: more",
    ]
    assert torch.equal(other.stem[0].weight, model.stem[0].weight)
    assert torch.equal(other.head.weight, before.head.weight)
    with pytest.raises(ConfigError, match=r"no name in .* begins so"):
        load(other, tmp_path / "w", rename={"modul_": ""})
    with pytest.raises(ConfigError, match="gives two tensors"):
        load(other, tmp_path / "w", rename=lambda name: "same")


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("was-run",)


def test_a_pickle_with_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"stem": Evil()}, "evil.pt")
    (tmp_path / "evil.pickle").write_bytes(pickle.dumps(Evil()))
    for name in ("evil.pt", "evil.pickle"):
        with pytest.raises(ConfigError, match=r"is refused: .*could run code"):
            load(Net(), name)
    assert not (tmp_path / "was-run").exists()


def test_files_that_are_no_weights_are_told_of(tmp_path: Path) -> None:
    path = tmp_path / "w"
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load(Net(), path)
    save(Net(), path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ConfigError, match="not a whole safetensors file"):
        load(Net(), path)
    for text in (b"", b"hello, this is text"):
        path.write_bytes(text)
        with pytest.raises(ConfigError):
            load(Net(), path)
    torch.save({"epoch": 3}, path)
    with pytest.raises(ConfigError, match="holds a dictionary with 'epoch'; a state dict is wanted"):
        load(Net(), path)


def test_a_model_without_values_is_told_of(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    save(nn.Linear(2, 2), tmp_path / "a")
    with pytest.raises(ConfigError, match=r"weight is on the meta device and holds no values: call model.to_empty"):
        load(model, tmp_path / "a")
    with pytest.raises(ConfigError, match="weight is on the meta device"):
        save(model, tmp_path / "b")


def test_garbage_and_directories_are_told_of(tmp_path: Path) -> None:
    for garbage in (b"\x80\x02.", b"\x80\x02a.", b"\x80\x02R", b"\x80\x02s0000000"):
        (tmp_path / "a").write_bytes(garbage)
        with pytest.raises(ConfigError, match=r"is neither safetensors nor a state dict of torch|is refused"):
            load(nn.Linear(2, 2), tmp_path / "a")
    (tmp_path / "a").write_bytes(b"these are words")
    with pytest.raises(ConfigError, match="is neither safetensors nor a state dict of torch"):
        load(nn.Linear(2, 2), tmp_path / "a")
    with pytest.raises(ConfigError, match="is a directory: name a file in it"):
        save(nn.Linear(2, 2), tmp_path)


def test_a_part_is_saved(tmp_path: Path) -> None:
    model = Net()
    freeze(model, "token", "stem", "plain", "blocks.[01]")
    kept = ["blocks.2.0.weight", "blocks.2.0.bias", "head.weight", "head.bias"]
    assert save(model, tmp_path / "w", only="trainable") == kept
    unfreeze(model, "stem")
    assert "stem.1.running_mean" in save(model, tmp_path / "w", only="trainable")
    assert save(model, tmp_path / "w", only=["plain", "head.bias"]) == [
        *("plain.running_mean", "plain.running_var", "plain.num_batches_tracked", "head.bias")
    ]
    freeze(model, "*")
    with pytest.raises(ConfigError, match="no parameter of the model is trained"):
        save(model, tmp_path / "w", only="trainable")


def test_tied_and_sliced_weights_are_saved(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    model[1].bias = nn.Parameter(torch.arange(8.0)[4:])
    save(model, tmp_path / "w")
    other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert load(other, tmp_path / "w", strict=True).whole
    assert same(model, other)


# ---- head


@CHEAP
@given(
    old=st.lists(st.text(max_size=2), min_size=1, max_size=6, unique=True),
    new=st.lists(st.text(max_size=2), min_size=1, max_size=6, unique=True),
    bias=st.booleans(),
)
def test_rows_of_classes_that_stay_are_kept(old: list[str], new: list[str], bias: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, len(old), bias=bias).double())
    before = model[1]
    found = head(model, old=old, new=new)
    assert found.name == "1"
    assert found.layer is model[1]
    assert model[1].out_features == len(new)
    assert (model[1].weight.dtype, model[1].bias is not None) == (torch.float64, bias)
    assert set(found.kept) == set(old) & set(new)
    assert set(found.kept) | set(found.fresh) == set(new)
    for one in found.kept:
        assert torch.equal(model[1].weight[new.index(one)], before.weight[old.index(one)])
        assert not bias or torch.equal(model[1].bias[new.index(one)], before.bias[old.index(one)])


def test_a_head_is_trained_and_wrong_ones_are_told_of() -> None:
    model = Net()
    freeze(model, "*")
    head(model, "head", classes=7)
    assert trained(model) == ["head.weight", "head.bias"]
    assert model.head.out_features == 7
    for wrong, told in [
        ({"name": "haed", "classes": 2}, r"'haed' is not an nn.Linear of the model: the nearest name is 'head'"),
        ({"classes": 2, "new": ["a"]}, "not both"),
        ({}, "say what the classes are"),
        ({"classes": 0}, "classes=0"),
        ({"old": ["a"], "new": ["a"]}, "old= has 1 names, but head has 7 rows"),
        ({"new": ["a", "a"]}, "different names"),
        ({"classes": 2, "old": ["a"]}, "new= is needed"),
    ]:
        with pytest.raises(ConfigError, match=told):
            head(model, **wrong)  # type: ignore[arg-type]
    model.blocks[0][0].weight = model.blocks[1][0].weight
    with pytest.raises(ConfigError, match="shares its weight"):
        head(model, "blocks.0.0", classes=8)


# ---- members


def sent(group: Group, strategy: Strategy, given: str) -> tuple[list[int], set[str], bool]:
    """Bytes of some steps, whose parameters have state, and whether the frozen part is what it was."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 1000), nn.ReLU(), nn.Linear(1000, 2))
    freeze(model, "0")
    parameters = list(model.parameters()) if given == "all" else groups(model, lr=0.1)
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)  # type: ignore[arg-type]
    world = World(group, wires=group._wires, limit_s=20.0)
    strategy.attach(model, optimizer, world)
    before = model[0].weight.clone()  # of the first member
    found = []
    for _ in range(4):
        client = getattr(strategy, "_client", None)
        start = group.sent_bytes + (client.sent_bytes if client else 0)
        optimizer.zero_grad()
        model(torch.ones(8, 100)).square().mean().backward()
        if strategy.finish(optimizer):
            optimizer.step()
        found.append(group.sent_bytes + (client.sent_bytes if client else 0) - start)
    strategy.together()
    strategy.close()
    names = {id(p): name for name, p in model.named_parameters()}
    return found, {names[id(p)] for p in optimizer.state}, torch.equal(model[0].weight, before)


TRAINED_BYTES = 4 * (1000 * 2 + 2)  # the frozen part has 404,000


@pytest.mark.parametrize("hosts", [["a", "a"], ["a", "b"]], ids="-".join)
@pytest.mark.parametrize("given", ["all", "trained"])
def test_all_reduce_sends_nothing_of_what_is_frozen(given: str, hosts: list[str]) -> None:
    for found, with_state, same_as_before in together(2, lambda g: sent(g, AllReduce(), given), hosts=hosts):
        assert max(found[1:]) < TRAINED_BYTES + 1000  # the first step lays buckets out and measures the links
        assert with_state == {"2.weight", "2.bias"}
        assert same_as_before


@pytest.mark.parametrize("hosts", [["a", "a"], ["a", "b"]], ids="-".join)
def test_servers_know_nothing_of_what_is_left_out(hosts: list[str]) -> None:
    for found, with_state, same_as_before in together(2, lambda g: sent(g, Sync(), "trained"), hosts=hosts):
        assert sum(found) < 4 * (TRAINED_BYTES + 1000)  # pushes go in the background: one may be counted a step later
        assert with_state == set()  # it lies with the servers
        assert same_as_before
