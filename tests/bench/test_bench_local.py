"""What `bench.local` trains and reckons, without processes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from bench import _local_tasks as tasks
from bench import _local_torchft as peer
from bench import _local_unlike as unlike
from bench import _local_worker as worker
from bench import local, workers
from bench._local_quality import Run
from bench._network_worker import Compute
from bench.harness import Report

SIZE = 4


def next_character() -> nn.Module:
    """From the one before it."""
    return nn.Embedding(tasks.VOCABULARY, tasks.VOCABULARY)


@contextmanager
def as_member(rank: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "RANK", rank)
        patch.setattr(workers, "SIZE", SIZE)
        yield


@pytest.fixture
def task(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[tasks.Task]:
    file = tmp_path_factory.mktemp("text") / "numbers.txt"
    file.write_text(" ".join(map(str, range(20_000))))
    monkeypatch.setenv("BENCH_TEXT", str(file))
    tasks.text.cache_clear()
    yield replace(
        tasks.TASKS["gpt"], make=next_character, optimizer=tasks._sgd, draw=tasks._draw_text(8), batch=8, whole=True
    )
    tasks.text.cache_clear()


def test_one_process_with_all_batches_takes_the_steps_of_ddp(task: tasks.Task) -> None:
    """Against the mean of the members' gradients, written out; the others do nothing, and measure nothing."""
    training = []
    for rank in range(SIZE):
        with as_member(rank):
            training.append(worker.Training(task, worker.SIDES["ddp"], 0.5, seed=3, total=5, case=""))
    torch.manual_seed(3)
    model = next_character()
    optimizer = task.optimizer(model, 0.5)
    for done in range(5):
        for rank in range(SIZE):
            with as_member(rank):
                training[rank].step()
        optimizer.param_groups[0]["lr"] = 0.5 * task.share(done, 5)
        optimizer.zero_grad()
        for rank in range(SIZE):
            (task.loss(model, task.draw(3, done, rank, SIZE, "")) / SIZE).backward()
        optimizer.step()
    with as_member(0):
        measured = training[0].measure(training[0].model)
        others = [each.measure(each.model) for each in training[1:]]
    for ours, plain in zip(training[0].model.parameters(), model.parameters()):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)
    assert measured == pytest.approx(sum(task.measure(model, rank, SIZE) for rank in range(SIZE)), rel=1e-5)
    assert others == [0] * (SIZE - 1)


def test_other_sides_train_on_their_own_batches(task: tasks.Task) -> None:
    with as_member(2):
        assert worker.Training(task, worker.SIDES["alone"], 0.5, seed=3, total=5, case="").ranks == [2]


def test_compute_is_scaled_in_proportion() -> None:
    scaled = Compute(0.2, [("a", 0.1), ("b", 0.3)]).scaled(1.2)
    assert scaled.step_s == pytest.approx(1.2)
    assert scaled.backward[1][1] == pytest.approx(3 * scaled.backward[0][1])


@pytest.mark.parametrize("task_name", ["gpt", "wide"])
def test_figures_are_of_the_fastest_side_that_reaches_the_target(task_name: str) -> None:
    """`local` has the shortest steps and misses the target; the share is that of diloco, and a task's own end."""
    taken = {
        "alone": _block(1.0),
        "ddp": _block(20.0),
        "local": _block(1.01),
        "diloco": _block(1.25),
        "sparse diloco": _block(1.1),
    }
    final = {"ddp": (0.9, 0.7), "local": (1.0, 0.8), "diloco": (0.9, 0.71), "sparse diloco": (0.95, 0.715)}
    learnt = {name: [Run([(100, early), (200, end)])] * 2 for name, (early, end) in final.items()}
    learnt["diloco"] = [Run([(100, 0.715), (200, 0.71)])] * 2
    report = Report("bench.local")
    local._add_figures(report, task_name, {"100mbit": {}, "10mbit": taken}, learnt)
    end = "" if task_name == "gpt" else "_wide"
    figures = {figure.name: figure for figure in report.figures}
    assert figures[f"compute_share{end}"].value == pytest.approx(0.8)
    assert "diloco at 10mbit" in figures[f"compute_share{end}"].ours
    assert figures[f"compute_share_sparse{end}"].value == pytest.approx(1 / 1.1)
    assert figures[f"speedup_10mbit{end}"].value == pytest.approx(200 * 20.0 / (100 * 1.25))
    assert figures[f"loss_gap_nats{end}"].goal == "<= 0.02"
    assert f"loss_gap_nats{end} local" in figures
    assert len(report.figures) == len(figures)


def test_a_torchft_that_is_not_there_is_named_before_anything_is_measured(tmp_path: Path) -> None:
    python = tmp_path / "python"
    assert str(tmp_path / "torchft_lighthouse") in peer.missing(str(python))
    (tmp_path / "torchft_lighthouse").touch(0o755)
    assert peer.missing(str(python)) == ""


@pytest.mark.parametrize("total", [60, 1000, 1001])
def test_unlike_members_take_as_many_batches_as_they_are_fast(total: int) -> None:
    steps = unlike.shares(total)
    assert sum(steps) == 4 * total
    assert [n / steps[0] for n in steps] == pytest.approx(list(unlike.SPEEDS), rel=0.05)


def test_a_paced_step_takes_its_time(task: tasks.Task) -> None:
    with as_member(0):
        training = worker.Training(task, worker.SIDES["alone"], 0.5, seed=3, total=5, case="")
    training.pace_s = 0.2
    began = time.perf_counter()
    training.step()
    assert time.perf_counter() - began >= 0.2


def _block(seconds: float) -> list[dict[str, float]]:
    return [{"seconds": seconds, "busy_s": 0.0, "sent_bytes": 1e6}] * 2
