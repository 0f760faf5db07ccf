"""The summary and the report of a run that finished, where the first member could not write them itself any more.

From the event files alone, by the launcher. Every member's "end" event has what all of them counted, so it does not
matter whose is left.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from paceline.core.events import Event
from paceline.train.history import read
from paceline.train.report import write_report
from paceline.train.summary import summarise, write_summary


def write(run_dir: Path, since: float) -> Path | None:
    """The report, unless one was written after `since` (time.time()), or no member said that the run has finished."""
    report = run_dir / "report.html"
    if report.exists() and report.stat().st_mtime >= since:
        return None
    history = read(run_dir)
    history.end = history.end or _end(run_dir, since)
    if history.end is None:
        return None
    start = history.starts[-1] if history.starts else None
    write_summary(summarise(history.end, start, history.views), run_dir)
    return write_report(run_dir, history)


def _end(run_dir: Path, since: float) -> Event | None:
    """What any member has said at its end."""
    for path in sorted((run_dir / "events").glob("rank-*.jsonl")):
        for line in reversed(path.read_bytes().splitlines()[-3:]):
            try:
                event = msgspec.json.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
            fits = isinstance(event, dict) and event.get("kind") == "end" and event.get("outcome") == "finished"
            if fits and isinstance(at := event.get("time"), int | float) and at >= since:
                return dict(event)
    return None
