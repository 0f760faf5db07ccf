"""Frozen parameters are written once, seen to have changed, and never lost."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline.checkpoint import Checkpoints, Written, pack
from paceline.core.errors import CheckpointError
from paceline.core.settings import Settings
from paceline.testing.cluster import Cluster

NAME = "frozen.safetensors"


class Saved:
    """A state with a large tensor that stays and a small one that is trained."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self.checkpoints = checkpoints
        self.still = torch.arange(20_000.0)
        self.moving = torch.zeros(10)
        self.frozen = True

    def state(self) -> dict[str, Any]:
        return {"model": {"still": self.still.detach(), "tied": self.still, "moving": self.moving}}

    def save(self, step: int) -> Written:
        self.moving += 1
        ids = {self.still.data_ptr()} if self.frozen else set()
        snapshot = self.checkpoints.snapshot(self.state(), ids)
        return self.checkpoints.write(step, snapshot, [pack({})], {}).result(30)

    def check(self, written: Written) -> None:
        found = self.checkpoints.load(written.path).shared["model"]
        assert torch.equal(found["still"], self.still)
        assert found["tied"] is found["still"]
        assert torch.equal(found["moving"], self.moving)


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[Saved]:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    yield Saved(checkpoints)
    assert checkpoints.close(30)


def inode(written: Written) -> int:
    return (written.path / NAME).stat().st_ino


def test_they_are_written_once_and_each_checkpoint_is_whole(saved: Saved) -> None:
    first = saved.save(1)
    saved.check(first)
    assert first.bytes > 80_000
    later = [saved.save(step) for step in range(2, 6)]
    for written in later:
        assert written.bytes < 3_000
    assert inode(later[-1]) == inode(later[-2])
    saved.check(later[-1])
    assert not first.path.exists()  # and its file lives on
    assert torch.equal(load_file(later[-1].path / NAME)["model.still"], saved.still)


@pytest.mark.parametrize("how", ["in place", "behind autograd's back", "other memory", "thawed"])
def test_a_change_is_seen(saved: Saved, how: str) -> None:
    first = saved.save(1)
    if how == "in place":
        saved.still[777] = -1.0
    elif how == "behind autograd's back":  # as moving averages do: no counter of torch's tells of it
        saved.still.data[-1] = 5.0
    elif how == "other memory":
        saved.still = saved.still + 1
    else:
        saved.frozen = False
    second = saved.save(2)
    saved.check(second)
    assert second.bytes > 80_000
    old = load_file(first.path / NAME)["model.still"]
    assert torch.equal(old, torch.arange(20_000.0))  # the checkpoint before is as it was
    assert (second.path / NAME).exists() == saved.frozen


def test_who_resumes_does_not_write_them_again(saved: Saved, tmp_path: Path) -> None:
    first = saved.save(1)
    saved.checkpoints.close()
    other = Checkpoints(tmp_path / "checkpoints", keep=2)
    found = other.load_latest(lambda reason: pytest.fail(reason))
    assert found is not None
    again = Saved(other)
    again.still = found.shared["model"]["still"]
    second = again.save(2)
    assert second.bytes < 3_000
    assert inode(second) == inode(first)
    again.check(second)


def test_what_is_gone_or_altered_is_told_and_written_anew(saved: Saved) -> None:
    first = saved.save(1)
    (first.path / NAME).unlink()
    with pytest.raises(CheckpointError, match=r"frozen\.safetensors: No such file"):
        saved.checkpoints.load(first.path)
    second = saved.save(2)
    saved.check(second)
    with (second.path / NAME).open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"oops")
    with pytest.raises(CheckpointError, match=r"frozen\.safetensors: its SHA-256 should be"):
        saved.checkpoints.load(second.path)
    refused: list[str] = []
    saved.checkpoints.load_latest(refused.append)
    assert len(refused) == 2
    third = saved.save(3)  # nobody links to a file that somebody has written to
    saved.check(third)


def test_without_hard_links_each_has_its_own(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    saved.save(1)
    monkeypatch.setattr(os, "link", refuse)
    second = saved.save(2)
    assert second.bytes > 80_000
    saved.check(second)


SCRIPT = """
import sys
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import TensorDataset
import paceline
from paceline import transfer

folder, epochs, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(seed)
model = nn.Sequential(nn.Linear(12, 4000), nn.Tanh(), nn.Linear(4000, 4), nn.Linear(4, 3))
transfer.freeze(model, "0")
g = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(48, 12, generator=g), torch.randn(48, 3, generator=g))
run = paceline.join()
optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01), model)
loader = run.loader(data, batch_size=12 // run.size)
for epoch in run.epochs(epochs):
    for x, y in loader:
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
if run.is_first:
    save_file({name: t.clone() for name, t in model.state_dict().items()}, f"{folder}/weights.safetensors")
run.close()
"""


def trained(folder: Path, size: int, strategy: str, epochs: int, seed: int = 0) -> dict[str, torch.Tensor]:
    settings = Settings(name="it", root=str(folder), strategy=strategy, progress="off")
    for member in Cluster(size).run(SCRIPT, [str(folder), str(epochs), str(seed)], settings=settings):
        assert member.code == 0, member.output
    return load_file(folder / "weights.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["allreduce", "zero(stage=2)", "sync", "async", "diloco(every=2)"])
def test_a_run_goes_on_with_other_members_and_its_frozen_part(strategy: str, tmp_path: Path) -> None:
    """The script that resumes begins with other weights: what is frozen comes from the checkpoint."""
    first = trained(tmp_path, 2, strategy, 2)
    shelf = tmp_path / "it" / "checkpoints"
    before = sorted(shelf.glob("step-*"))
    assert len({(path / NAME).stat().st_ino for path in before}) == 1
    assert load_file(before[-1] / NAME).keys() == {"model.0.0.weight", "model.0.0.bias"}
    assert all((path / "shared.safetensors").stat().st_size < 4 * 4 * 4000 * 4 + 20_000 for path in before)
    third = trained(tmp_path, 3, strategy, 4, seed=7)
    for name in ("0.weight", "0.bias"):
        assert torch.equal(first[name], third[name])
    assert not torch.equal(first["2.weight"], third["2.weight"])
    after = sorted(shelf.glob("step-*"))
    assert len({(path / NAME).stat().st_ino for path in after}) == 1
