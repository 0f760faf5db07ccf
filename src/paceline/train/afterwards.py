"""The summary and the report of a run that finished, where the first member could not write them itself any more.

From the event files alone, by the launcher. Every member's "end" event has what all of them counted, so it does not
matter whose is left.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from paceline.core.events import Event
from paceline.train.figures import value
from paceline.train.history import read
from paceline.train.report import write_report
from paceline.train.summary import Summary, summarise, write_summary


def write(run_dir: Path, since: float) -> Path | None:
    """The report, unless one was written after `since` (time.time()), or no member said that the run has finished."""
    if _written(run_dir, since):
        return None
    history = read(run_dir)
    history.end = _end(run_dir, since) or history.end
    if history.end is None:
        return None
    start = history.starts[-1] if history.starts else None
    write_summary(summarise(history.end, start, history.views), run_dir)
    return write_report(run_dir, history)


def _written(run_dir: Path, since: float) -> bool:
    """Whether the report is that of the end, and not of a first member that had failed and was replaced."""
    report, summary = run_dir / "report.html", run_dir / "summary.json"
    try:
        if not report.stat().st_mtime >= summary.stat().st_mtime >= since:
            return False
        return msgspec.json.decode(summary.read_bytes(), type=Summary).outcome != "failed"
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return False


def _end(run_dir: Path, since: float) -> Event | None:
    """What a member has said at its end: of several, one that has come furthest. Others may have come too late."""
    found: list[Event] = []
    for path in sorted((run_dir / "events").glob("rank-*.jsonl")):
        for line in reversed(path.read_bytes().splitlines()[-3:]):
            try:
                event = msgspec.json.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
            fits = isinstance(event, dict) and event.get("kind") == "end" and event.get("outcome") == "finished"
            if fits and isinstance(at := event.get("time"), int | float) and at >= since:
                found.append(dict(event))
    return max(found, key=lambda event: value(event.get("step") or 0), default=None)
