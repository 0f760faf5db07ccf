"""`paceline status`: a line per member that says what it does or waits for, and since when.

It reads files only (run.json and what members say in status/), so that it works on members that hang, are
stopped or were killed, and asks the kernel about their processes where they run on this host.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from paceline.cli.flags import Parser
from paceline.core import status
from paceline.core.errors import ConfigError, nearest
from paceline.core.settings import Settings
from paceline.core.status import Doing
from paceline.environment import this_host
from paceline.launch import record
from paceline.launch.record import Run

_WAITS = re.compile(r"\bwaiting\b")
_WAITS_FOR = re.compile(r"waiting for members? (\d+(?:(?:, | and )\d+)*)")
_STATES = {"T": "stopped", "t": "traced", "Z": "gone", "X": "gone"}


def main(argv: list[str]) -> int:
    parser = Parser(prog="paceline status", description="What each member of a run is doing or waiting for.")
    parser.option("--root", parse=str, metavar="DIR", default=Settings().root, help="where runs live (runs)")
    parser.option("--all", help="list the runs, newest first")
    parser.add_argument("run", nargs="?", metavar="RUN", help="its name or directory (default: the newest)")
    _, rest = parser.split(argv)
    parser.split(rest[1:])  # an unknown option after RUN gets the nearest name too
    given = parser.parse_args(argv)
    root = Path(given.root)
    if given.all:
        print("\n".join(_list(root)))
    else:
        print("\n".join(describe(_find(root, given.run))))
    return 0


def describe(directory: Path) -> list[str]:
    """The lines for one run."""
    run = record.read(directory)
    if run is None:
        raise ConfigError(f"{directory} holds no run: it has no run.json that can be read")
    said = [status.read(directory / "status" / f"rank-{rank}", rank) for rank in range(run.size)]
    states = [_state(run, rank, doing) for rank, doing in enumerate(said)]
    waited_for = _waited_for(said, states)
    rows = [("rank", "state", "process", "epoch", "step", "doing")]
    for rank, (doing, state) in enumerate(zip(said, states)):
        pid = doing.pid if doing else run.members[rank] if rank < len(run.members) else 0
        counts = (str(doing.epoch + 1), str(doing.step)) if doing else ("-", "-")  # epochs from 1, as in progress
        what = _what(doing, state, run)
        if rank in waited_for:
            what += "  <- the others wait for this one"
        rows.append((str(rank), state, str(pid or "-"), *counts, what))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    table = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) + "  " + row[5] for row in rows]
    return [f"{directory}: {_how_it_stands(directory, run)}, {_members(run.size)}", *table]


def _waited_for(said: list[Doing | None], states: list[str]) -> set[int]:
    """Whom the members wait for: whom they name, or else who does not wait itself."""
    waiting = {d.rank for d, s in zip(said, states) if d and s != "gone" and _WAITS.search(d.what)}
    named: set[int] = set()
    for rank in waiting:
        doing = said[rank]
        if doing and (names := _WAITS_FOR.search(doing.what)):
            named |= {int(n) for n in re.findall(r"\d+", names[1])}
    # A member that waits in turn is only in between.
    named = (named - waiting) or named
    return named or (set(range(len(said))) - waiting if waiting else set())


def _what(doing: Doing | None, state: str, run: Run) -> str:
    if doing is None:
        return "nothing heard of it" if state == "gone" else "starting: has not joined"
    if state == "gone":
        return f"last: {doing.what}, {_span(time.time() - doing.since)} ago"
    return f"{doing.what}, for {_span(time.time() - doing.since)}"


def _state(run: Run, rank: int, doing: Doing | None) -> str:
    """alive, stopped, gone, or elsewhere for a member on another host."""
    if run.host != this_host():
        return "elsewhere"
    pid = doing.pid if doing else run.members[rank] if rank < len(run.members) else 0
    since = doing.since if doing else run.started + 60  # its process began soon after the launcher's
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = next(int(x.split()[1]) for x in Path("/proc/stat").read_text().splitlines() if x[:5] == "btime")
    except (OSError, StopIteration):
        return "gone"
    began = boot + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    if began > since + 2:  # the number was given to another process since
        return "gone"
    return _STATES.get(fields[0], "alive")


def _how_it_stands(directory: Path, run: Run) -> str:
    if run.host == this_host() and record.is_running(directory):
        return f"running for {_span(time.time() - run.started)} (launcher: process {run.pid})"
    if run.finished is None or run.exit_code is None:
        return "not running: its launcher was killed" if run.host == this_host() else f"on {run.host}"
    how = "finished" if run.exit_code == 0 else f"ended with exit code {run.exit_code}"
    return f"{how} after {_span(run.finished - run.started)}, {_span(time.time() - run.finished)} ago"


def _runs(root: Path) -> list[tuple[Path, Run]]:
    found = [(path.parent, run) for path in root.glob("*/run.json") if (run := record.read(path.parent))]
    return sorted(found, key=lambda each: each[1].started, reverse=True)


def _list(root: Path) -> list[str]:
    runs = _runs(root)
    if not runs:
        raise ConfigError(f"there are no runs in {str(root)!r}: give --root, or start one with paceline run")
    width = max(len(directory.name) for directory, _ in runs)
    return [f"{d.name:{width}}  {_members(run.size):>10}  {_how_it_stands(d, run)}" for d, run in runs]


def _find(root: Path, name: str | None) -> Path:
    if name and (Path(name) / "run.json").exists():
        return Path(name)
    if name and (root / name / "run.json").exists():
        return root / name
    runs = _runs(root)
    if not runs:
        raise ConfigError(f"there are no runs in {str(root)!r}: give --root, or start one with paceline run")
    if name:
        raise ConfigError(f"there is no run {name!r} in {str(root)!r}: {nearest(name, [d.name for d, _ in runs])}")
    return runs[0][0]


def _members(size: int) -> str:
    return "1 member" if size == 1 else f"{size} members"


def _span(seconds: float) -> str:
    """
    >>> _span(3.21), _span(75), _span(7300), _span(400_000)
    ('3.2 s', '1 min 15 s', '2 h 1 min', '4 d 15 h')
    """
    if seconds < 60:
        return f"{max(0.0, seconds):.1f} s"
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86400
    if hours < 1:
        return f"{minutes:.0f} min {seconds % 60:.0f} s"
    if days < 1:
        return f"{hours:.0f} h {minutes % 60:.0f} min"
    return f"{days:.0f} d {hours % 24:.0f} h"
