"""What is known of the runs in a root, for `paceline status`.

From two sources, both files: run.json, which the launcher writes, and status/, where the members say what they
do. A run that was started alone or by torchrun has only the second. Whether a process still lives is asked of
the kernel, where it runs on this host.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from paceline.core import status
from paceline.core.errors import ConfigError, nearest
from paceline.core.status import Doing
from paceline.environment import this_host
from paceline.launch import engines, held, record
from paceline.launch.held import Held
from paceline.launch.record import Run

_STATES = {"T": "stopped", "t": "traced", "Z": "gone", "X": "gone"}
_SLACK_S = 2.0  # the kernel tells when a process began in coarser steps than time.time()


@dataclass(frozen=True)
class Known:
    """One run. `said` and `states` are by rank."""

    directory: Path
    run: Run | None  # None: not started by `paceline run`, or started without it since
    started: float
    said: list[Doing | None]
    states: list[str]  # alive, stopped, traced, gone, or elsewhere for a member on another host

    @property
    def size(self) -> int:
        return len(self.said)

    def pid(self, rank: int) -> int:
        """A member's process number, or 0."""
        doing = self.said[rank]
        return doing.pid if doing else _launched_pid(self.run, rank)


def named(text: str) -> str:
    """A run as it is typed. An empty one is a variable of a shell that is not set, and would mean the newest run."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r} names no run: give its name or its directory")
    return text


def look(directory: Path) -> Known | None:
    """What is known of the run in this directory; None where there is none."""
    run = record.read(directory)
    if run:
        known = _known(directory, run, run.started, range(run.size))
        if not _started_since(known, run):
            return known
    try:
        ranks = [int(path.name[5:]) for path in (directory / "status").glob("rank-*") if path.name[5:].isdecimal()]
        began = (directory / "status").stat().st_mtime  # when the members' files were made
    except OSError:
        return None
    return _known(directory, None, began, range(max(ranks) + 1)) if ranks else None


def all_in(root: Path) -> list[Known]:
    """All runs, newest first."""
    directories = {path.parent for pattern in ("*/run.json", "*/status") for path in root.glob(pattern)}
    found = [known for directory in directories if (known := look(directory))]
    if not found and not waiting_in(root):
        raise ConfigError(f"there are no runs in {str(root)!r}: give --root, or start one with paceline run")
    return sorted(found, key=lambda known: known.started, reverse=True)


def find(root: Path, name: str | None) -> Known:
    """The run of this name or in this directory; without a name the newest."""
    for directory in (Path(name), root / name) if name else ():
        if known := look(directory):
            return known
    if name and (job := waiting(root, name)):
        raise ConfigError(f"run {name!r} has not begun: {engines.queue(job).state(job)}")
    found = all_in(root)
    if name:
        names = [known.directory.name for known in found] + [path.name for path, _ in waiting_in(root)]
        raise ConfigError(f"there is no run {name!r} in {str(root)!r}: {nearest(name, names)}")
    if not found:
        raise ConfigError(f"no run in {str(root)!r} has begun: paceline status --all lists those that wait")
    return found[0]


def submitted(root: Path, name: str) -> Path | None:
    """The directory of a run that was submitted and has not begun here; None: it is another one."""
    directories = (Path(name), root / name)
    return next((path for path in directories if look(path) is None and held.read(path)), None)


def waiting(root: Path, name: str) -> Held | None:
    """Who holds a run that was submitted and has not begun; None: it is another one."""
    directory = submitted(root, name)
    return held.read(directory) if directory else None


def waiting_in(root: Path) -> list[tuple[Path, Held]]:
    """Runs that were submitted and have not begun, newest first; whose file cannot be read is left out."""
    found = []
    for path in root.glob(f"*/{held.FILE}"):
        with contextlib.suppress(ConfigError):
            if look(path.parent) is None and (job := held.read(path.parent)):
                found.append((path.parent, job))
    return sorted(found, key=lambda one: one[1].at, reverse=True)


def launcher_gone(known: Known) -> bool:
    """Whether the launcher has been on this host, and is not there any more."""
    return known.run is not None and known.run.host == this_host() and not record.is_running(known.directory)


def how_it_stands(known: Known) -> str:
    """In half a line."""
    run = known.run
    if run is None:
        return _without_launcher(known)
    if run.host == this_host() and record.is_running(known.directory):
        return f"running for {span(time.time() - run.started)} (launcher: process {run.pid})"
    if run.finished is None or run.exit_code is None:
        if {doing.what if doing else "" for doing in known.said} == {"finished"}:
            return "finished, as its members say: its launcher was killed, or could not write how the run ended"
        return "not running: its launcher was killed" if run.host == this_host() else f"on {run.host}"
    how = "finished" if run.exit_code == 0 else f"ended with exit code {run.exit_code}"
    return f"{how} after {span(run.finished - run.started)}, {span(time.time() - run.finished)} ago"


def why_over(known: Known) -> str:
    """The same of one that is said to be not running."""
    return how_it_stands(known).removeprefix("not running: ")


def span(seconds: float) -> str:
    """
    >>> span(3.21), span(75), span(7300), span(400_000)
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


def _known(directory: Path, run: Run | None, started: float, ranks: range) -> Known:
    said = [status.read(directory / "status" / f"rank-{rank}", rank) for rank in ranks]
    states = [_state(run, rank, doing) for rank, doing in zip(ranks, said)]
    return Known(directory, run, started, said, states)


def _started_since(known: Known, run: Run) -> bool:
    """Whether what the members say is of a later start than the launcher's."""
    if run.host != this_host() or record.is_running(known.directory):
        return False
    finished = time.time() if run.finished is None else run.finished
    return any(
        doing and (doing.since > finished or (state != "gone" and doing.pid not in run.members))
        for doing, state in zip(known.said, known.states)
    )


def _without_launcher(known: Known) -> str:
    said = [doing for doing in known.said if doing]
    if any(doing.what.startswith("failed") for doing in said):
        how = "failed"
    elif any(doing.what == "left early" for doing in said):
        how = "left early"
    elif all(doing.what == "finished" for doing in said):
        how = "finished"
    elif "elsewhere" in known.states:
        return "on other hosts"
    elif set(known.states) == {"gone"}:
        return "not running: its members were killed"
    else:
        return f"running for {span(time.time() - known.started)} (not by paceline run)"
    ended = max(doing.since for doing in said)
    return f"{how} after {span(ended - known.started)}, {span(time.time() - ended)} ago"


def _state(run: Run | None, rank: int, doing: Doing | None) -> str:
    host = (doing.host if doing else "") or (run.host if run else "")
    if host and host != this_host():
        return "elsewhere"
    pid = doing.pid if doing else _launched_pid(run, rank)
    # Without a word of its own, its process began soon after the launcher's.
    since = doing.since if doing else run.started + 60 if run else 0.0
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = next(int(x.split()[1]) for x in Path("/proc/stat").read_text().splitlines() if x[:5] == "btime")
    except (OSError, StopIteration):
        return "gone"
    began = boot + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    if began > since + _SLACK_S:  # the number was given to another process since
        return "gone"
    return _STATES.get(fields[0], "alive")


def _launched_pid(run: Run | None, rank: int) -> int:
    return run.members[rank] if run and rank < len(run.members) else 0
