"""Events in a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.events import JsonLines


def test_a_full_disk_is_told_once_and_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank-0.jsonl").symlink_to("/dev/full")
    lines = JsonLines(tmp_path / "rank-0.jsonl")
    for step in range(3):
        lines({"kind": "step", "step": step})
    lines.close()
    said = capsys.readouterr().out
    assert said.startswith("paceline: events are no longer written to ")
    assert said.count("No space left on device") == 1
