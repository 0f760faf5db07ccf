"""What lost workers had done, in what all members tell at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.core import trained
from paceline.core.events import JsonLines
from paceline.core.trained import Trained, Work
from paceline.train.earlier import with_lost
from paceline.train.history import read
from paceline.train.shown import text
from paceline.train.summary import summarise

LOST = [{"rank": 1, "how": "killed by signal 9", "at": 105.0, "again": True}]


def events(run_dir: Path, rank: int, *told: dict[str, Any]) -> None:
    lines = JsonLines(run_dir / "events" / f"rank-{rank}.jsonl")
    for event in told:
        lines({"rank": rank, **event})
    lines.close()


def start(at: float, **fields: Any) -> dict[str, Any]:
    return {"kind": "start", "time": at, "size": 2, "name": "x", "resumed_step": None, **fields}


def step(at: float, compute_s: float, number: int = 1, **fields: Any) -> dict[str, Any]:
    times = {"seconds": compute_s + 0.5, "data_s": 0.0, "compute_s": compute_s, "wait_s": 0.5, "sent_bytes": 100}
    return {"kind": "step", "time": at, "step": number, "samples": 99, **times, **fields}


def member(rank: int, samples: float, compute_s: float) -> dict[str, Any]:
    times = {"seconds": compute_s, "data_s": 0.0, "compute_s": compute_s, "wait_s": 0.0}
    return {"rank": rank, "host": "a", "samples": samples, "pushes": 2, "sent_bytes": 10, **times}


def test_what_a_ranks_lost_processes_did_is_added(tmp_path: Path) -> None:
    earlier_run = [start(10.0), step(11.0, 1000.0)]
    lost_ones = [start(100.0), step(101.0, 2.0), start(103.0, late=True), step(104.0, 3.0)]
    events(tmp_path, 1, *earlier_run, *lost_ones, start(106.0, late=True), step(107.0, 4.0))
    known = Trained(began=99.0, lost={1: Work(samples=24, pushes=3)})
    zero, one = with_lost([member(0, 80, 10.0), member(1, 40, 4.0)], known, tmp_path)
    assert zero == member(0, 80, 10.0)
    assert (one["samples"], one["pushes"], one["sent_bytes"]) == (64, 5, 210)
    assert (one["compute_s"], one["wait_s"], one["seconds"]) == (9.0, 1.0, 10.0)
    assert "lost" not in one


def test_one_of_whom_nobody_came_to_the_end_has_a_row(tmp_path: Path) -> None:
    events(tmp_path, 2, start(100.0), step(101.0, 2.0), step(102.0, float("nan")))
    known = Trained(began=99.0, lost={2: Work(samples=24, pushes=3), 3: Work(samples=8, pushes=1)})
    told = with_lost([member(0, 80, 10.0), member(1, 40, 10.0)], known, tmp_path)
    assert [(m["rank"], m["samples"], m.get("lost", False)) for m in told] == [
        (0, 80, False),
        (1, 40, False),
        (2, 24, True),
        (3, 8, True),  # without a word in its events
    ]
    summary = summarise({"outcome": "finished", "step": 9, "seconds": 20.0, "members": told, "lost": LOST})
    assert summary.samples == 152
    assert [share.lost for share in summary.members] == [False, False, True, True]
    # Busy for as long, with half as many samples; those who are gone hold nobody up.
    assert (summary.slowest, summary.slowest_by) == (1, 2.0)
    assert [line.split()[-1] for line in text(summary).splitlines() if line.split()[:1] in (["2"], ["3"])] == [
        "lost"
    ] * 2


def test_one_that_comes_late_resumes_nothing(tmp_path: Path) -> None:
    first = [
        start(100.0),
        step(101.0, 2.0, 1),
        step(102.0, 2.0, 2),
        {"kind": "end", "time": 103.0, "outcome": "failed"},
    ]
    events(tmp_path, 0, *first, start(105.0, late=True), step(107.0, 2.0, 3))
    history = read(tmp_path)
    assert (len(history.starts), history.resumed_steps, history.end) == (1, [], None)
    assert (history.elapsed_s, history.step) == (7.0, 3)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    (tmp_path / "status").mkdir()
    assert trained.read(tmp_path) is None
    trained.write(tmp_path, 5.0, {1: Work(samples=8, pushes=1)})
    assert trained.read(tmp_path) == Trained(began=5.0, lost={1: Work(samples=8, pushes=1)})
    (tmp_path / trained.FILE).write_bytes(b"{")
    assert trained.read(tmp_path) is None
    trained.clear(tmp_path)
    trained.clear(tmp_path)
    assert not (tmp_path / trained.FILE).exists()
