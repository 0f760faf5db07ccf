"""What `--sync` copies, and that both ways copy the same."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from paceline.core.errors import ConfigError
from paceline.launch import sync
from tests.launch._ssh import servers_of


def made(folder: Path) -> Path:
    (folder / "sub").mkdir(parents=True)
    (folder / "train.py").write_text("1")
    (folder / "sub" / "with space.txt").write_text("2")
    (folder / "link").symlink_to("train.py")
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "x.pyc").write_text("")
    (folder / "runs" / "old").mkdir(parents=True)
    (folder / "runs" / "old" / "big").write_text("")
    return folder


def test_what_is_made_again_by_itself_stays(tmp_path: Path) -> None:
    names = sync.files(made(tmp_path / "w"), tmp_path / "w" / "runs")
    assert sorted(names) == ["link", "sub/with space.txt", "train.py"]


def test_in_a_repository_git_says_what_there_is(tmp_path: Path) -> None:
    folder = made(tmp_path / "w")
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    (folder / ".gitignore").write_text("sub/\n__pycache__/\n")
    assert sorted(sync.files(folder, folder / "runs")) == [".gitignore", "link", "train.py"]


def test_too_much_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "data").open("wb") as file:
        file.truncate(2 << 30)
    with pytest.raises(ConfigError, match=r"holds 2\.1 GB in 1 files"):
        sync.files(tmp_path, tmp_path / "runs")


@pytest.mark.parametrize("rsync", [False, True], ids=["tar", "rsync"])
def test_files_arrive(tmp_path: Path, rsync: bool) -> None:
    if rsync and shutil.which("rsync") is None:
        pytest.skip("no rsync: apt-get install rsync")
    folder, there = made(tmp_path / "w"), tmp_path / "the re"
    names = sync.files(folder, folder / "runs")
    with servers_of(tmp_path, ["a"]) as servers:
        sync.send(["ssh", "-F", str(servers.dir / "config")], "a", folder, names, rsync=rsync, to=there)
    assert (there / "sub" / "with space.txt").read_text() == "2"
    assert os.readlink(there / "link") == "train.py"
    assert not (there / "runs").exists()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with servers_of(tmp_path, ["a"]) as servers:
        ssh = ["ssh", "-F", str(servers.dir / "config")]
        with pytest.raises(ConfigError, match=r"host a: .* cannot be copied there: .*file"):
            sync.send(ssh, "a", tmp_path / "file" / "below", ["train.py"], rsync=False)
