"""TensorBoard files, read back with TensorBoard itself."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.core.events import Events
from paceline.train.tensorboard import tensorboard_sink

pytest.importorskip("tensorboard")


def read_back(directory: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: Any = EventAccumulator(str(directory))
    found.Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def step(events: Events, number: int, **scalars: float) -> None:
    times = {"data_s": 0.1, "compute_s": 0.3, "wait_s": 0.1}
    events.emit("step", epoch=0, step=number, samples=50, scalars=scalars, **times)


def test_scalars_metrics_speed_and_split(tmp_path: Path) -> None:
    sink = tensorboard_sink(tmp_path)
    assert sink is not None
    events = Events(0, [sink])
    events.emit("start", size=1, resumed_step=0)
    for number in (1, 2, 3):
        step(events, number, loss=1 / number)
    events.emit("metric", name="accuracy", value=0.5, step=3, epoch=0)
    events.emit("warning", message="not a scalar")
    sink.close()
    sink.close()
    found = read_back(tmp_path)
    assert found["train/loss"] == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
    assert found["metric/accuracy"] == [(3, 0.5)]
    assert found["speed/samples_per_s"] == [(n, pytest.approx(100)) for n in (1, 2, 3)]
    assert [round(found[f"time/{name}"][0][1], 3) for name in ("data", "compute", "wait")] == [0.2, 0.6, 0.2]


def test_a_resumed_run_replaces_the_steps_that_it_does_again(tmp_path: Path) -> None:
    for resumed, numbers, loss in ((0, (1, 2, 3, 4), 1.0), (2, (3, 4, 5), 2.0)):
        sink = tensorboard_sink(tmp_path)
        assert sink is not None
        events = Events(0, [sink])
        events.emit("start", size=1, resumed_step=resumed)
        for number in numbers:
            step(events, number, loss=loss)
        sink.close()
        time.sleep(1.1)  # files are named by the second and read in the order of their names
    assert read_back(tmp_path)["train/loss"] == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0)]


def test_a_directory_that_cannot_be_written_ends_the_writing_only(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    sink = tensorboard_sink(tmp_path / "file" / "tensorboard")
    assert sink is not None
    events = Events(0, [sink])
    for number in range(3):
        step(events, number)
    sink.close()
    assert "TensorBoard files are no longer written" in capfd.readouterr().err


def test_nothing_heavy_is_imported_by_the_training_thread() -> None:
    code = (
        "import sys, paceline.train.tensorboard, paceline.train.progress, paceline.train.summary, "
        "paceline.train.report; assert not {'torch', 'tensorboard'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_without_tensorboard_there_is_no_sink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert tensorboard_sink(tmp_path) is None
    assert not list(tmp_path.iterdir())
