"""Whole or not at all: torn, altered, full, vanished; each time the one before is there and is used."""

from __future__ import annotations

import errno
import io
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline.checkpoint import CheckpointFailed, Checkpoints, Written, pack, part, unpack
from paceline.core.errors import CheckpointError, ConfigError, PacelineError


def state(step: int, size: int = 1000) -> dict[str, Any]:
    return {"model": {"w": torch.full((size,), float(step)), "b": torch.tensor(step)}, "step": step}


def save(checkpoints: Checkpoints, step: int, size: int = 1000, members: int = 2) -> Written:
    own = [pack({"rank": rank, "step": step, "rng": torch.arange(rank + 3)}) for rank in range(members)]
    return checkpoints.write(step, checkpoints.snapshot(state(step, size)), own, {"epoch": step // 2}).result(30)


def whole(checkpoints: Checkpoints, path: Path, step: int) -> bool:
    loaded = checkpoints.load(path)
    parts = [unpack(data) for data in loaded.own]
    return (
        loaded.step == loaded.shared["step"] == step
        and bool((loaded.shared["model"]["w"] == step).all())
        and all(p["rank"] == rank and p["step"] == step for rank, p in enumerate(parts))
    )


def refuse_none(message: str) -> None:
    raise AssertionError(message)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "run" / "checkpoints"


@pytest.fixture
def checkpoints(directory: Path) -> Iterator[Checkpoints]:
    checkpoints = Checkpoints(directory)
    yield checkpoints
    assert checkpoints.close(30)


def test_what_is_written_is_read(checkpoints: Checkpoints, directory: Path) -> None:
    assert checkpoints.latest(refuse_none) is None
    written = save(checkpoints, 120)
    assert written.path == directory / "step-00000120"
    assert (written.step, written.note) == (120, "")
    assert sorted(p.name for p in written.path.iterdir()) == [
        *("manifest.json", "rank-0.safetensors", "rank-1.safetensors", "shared.safetensors")
    ]
    assert checkpoints.latest(refuse_none) == written.path
    assert whole(checkpoints, written.path, 120)
    loaded = checkpoints.load_latest(refuse_none)
    assert loaded is not None
    assert (loaded.meta, len(loaded.own)) == ({"epoch": 60}, 2)
    assert os.listdir(directory) == ["step-00000120"]


def test_another_safetensors_reader_opens_the_files(checkpoints: Checkpoints) -> None:
    path = save(checkpoints, 7).path
    found = load_file(path / "shared.safetensors")
    assert torch.equal(found["model.w"], torch.full((1000,), 7.0))
    assert found["model.b"].shape == ()
    assert torch.equal(load_file(path / "rank-1.safetensors")["rng"], torch.arange(4))


def test_manifest_agrees_with_sha256sum(checkpoints: Checkpoints) -> None:
    path = save(checkpoints, 7, size=5_000_000).path  # more than one piece
    for entry in json.loads((path / "manifest.json").read_text())["files"]:
        assert (path / entry["name"]).stat().st_size == entry["bytes"]
        said = subprocess.run(["sha256sum", path / entry["name"]], capture_output=True, text=True, check=True)
        assert said.stdout.split()[0] == entry["sha256"]


def test_the_last_k_are_kept(directory: Path) -> None:
    checkpoints = Checkpoints(directory, keep=2)
    for step in (1, 2, 3, 10, 11):
        save(checkpoints, step)
        assert len(os.listdir(directory)) <= 2
    assert sorted(os.listdir(directory)) == ["step-00000010", "step-00000011"]
    with pytest.raises(ConfigError, match="keep is 0"):
        Checkpoints(directory, keep=0)


def test_newest_is_the_one_written_last_even_at_a_lower_or_equal_step(directory: Path) -> None:
    save(Checkpoints(directory), 50)
    again = Checkpoints(directory)
    assert save(again, 20).path.name == "step-00000020"
    assert save(again, 20).path.name == "step-00000020-2"
    latest = Checkpoints(directory).latest(refuse_none)
    assert latest == directory / "step-00000020-2"
    assert whole(again, latest, 20)
    again.clear()
    assert os.listdir(directory) == []


# -- torn and tampered

FILES = ["shared.safetensors", "rank-0.safetensors", "rank-1.safetensors", "manifest.json"]


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def lengthen(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\n")


def replace_by_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: list[Callable[[Path], None]] = [truncate, empty, lengthen, Path.unlink, replace_by_directory]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda d: d.__name__)
@pytest.mark.parametrize("name", FILES)
def test_damage_is_refused_by_name_and_the_one_before_used(
    checkpoints: Checkpoints, name: str, damage: Callable[[Path], None]
) -> None:
    save(checkpoints, 1)
    before, torn = save(checkpoints, 2).path, save(checkpoints, 3).path
    damage(torn / name)
    for look in (checkpoints.latest, lambda heard: getattr(checkpoints.load_latest(heard), "path", None)):
        heard: list[str] = []
        assert look(heard.append) == before
        assert len(heard) == 1
        assert "step-00000003 is refused" in heard[0]
        assert name in heard[0]
    with pytest.raises(CheckpointError, match=name):
        checkpoints.load(torn)
    save(checkpoints, 4)  # the run goes on from 2; what was refused goes, and does not count among the last K
    assert sorted(os.listdir(checkpoints.directory)) == ["step-00000001", "step-00000002", "step-00000004"]


@pytest.mark.parametrize("name", FILES)
def test_one_flipped_bit_anywhere_is_refused(checkpoints: Checkpoints, name: str) -> None:
    before = save(checkpoints, 1, size=40).path
    path = save(checkpoints, 2, size=40).path / name
    data = path.read_bytes()
    for at in range(0, len(data), max(1, len(data) // 150)):
        altered = bytearray(data)
        altered[at] ^= 1 << (at % 8)
        path.write_bytes(altered)
        heard: list[str] = []
        loaded = checkpoints.load_latest(heard.append)
        assert loaded is not None
        assert loaded.path == before, f"byte {at}"
        assert name in heard[0]
    path.write_bytes(data)
    assert checkpoints.latest(refuse_none) == path.parent


def test_a_manifest_with_another_value_or_format_is_refused(checkpoints: Checkpoints) -> None:
    save(checkpoints, 1)
    path = save(checkpoints, 2).path / "manifest.json"
    content = json.loads(path.read_text())
    for change in (
        {"step": 3},
        {"size": 1},
        {"meta": {}},
        {"files": []},
        {"format": "paceline-checkpoint-9"},
    ):
        path.write_text(json.dumps(content | change, indent=1) + "\n")
        heard: list[str] = []
        assert checkpoints.latest(heard.append) == checkpoints.directory / "step-00000001"
        assert "step-00000002 is refused: manifest.json" in heard[0]
    assert "reads 'paceline-checkpoint-1'" in heard[0]


def test_files_of_two_checkpoints_do_not_mix(checkpoints: Checkpoints) -> None:
    first, second = save(checkpoints, 1).path, save(checkpoints, 2).path
    shutil.copy(first / "shared.safetensors", second / "shared.safetensors")  # same size, whole in itself
    heard: list[str] = []
    assert checkpoints.latest(heard.append) == first
    assert "SHA-256" in heard[0]


def test_when_all_are_damaged_there_is_none(checkpoints: Checkpoints) -> None:
    for step in (1, 2):
        truncate(save(checkpoints, step).path / "shared.safetensors")
    heard: list[str] = []
    assert checkpoints.load_latest(heard.append) is None
    assert len(heard) == 2


class Slowly(io.BytesIO):
    """Gives a few bytes at a time, as a network disk may."""

    def readinto(self, into: Any) -> int:
        return super().readinto(memoryview(into)[:5])


def test_short_reads_are_put_together() -> None:
    body = pack({"w": torch.arange(100)})[32:]
    state, _ = part.read(Slowly(body), len(body))
    assert torch.equal(state["w"], torch.arange(100))
    with pytest.raises(CheckpointError, match="ends before"):
        part.read(Slowly(body[:-3]), len(body))


def test_other_files_are_ignored_and_nothing_is_unpickled(checkpoints: Checkpoints, directory: Path) -> None:
    path = save(checkpoints, 5).path
    ran = directory / "ran"
    bomb = f"cposix\nsystem\n(S'touch {ran}'\ntR.".encode()
    for name in ("model.pt", "step-00000009.pt", "step-00000005/optimizer.pt", "notes.txt"):
        (directory / name).write_bytes(bomb)
    assert checkpoints.latest(refuse_none) == path
    assert whole(checkpoints, path, 5)
    shutil.copytree(path, directory / "step-00000006")
    (directory / "step-00000006" / "shared.safetensors").write_bytes(bomb)
    assert checkpoints.load_latest(lambda _: None).path == path  # type: ignore[union-attr]
    assert not ran.exists()
    room = Path(sys.modules["paceline.checkpoint"].__file__ or "").parent
    assert [
        p.name for p in room.glob("*.py") if "import pickle" in p.read_text() or "torch.load" in p.read_text()
    ] == []


# -- the disk does not do as told


def fails_and_recovers(checkpoints: Checkpoints, before: Path, reason: str) -> None:
    """A save fails with `reason` and leaves nothing behind; the earlier checkpoint is still the newest."""
    with pytest.raises(CheckpointFailed, match=reason) as failed:
        save(checkpoints, 9, size=400_000)
    assert "step 9" in str(failed.value)
    assert os.listdir(checkpoints.directory) == [before.name]
    assert checkpoints.latest(refuse_none) == before


def test_a_file_size_limit_leaves_the_earlier_one(checkpoints: Checkpoints) -> None:
    before = save(checkpoints, 1).path
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        fails_and_recovers(checkpoints, before, os.strerror(errno.EFBIG))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert checkpoints.latest(refuse_none) == before
    assert whole(checkpoints, save(checkpoints, 10, size=400_000).path, 10)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    mount = tmp_path / "tiny"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs root to mount a tiny disk")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


def test_a_full_disk_leaves_the_earlier_one(tiny_disk: Path) -> None:
    """From no page free to just enough, so that each file in turn is the one for which there is no room."""
    checkpoints = Checkpoints(tiny_disk)
    before = save(checkpoints, 1).path
    filler = tiny_disk / "filler"
    failures = 0
    for pages in range(100):
        free = os.statvfs(tiny_disk).f_bavail
        filler.write_bytes(bytes((free - pages) * os.statvfs(tiny_disk).f_bsize))
        try:
            written = save(checkpoints, 2 + pages, size=4000)
        except CheckpointFailed as failed:
            assert os.strerror(errno.ENOSPC) in str(failed)  # noqa: PT017
            failures += 1
        else:
            break
        assert sorted(os.listdir(tiny_disk)) == ["filler", before.name]
        assert checkpoints.latest(refuse_none) == before
        assert whole(checkpoints, before, 1)
        filler.unlink()
    assert failures >= 6  # five pages of shared, one and more for every other file
    assert whole(checkpoints, written.path, written.step)
    assert checkpoints.close(5)


def test_a_directory_that_vanishes_is_made_again(checkpoints: Checkpoints, directory: Path) -> None:
    save(checkpoints, 1)
    shutil.rmtree(directory.parent)
    assert checkpoints.latest(refuse_none) is None
    assert whole(checkpoints, save(checkpoints, 2).path, 2)


def test_a_file_where_the_directory_should_be(checkpoints: Checkpoints, directory: Path) -> None:
    directory.parent.mkdir()
    directory.write_text("in the way")
    with pytest.raises(CheckpointFailed, match=r"exists|Not a directory"):
        save(checkpoints, 1)
    with pytest.raises(CheckpointError, match="cannot be listed"):
        checkpoints.latest(refuse_none)
    directory.unlink()
    assert whole(checkpoints, save(checkpoints, 2).path, 2)


def test_no_permission(checkpoints: Checkpoints, directory: Path) -> None:
    before = save(checkpoints, 1).path
    directory.chmod(0o555)
    if os.geteuid() == 0:
        os.seteuid(65534)  # root may write anywhere
    try:
        with pytest.raises(CheckpointFailed, match=os.strerror(errno.EACCES)):
            save(checkpoints, 2)
        with pytest.raises(PacelineError, match=r"could not be removed|cannot be listed"):
            checkpoints.clear()
    finally:
        os.seteuid(os.getuid())
        directory.chmod(0o755)
    assert checkpoints.latest(refuse_none) == before
    save(checkpoints, 3)


def test_an_own_part_that_was_altered_is_not_written(checkpoints: Checkpoints) -> None:
    before = save(checkpoints, 1).path
    own = bytearray(pack({"rank": 0}))
    own[-1] ^= 1
    future = checkpoints.write(2, checkpoints.snapshot(state(2)), [bytes(own)], {})
    with pytest.raises(CheckpointFailed, match="altered"):
        future.result(30)
    assert os.listdir(checkpoints.directory) == [before.name]


def test_everything_is_on_the_disk_before_it_gets_its_name(
    checkpoints: Checkpoints, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut cannot be tested here, the order of calls can."""
    done: list[str] = []
    fsync, rename = os.fsync, os.rename

    def watched_fsync(fd: int) -> None:
        fsync(fd)
        done.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)

    def watched_rename(old: Path, new: Path) -> None:
        rename(old, new)
        done.append(f"rename to {Path(new).name}")

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "rename", watched_rename)
    save(checkpoints, 1)
    assert done[:4] == ["shared.safetensors", "rank-0.safetensors", "rank-1.safetensors", "manifest.json"]
    assert done[4].startswith(".writing-")
    assert done[5:] == ["rename to step-00000001", directory.name]


# -- the background


def test_a_snapshot_does_not_see_later_changes(checkpoints: Checkpoints) -> None:
    live = {"w": torch.zeros(3_000_000), "list": [1]}
    for step in (1, 2, 3):  # the second and third reuse the memory of the first
        live["w"].fill_(step)
        future = checkpoints.write(step, checkpoints.snapshot(live), [pack({})], {"n": live["list"]})
        live["w"].add_(100)
        live["list"].append(step)
        loaded = checkpoints.load(future.result(30).path)
        assert bool((loaded.shared["w"] == step).all())
        assert loaded.shared["list"] == loaded.meta["n"] == [1, *range(1, step)]


def test_snapshots_reuse_their_memory(checkpoints: Checkpoints) -> None:
    first = checkpoints.snapshot(state(1, size=100_000))
    second = checkpoints.snapshot(state(2, size=90_000))
    assert first.buffer.data_ptr() == second.buffer.data_ptr()
    with pytest.raises(ConfigError, match="no longer valid"):
        checkpoints.write(1, first, [], {})
    checkpoints.snapshot(state(3, size=200_000))
    with pytest.raises(ConfigError, match="meta must be"):
        checkpoints.write(1, checkpoints.snapshot({}), [], {"t": torch.ones(1)})


def test_writing_goes_on_beside_the_caller_and_a_second_save_waits(checkpoints: Checkpoints) -> None:
    snapshot = checkpoints.snapshot(state(1, size=8_000_000))
    future = checkpoints.write(1, snapshot, [pack({})], {})
    assert checkpoints.busy
    assert not future.done()
    second = checkpoints.snapshot(state(2, size=8_000_000))
    assert future.done()
    last = checkpoints.write(2, second, [pack({})], {})
    assert checkpoints.close(30)
    assert last.done()
    assert whole_shared(checkpoints, 1)
    assert whole_shared(checkpoints, 2)


def whole_shared(checkpoints: Checkpoints, step: int) -> bool:
    loaded = checkpoints.load(checkpoints.directory / f"step-{step:08d}")
    return bool((loaded.shared["model"]["w"] == step).all())


def test_a_disk_that_is_stuck_does_not_hold_the_caller_for_ever(directory: Path) -> None:
    """A pipe that nobody fills, in place of a file, stands for a disk that hangs."""
    checkpoints = Checkpoints(directory, wait_limit_s=0.2)
    directory.mkdir(parents=True)
    broken = directory / "step-00000001"
    broken.mkdir()
    os.mkfifo(broken / "manifest.json")
    future = checkpoints.write(2, checkpoints.snapshot(state(2)), [], {})
    began = time.monotonic()
    assert not checkpoints.close(0.2)
    with pytest.raises(CheckpointFailed, match="still being written"):
        checkpoints.snapshot(state(3))
    assert time.monotonic() - began < 5
    with (broken / "manifest.json").open("wb"):
        shutil.rmtree(broken)  # the disk is back
    assert future.result(10).step == 2
    save(checkpoints, 3)
    assert checkpoints.close(10)


# -- leftovers


def test_leftovers_of_dead_processes_go_and_those_of_live_ones_stay(directory: Path) -> None:
    make = (
        "import os, sys; from pathlib import Path; from paceline.checkpoint import durable\n"
        "path = durable.hidden(Path(sys.argv[1]), 'writing'); path.mkdir(parents=True)\n"
        "(path / 'shared.safetensors').write_bytes(b'half'); print(path.name, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", make, str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        name = other.stdout.readline().strip()
        assert f"-{other.pid}-" in name
        reused = name.replace(f"-{other.pid}-", f"-{other.pid}-1")  # an earlier process of the same number
        (directory / reused).mkdir()
        (directory / ".writing-0-1-1-elsewhere").mkdir()  # another host's: not for us to judge while it is fresh
        (directory / ".writing-0-1-1-abandoned").mkdir()
        os.utime(directory / ".writing-0-1-1-abandoned", (0, 0))
        (directory / ".keep").mkdir()
        Checkpoints(directory)
        assert sorted(os.listdir(directory)) == sorted([".keep", ".writing-0-1-1-elsewhere", name])
        other.kill()
        other.wait(10)
        Checkpoints(directory)
        assert sorted(os.listdir(directory)) == [".keep", ".writing-0-1-1-elsewhere"]
