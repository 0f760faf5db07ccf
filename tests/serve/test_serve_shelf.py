"""The shelf: what is there is whole, unchanged tensors lie where they lay, and readers are not hurt."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paceline.core.errors import ConfigError
from paceline.serve.places import Unfit
from paceline.serve.shelf import Orders, Shelf, Version


def version(number: int) -> Version:
    return Version(number=number, source_version=10 * number, made_at=float(number))


def filled(shelf: Shelf, count: int) -> None:
    for number in range(1, count + 1):
        shelf.put(version(number), {"w": torch.full((3, 2), float(number)), "b": torch.arange(5)})


def test_what_is_put_is_read_again_and_private(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path / "shelf")
    assert (shelf.current(), shelf.versions()) == (0, [])
    tensors = {
        "a.weight": torch.randn(4, 3),
        "half": torch.randn(2, 2).to(torch.bfloat16),
        "t": torch.randn(3, 4).t(),
        "count": torch.tensor(7),
        "none": torch.zeros(0, 3),
        "flag": torch.tensor([True, False]),
    }
    shelf.put(version(1), tensors)
    assert shelf.current() == 0  # it is not served yet
    shelf.serve(1)
    read = Shelf(tmp_path / "shelf").read(1)
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) and read[name].dtype == tensors[name].dtype for name in tensors)
    assert torch.equal(load_file(tmp_path / "shelf" / "tensors-00000001.safetensors")["t"], tensors["t"])
    assert stat.S_IMODE(shelf.directory.stat().st_mode) == 0o700
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in shelf.directory.iterdir())
    assert shelf.versions() == [version(1)]
    assert shelf.current() == 1


def test_a_version_writes_only_what_is_new(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, keep=2)
    big = torch.randn(100_000)
    shelf.put(version(1), {"big": big, "small": torch.zeros(2)})
    for number in range(2, 30):
        shelf.put(version(number), {"small": torch.full((2,), float(number))}, base=number - 1)
        shelf.serve(number)
        shelf.prune()
        assert torch.equal(shelf.read(number)["big"], big)
        assert torch.equal(shelf.read(number)["small"], torch.full((2,), float(number)))
        assert shelf.where(number)["big"] == shelf.where(number - 1)["big"]
    assert [v.number for v in shelf.versions()] == [28, 29]
    assert sorted(p.name for p in tmp_path.glob("*.safetensors")) == [
        "tensors-00000001.safetensors", "tensors-00000028.safetensors", "tensors-00000029.safetensors",
    ]  # fmt: skip


def test_a_version_lies_in_a_bounded_number_of_files(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, keep=2)
    names = [f"p{i}" for i in range(40)]
    shelf.put(version(1), {name: torch.zeros(3) for name in names})
    for number in range(2, 80):
        name = names[number % 40]
        shelf.put(version(number), {name: torch.full((3,), float(number))}, base=number - 1)
        shelf.prune()
        assert len({place.file for place in shelf.where(number).values()}) <= 17
    last = shelf.read(79)
    assert all(float(last[names[n % 40]][0]) == n for n in range(40, 80))


def test_what_is_served_or_pinned_is_never_pruned(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, keep=2)
    filled(shelf, 3)
    shelf.order(Orders(serving=1, pinned=2))
    for number in range(4, 9):
        shelf.put(version(number), {"w": torch.zeros(3, 2), "b": torch.arange(5)})
        shelf.prune()
    assert [v.number for v in shelf.versions()] == [1, 2, 7, 8]
    assert float(shelf.read(1)["w"][0, 0]) == 1.0
    with pytest.raises(ConfigError, match="version 3 is not on the shelf: there are 1, 2, 7, 8"):
        shelf.serve(3)
    assert shelf.current() == 1
    with pytest.raises(Unfit, match="version 3 is not on the shelf"):
        shelf.read(3)


@pytest.mark.parametrize("harm", ["cut", "one bit", "empty", "gone", "longer", "index"])
def test_a_file_that_is_not_as_it_was_is_refused(tmp_path: Path, harm: str) -> None:
    shelf = Shelf(tmp_path)
    filled(shelf, 1)
    path = tmp_path / "tensors-00000001.safetensors"
    data = bytearray(path.read_bytes())
    if harm == "cut":
        path.write_bytes(data[:-3])
    elif harm == "one bit":
        data[-1] ^= 1
        path.write_bytes(data)
    elif harm == "empty":
        path.write_bytes(b"")
    elif harm == "longer":
        path.write_bytes(data + b"x")
    elif harm == "gone":
        path.unlink()
    else:
        (tmp_path / "version-00000001.json").write_bytes(b'{"version"')
    with pytest.raises(Unfit):
        shelf.read(1)


def test_a_reader_that_has_a_file_open_is_not_hurt(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, keep=2)
    filled(shelf, 4)
    with (tmp_path / "tensors-00000001.safetensors").open("rb") as file:
        shelf.prune()
        assert not (tmp_path / "tensors-00000001.safetensors").exists()
        assert len(file.read()) > 0


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    filled(shelf, 1)
    (tmp_path / ".tensors-00000002.safetensors.77").write_bytes(b"half")
    (tmp_path / "tensors-00000002.safetensors").write_bytes(b"without a version")
    shelf.prune()
    assert sorted(os.listdir(tmp_path)) == ["tensors-00000001.safetensors", "version-00000001.json"]
    with pytest.raises(ConfigError, match="keep=1"):
        Shelf(tmp_path, keep=1)
