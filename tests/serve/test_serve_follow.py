"""Following real runs in their own processes, which are killed, cut off, started again and finished."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from _training import kill_all, learns, make_model, training, until

from paceline.core.errors import ConfigError
from paceline.serve.keeper import Keeper
from paceline.serve.shelf import Shelf
from paceline.serve.sources import RunSource, make_source
from paceline.serve.swap import Swap


@contextlib.contextmanager
def kept(where: str, **more: str) -> Iterator[tuple[Keeper, Shelf]]:
    shelf = Shelf(Path("shelf"))
    keeper = Keeper(shelf, make_source(where, **more), model=make_model())  # type: ignore[arg-type]
    keeper.start()
    try:
        yield keeper, shelf
    finally:
        keeper.close()


def waits(name: str) -> None:
    Path("runs", name, "status").mkdir(parents=True)  # as one that has only begun


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "codec"), [("sync", ""), ("async", "quantize(8)")])
def test_a_run_that_is_killed_is_served_on_and_followed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, codec: str
) -> None:
    monkeypatch.chdir(tmp_path)
    args = ["-n", "2", "--strategy", strategy, "--servers", "1"]
    waits("x")
    model = make_model()
    with kept("x", codec=codec) as (keeper, shelf):
        swap = Swap(model, Shelf(Path("shelf")))
        with training(*args) as run:
            until(lambda: shelf.current() >= 3, run)
            first, last = (shelf.read(number) for number in (shelf.versions()[0].number, shelf.current()))
            assert "0.weight" not in learns(first, last)  # it is frozen
            assert "3.weight" in learns(first, last)
            made_at = keeper.state().versions[-1].made_at
            assert abs(time.time() - made_at) < 60
            assert keeper.state().source.startswith("follows run x, version ")
            kill_all(run)
        until(lambda: keeper.state().lost)
        serving = shelf.current()
        assert f"serving goes on with version {serving}" in keeper.state().source
        until(lambda: swap.install() == serving)
        assert torch.equal(model[3].weight, shelf.read(serving)["3.weight"])  # type: ignore[index]
        with training(*args) as run:
            until(lambda: shelf.current() >= serving + 2, run)
            until(lambda: not keeper.state().lost)
            until(lambda: swap.install() >= serving + 2, run)
            Path("stop").touch()
            run.wait(60)
        until(lambda: "is over (" in keeper.state().source)
        assert "serving goes on" in keeper.state().source
        swap.close()
        refused = [refusal.reason for refusal in keeper.state().refusals]
        assert not refused


@pytest.mark.slow
def test_a_frozen_parameter_is_not_served_as_it_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    waits("x")
    with (
        kept("x") as (keeper, shelf),
        training("-n", "1", "--strategy", "async", "--servers", "1", "--checkpoint-keep", "0") as run,
    ):
        until(lambda: "waits for its first checkpoint: '0.weight' is on no server" in keeper.state().source, run)
        assert shelf.current() == 0


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["allreduce", "local(every=4)"])
def test_a_run_without_servers_is_followed_by_its_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    monkeypatch.chdir(tmp_path)
    waits("x")
    with kept("x") as (keeper, shelf):
        with training("-n", "2", "--strategy", strategy, "--checkpoint-every-s", "0.5") as run:
            until(lambda: shelf.current() >= 2, run)
            first, last = (shelf.read(version.number) for version in shelf.versions()[:2])
            assert {"3.weight", "1.running_mean"} <= set(learns(first, last))  # buffers too
            where = [shelf.where(version.number)["0.weight"] for version in shelf.versions()[:2]]
            assert where[0] == where[1]  # what is frozen is not written again
            kill_all(run)
        until(lambda: keeper.state().lost)
        serving = shelf.current()
        with training("-n", "2", "--strategy", strategy, "--checkpoint-every-s", "0.5") as run:
            until(lambda: shelf.current() > serving, run)
            assert not keeper.state().refusals
    # One that comes when the run is dead finds its last checkpoint.
    with kept("x") as (keeper, shelf):
        serving = shelf.current()
        assert serving > 0
        until(lambda: shelf.current() > serving or keeper.state().lost)


@pytest.mark.slow
def test_buffers_come_from_the_newest_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    args = ("-n", "2", "--strategy", "sync", "--servers", "1", "--checkpoint-every-s", "1")
    with training(*args) as run:
        until(lambda: list(Path("runs/x/checkpoints").glob("step-*")), run)
        with kept("x") as (keeper, shelf):
            until(lambda: shelf.current() > 0, run)
            read = shelf.read(shelf.current())
            assert bool(read["1.running_mean"].any())  # not as the model was made
            assert "tensors that servers do not have come from step-" in keeper.state().note
            count = int(read["1.num_batches_tracked"])
            until(lambda: int(shelf.read(shelf.current())["1.num_batches_tracked"]) > count, run)
            until(lambda: Path("stop").touch() is None and run.poll() is not None)
            # Its last checkpoint is newer than what its servers had last.
            until(lambda: "is over (" in keeper.state().source)


def test_what_is_named_is_found_or_the_nearest_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="'digits' is no run, checkpoint or file of weights; there is no run in"):
        make_source("digits")
    waits("digits")
    assert isinstance(make_source("digits"), RunSource)
    assert isinstance(make_source("runs/digits"), RunSource)
    with pytest.raises(ConfigError, match="did you mean 'digits'"):
        make_source("digit")
