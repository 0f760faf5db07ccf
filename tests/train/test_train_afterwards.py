"""The report that a launcher writes, where the first member was killed before it had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from paceline.core.events import JsonLines
from paceline.train import afterwards

LOST = {"kind": "view", "time": 103.0, "number": 2, "size": 2, "lost": [1], "joined": [], "seconds": 0.5, "step": 20}


def events(run_dir: Path, rank: int, *told: dict[str, Any]) -> None:
    lines = JsonLines(run_dir / "events" / f"rank-{rank}.jsonl")
    for event in told:
        lines({"rank": rank, **event})
    lines.close()


def start() -> dict[str, Any]:
    return {"kind": "start", "time": 100.0, "size": 3, "name": "x", "resumed_step": None}


def end(at: float) -> dict[str, Any]:
    members = [{"rank": 0, "samples": 10, "seconds": 3.0, "compute_s": 3.0}]
    return {"kind": "end", "time": at, "outcome": "finished", "step": 60, "seconds": 9.0, "members": members}


def test_the_report_is_written_afterwards_where_it_is_missing(tmp_path: Path) -> None:
    events(tmp_path, 0, start(), LOST)  # killed before it had said the end
    assert afterwards.write(tmp_path, 90.0) is None  # nor has anybody else
    events(tmp_path, 2, start(), end(108.0))
    assert afterwards.write(tmp_path, 200.0) is None  # of an earlier start
    report = afterwards.write(tmp_path, 90.0)
    assert report is not None
    assert '<span class="badge finished">' in report.read_text()
    summary = msgspec.json.decode((tmp_path / "summary.json").read_bytes())
    assert (summary["outcome"], summary["views"]["lost"]) == ("finished", 1)
    assert afterwards.write(tmp_path, 90.0) is None  # it is there
