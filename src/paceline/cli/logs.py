"""`paceline logs`: what the members of a run have printed, and what they print."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from paceline.cli import runs
from paceline.cli.display import Display
from paceline.cli.flags import Parser, whole
from paceline.core.errors import ConfigError
from paceline.core.settings import Settings
from paceline.environment import this_host
from paceline.launch import engines, held, reach, record

_LOOK_S = 0.2
_ASK_S = 2.0  # between two questions to a queue, which has others to answer
_TELL_S = 300.0
_EPILOG = """\
examples:
  paceline logs                     all that the members of the newest run have printed, member by member
  paceline logs big --lines 5       the last five lines of each
  paceline logs big --rank 3        of one member
  paceline logs big --follow        and what they print, until the run ends
"""


def main(argv: list[str]) -> int:
    parser = Parser(prog="paceline logs", description="What the members of a run print.", epilog=_EPILOG)
    parser.option("--root", parse=str, metavar="DIR", default=Settings().root, help="where runs live (runs)")
    parser.option("--rank", parse=whole(0), metavar="K", help="of this member alone")
    parser.option("--lines", parse=whole(0), metavar="N", help="the last N of each (default: all)")
    parser.option("--follow", help="go on until the run ends")
    parser.add_argument(
        "run", nargs="?", type=runs.named, metavar="RUN", help="its name or directory (default: the newest)"
    )
    _, rest = parser.split(argv)
    parser.split(rest[1:])  # an unknown option after RUN gets the nearest name too
    given = parser.parse_args(argv)
    if given.run and (job := runs.waiting(Path(given.root), given.run)):
        asked = engines.queue(job)
        if isinstance(asked, engines.Remote):
            if given.rank is not None:
                raise ConfigError(
                    f"--rank {given.rank}: the members of run {given.run!r} print to pods; leave it out, and look for "
                    f"lines that begin with [{given.rank}]"
                )
            return asked.logs(job, follow=given.follow, lines=given.lines)
    if given.follow and given.run:
        _await_begin(Path(given.root), given.run)
    known = runs.find(Path(given.root), given.run)
    ranks = range(known.size) if given.rank is None else [given.rank]
    if given.rank is not None and given.rank >= known.size:
        raise ConfigError(f"--rank {given.rank}: run {known.directory.name!r} has members 0 to {known.size - 1}")
    tails = [_Tail(known.directory / "logs" / f"rank-{rank}.log", rank) for rank in ranks]
    display = Display(known.size)
    for tail in tails:
        for line in tail.first(given.lines, last=not given.follow):
            display.line(tail.rank, "out", line)
    if not given.follow and not any(tail.found for tail in tails):
        print(f"paceline: nothing was printed so far (no logs in {known.directory / 'logs'})", file=sys.stderr)
    life = _Life(known.directory)
    while given.follow:
        goes_on = life.goes_on()  # asked first: what is printed before the end is read below
        for tail in tails:
            for line in tail.more(last=not goes_on):
                display.line(tail.rank, "out", line)
        if not goes_on:
            break
        time.sleep(_LOOK_S)
    return 0


def _await_begin(root: Path, name: str) -> None:
    """A run that was submitted may wait for long: say what for, when that changes, and each few minutes."""
    said, at = "", 0.0
    while (job := runs.waiting(root, name)) and (text := engines.queue(job).state(job)):
        if engines.over(job) and runs.waiting(root, name):
            raise ConfigError(f"run {name!r} did not begin: {text}")
        what = text.rpartition(",")[0]  # without for how long
        if what != said or time.monotonic() - at > _TELL_S:
            print(f"paceline: {text}", file=sys.stderr)
            said, at = what, time.monotonic()
        time.sleep(_ASK_S)


class _Tail:
    """A log that grows. A line is given when it is whole."""

    def __init__(self, path: Path, rank: int) -> None:
        self.rank = rank
        self.found = False
        self._path = path
        self._file = 0
        self._at = 0
        self._rest = b""

    def first(self, count: int | None, *, last: bool) -> list[str]:
        lines = list(self.more(last=last))
        return lines if count is None else lines[len(lines) - min(count, len(lines)) :]

    def more(self, *, last: bool) -> Iterator[str]:
        try:
            with self._path.open("rb") as file:
                found = os.fstat(file.fileno())
                if found.st_size < self._at or found.st_ino != (self._file or found.st_ino):  # begun anew
                    self._at, self._rest = 0, b""
                self._file = found.st_ino
                file.seek(self._at)
                data = file.read()
                self._at = file.tell()
                self.found = True
        except OSError:  # not begun yet, or gone
            data = b""
        *whole_lines, self._rest = (self._rest + data).split(b"\n")
        if last and self._rest:
            whole_lines, self._rest = [*whole_lines, self._rest], b""
        for line in whole_lines:
            yield line.decode(errors="replace").rstrip("\r")


class _Life:
    """Whether a run goes on. Of one that was submitted its queue is asked: there it may wait again, or have
    ended without a word of its launcher."""

    def __init__(self, directory: Path) -> None:
        self._dir = directory
        self._queued: bool | None = None  # in the queue or under way; None: nobody to ask
        self._asked_at = -math.inf

    def goes_on(self) -> bool:
        run = record.read(self._dir)
        if run is None:
            known = runs.look(self._dir)
            return known is not None and any(state in ("alive", "stopped", "traced") for state in known.states)
        if run.host == this_host() and record.is_running(self._dir):
            return True
        job = held.read(self._dir)
        if run.exit_code == 0 and run.started > (job.at if job else 0.0):  # not an earlier one of this name
            return False
        if job and time.monotonic() - self._asked_at > _ASK_S:
            self._queued = _queued(job)
            self._asked_at = time.monotonic()
        if self._queued is not None:
            return self._queued
        if run.finished is not None or run.host == this_host():
            return False
        return reach.read(self._dir) is not None or record.is_running(self._dir)


def _queued(job: held.Held) -> bool | None:
    try:
        asked = engines.queue(job)
        return not asked.over(job) if isinstance(asked, engines.Ends) else None
    except ConfigError:  # not from here
        return None
