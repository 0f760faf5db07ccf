"""`paceline stop`: end a run, wherever its launcher is."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from paceline.cli import runs
from paceline.cli.flags import Parser, seconds
from paceline.core.errors import ConfigError, PacelineError
from paceline.core.settings import Settings
from paceline.environment import this_host
from paceline.launch import engines, held, reach, record
from paceline.membership import agent_line

_LOOK_S = 0.1
_LIMIT_S = 10.0  # for the scheduler's answer
_EPILOG = """\
examples:
  paceline stop big            as SIGTERM there; members of an elastic run finish the step under way
  paceline stop big --kill     at once

A run that was stopped goes on where it stopped when it is started again with the same --name.
"""


def main(argv: list[str]) -> int:
    parser = Parser(prog="paceline stop", description="End a run.", epilog=_EPILOG)
    parser.option("--root", parse=str, metavar="DIR", default=Settings().root, help="where runs live (runs)")
    parser.option("--kill", help="end the members at once")
    parser.option("--limit-s", parse=seconds(0), metavar="S", default=60.0, help="how long to wait for the end (60)")
    parser.add_argument("run", type=runs.named, metavar="RUN", help="its name or directory")
    _, rest = parser.split(argv)
    parser.split(rest[1:])  # an unknown option after RUN gets the nearest name too
    given = parser.parse_args(argv)
    if waiting := _waiting(Path(given.root), given.run):
        print(engines.queue(waiting).stop(waiting))
        return 0
    known = runs.find(Path(given.root), given.run)
    name, directory, run = known.directory.name, known.directory, known.run
    if run is None:
        raise ConfigError(f"run {name!r} was not started by paceline run: end it where it was started")
    if run.host == this_host() and record.is_running(directory):
        _signal(run.pid, kill=given.kill)
    elif where := reach.read(directory) if run.least and not runs.launcher_gone(known) else None:
        try:
            print(agent_line.halt(where.address, where.token, drain=not given.kill, limit_s=_LIMIT_S))
        except PacelineError:
            if (queued := held.read(directory)) is None:
                raise
            print(engines.queue(queued).stop(queued))  # its launcher was killed, and it waits again
            return 0
    elif run.finished is None and (queued := held.read(directory)):
        print(engines.queue(queued).stop(queued))
        return 0
    else:
        raise ConfigError(f"run {name!r} is not running here: {runs.why_over(known)}")
    return _await_end(directory, given.limit_s)


def _waiting(root: Path, name: str) -> held.Held | None:
    """Who holds a run that was submitted and is not under way."""
    for directory in (Path(name), root / name):
        if (found := held.read(directory)) and not _under_way(directory):
            return found
    return None


def _under_way(directory: Path) -> bool:
    run = record.read(directory)
    return run is not None and run.finished is None


def _signal(pid: int, *, kill: bool) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGINT if kill else signal.SIGTERM)
        if kill:
            time.sleep(_LOOK_S)
            os.kill(pid, signal.SIGINT)


def _await_end(directory: Path, limit_s: float) -> int:
    deadline = time.monotonic() + limit_s
    while _under_way(directory) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    known = runs.look(directory)
    print(f"{directory}: {runs.how_it_stands(known) if known else 'gone'}")
    return 1 if _under_way(directory) else 0
