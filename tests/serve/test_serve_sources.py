"""Files and checkpoints as sources, and a run's desk through a cable that is cut."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from _training import make_model, training, until
from safetensors.torch import save_file

from paceline.checkpoint import Checkpoints, pack
from paceline.core.errors import Interrupted, PacelineError
from paceline.serve.keeper import Keeper
from paceline.serve.places import Unfit
from paceline.serve.shelf import Shelf
from paceline.serve.sources import CheckpointSource, FileSource, make_source
from paceline.serve.sources.run import life_of
from paceline.server.outside.desk import read_note


def write(path: Path, value: float) -> None:
    part = path.with_suffix(".part")
    save_file({"w": torch.full((2, 2), value), "b": torch.zeros(2)}, part)
    os.replace(part, path)


def test_a_file_that_is_replaced_gives_what_changed(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    source = make_source(str(path))
    assert isinstance(source, FileSource)
    with pytest.raises(Interrupted, match="cannot be read"):
        source.newest(0.0)
    write(path, 1.0)
    first = source.newest(0.0)
    assert first is not None
    assert (first.version, first.whole, sorted(first.tensors)) == (1, True, ["b", "w"])
    assert source.newest(0.0) is None
    write(path, 2.0)
    second = source.newest(0.0)
    assert second is not None
    assert (second.version, second.whole, sorted(second.tensors)) == (2, False, ["w"])
    assert abs(second.made_at - time.time()) < 60
    data = path.read_bytes()
    path.write_bytes(data[:-5])
    with pytest.raises(Unfit, match="not a whole safetensors file"):
        source.newest(0.0)
    assert source.newest(0.0) is None  # it is said once
    torch.save({"w": torch.zeros(2, 2), "b": torch.zeros(2), "c": torch.ones(1)}, path)
    third = source.newest(0.0)
    assert third is not None
    assert third.whole  # it has others than before
    assert torch.equal(second.tensors["w"], torch.full((2, 2), 2.0))  # written over, it is still what was read
    torch.save(torch.nn.Linear(2, 2), path)
    with pytest.raises(Unfit, match="opening it could run code"):
        source.newest(0.0)
    for garbage in (b"these are words", b"\x80\x02R", b"PK"):
        path.write_bytes(garbage)
        with pytest.raises(Unfit, match=r"is neither safetensors nor a state dict of torch|could run code"):
            source.newest(0.0)
    path.write_bytes(b"these are others")
    with pytest.raises(Unfit, match="is neither safetensors nor a state dict of torch"):
        source.newest(0.0)
    path.unlink()
    with pytest.raises(Interrupted):
        source.newest(0.0)


def save(checkpoints: Checkpoints, step: int, value: float) -> Path:
    state = {"model.0": {"w": torch.full((2, 2), value), "b": torch.zeros(2)}, "optimizer.0": {"lr": 0.1}}
    return checkpoints.write(step, checkpoints.snapshot(state), [pack({})], {"epoch": 0}).result(60).path


def test_checkpoints_give_what_changed_and_torn_ones_are_refused(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    first_path = save(checkpoints, 10, 1.0)
    source = make_source(str(tmp_path / "checkpoints"))
    assert isinstance(source, CheckpointSource)
    first = source.newest(0.0)
    assert first is not None
    assert (first.version, first.whole, sorted(first.tensors)) == (10, True, ["b", "w"])
    assert source.newest(0.0) is None
    save(checkpoints, 20, 2.0)
    second = source.newest(0.0)
    assert second is not None
    assert (second.version, second.whole, sorted(second.tensors)) == (20, False, ["w"])
    torn = save(checkpoints, 30, 3.0) / "shared.safetensors"
    torn.write_bytes(torn.read_bytes()[:-1])
    with pytest.raises(Unfit, match=r"checkpoint step-00000030: shared\.safetensors"):
        source.newest(0.0)
    assert source.newest(0.0) is None
    fixed = make_source(str(first_path))
    only = fixed.newest(0.0)
    assert only is not None
    assert only.version == 10
    assert fixed.newest(0.0) is None
    assert fixed.ended == "it stays as it is"
    other = make_source(str(first_path), model=1)
    with pytest.raises(Unfit, match=r"it has no 'model.1': did you mean 'model.0'"):
        other.newest(0.0)


def test_a_checkpoint_that_is_copied_slowly_is_taken_when_it_is_whole(tmp_path: Path) -> None:
    """File by file, the largest in pieces: refused once, and read again when nothing more comes."""
    elsewhere = Checkpoints(tmp_path / "elsewhere")
    first, second, third = (save(elsewhere, step, float(step)) for step in (10, 20, 30))
    here = tmp_path / "here"
    shutil.copytree(first, here / first.name)
    source = make_source(str(here))
    assert source.newest(0.0) is not None
    (here / second.name).mkdir()
    assert source.newest(0.0) is None
    for path in sorted(second.iterdir()):  # shared.safetensors is the last
        (here / second.name / path.name).write_bytes(
            path.read_bytes()[: -8 if path.name.startswith("shared") else None]
        )
    with pytest.raises(Unfit, match=r"checkpoint step-00000020: shared\.safetensors"):
        source.newest(0.0)
    assert source.newest(0.0) is None
    with (here / second.name / "shared.safetensors").open("ab") as file:
        file.write((second / "shared.safetensors").read_bytes()[-8:])
    assert source.newest(0.0) is None  # it may still grow
    update = source.newest(10.0)
    assert update is not None
    assert (update.version, float(update.tensors["w"][0, 0])) == (20, 20.0)
    for path in sorted(third.iterdir(), key=lambda path: path.name == "manifest.json"):
        assert source.newest(0.0) is None
        (here / third.name).mkdir(exist_ok=True)
        shutil.copy(path, here / third.name)
    update = source.newest(10.0)
    assert update is not None
    assert update.version == 30
    shutil.rmtree(here)
    with pytest.raises(Interrupted, match="there is no directory"):
        source.newest(0.0)
    shutil.copytree(second, here / second.name)
    update = source.newest(0.0)
    assert update is not None
    assert update.version == 20


def test_a_run_of_which_nothing_can_be_had_yet_says_so(tmp_path: Path) -> None:
    """Its launcher has begun, its members have not."""
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "run.json").touch()
    keeper = Keeper(Shelf(tmp_path / "shelf"), make_source("x", root=tmp_path), model=make_model())
    with keeping(keeper):
        assert keeper.state().source == "waits for run x: it has no servers and no checkpoint yet"


def test_how_a_run_ended_is_read_from_what_its_first_member_said(tmp_path: Path) -> None:
    from paceline.core.status import Status
    from paceline.environment.place import this_host

    assert life_of(tmp_path) == ""
    status = Status(tmp_path / "status" / "rank-0", this_host())
    status.set("training")
    assert life_of(tmp_path) == ""
    status.set("finished")
    assert life_of(tmp_path) == "finished"
    child = os.fork()
    if not child:
        Status(tmp_path / "status" / "rank-0", this_host()).set("training")
        os._exit(0)
    os.waitpid(child, 0)
    assert life_of(tmp_path) == "gone"


class Cable:
    """Carries connections from an address of its own to another, until it is cut."""

    def __init__(self, to: str) -> None:
        host, port = to.rsplit(":", 1)
        self._to = host, int(port)
        self._ends: list[socket.socket] = []
        self.whole = True
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self.whole = False
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self.listener.accept()
            except OSError:
                return
            if not self.whole:
                here.close()
                continue
            there = socket.create_connection(self._to)
            self._ends += [here, there]
            for one, other in ((here, there), (there, here)):
                threading.Thread(target=self._carry, args=(one, other), daemon=True).start()

    def _carry(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                other.sendall(data)
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def keeping(keeper: Keeper) -> Iterator[Keeper]:
    keeper.start()
    try:
        yield keeper
    finally:
        keeper.close()


@pytest.mark.slow
def test_a_cable_that_is_cut_and_mended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with training("-n", "1", "--strategy", "async", "--servers", "1") as run:
        until(lambda: read_note(Path("runs/x")) if Path("runs/x").exists() else None, run)
        note = read_note(Path("runs/x"))
        assert note is not None
        cable = Cable(note.addresses[0])
        shelf = Shelf(Path("shelf"))
        with keeping(Keeper(shelf, make_source(cable.address, token=note.token), model=make_model())) as keeper:
            until(lambda: shelf.current() >= 2, run)
            cable.cut()
            until(lambda: keeper.state().lost, run)
            serving = shelf.current()
            assert f"serving goes on with version {serving}" in keeper.state().source
            cable.whole = True
            until(lambda: shelf.current() > serving, run)
            assert not keeper.state().lost
            assert "are as the model was made" in keeper.state().note
            cable.listener.close()


def test_a_wrong_token_is_told(tmp_path: Path) -> None:
    source = make_source("127.0.0.1:1", token="x")
    with pytest.raises(PacelineError):
        source.newest(0.0)
    assert source.what == "run at 127.0.0.1:1"
