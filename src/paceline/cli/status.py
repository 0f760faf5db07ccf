"""`paceline status`: a line per member that says what it does or waits for, and since when.

It reads files only, so that it works on members that hang, are stopped or were killed; see `runs`.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

from paceline.cli import runs
from paceline.cli.flags import Parser
from paceline.cli.runs import Known, how_it_stands, span
from paceline.core.errors import ConfigError
from paceline.core.settings import Settings
from paceline.core.status import Doing

_WAITS = re.compile(r"\bwaiting\b")
_WAITS_FOR = re.compile(r"waiting for members? (\d+(?:(?:, | and )\d+)*)")


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
        print("\n".join(_list(runs.all_in(root))))
    else:
        print("\n".join(_table(runs.find(root, given.run))))
    return 0


def describe(directory: Path) -> list[str]:
    """The lines for one run."""
    known = runs.look(directory)
    if known is None:
        raise ConfigError(f"{directory} holds no run: it has neither a run.json that can be read nor a status/")
    return _table(known)


def _list(found: list[Known]) -> list[str]:
    width = max(len(known.directory.name) for known in found)
    return [f"{known.directory.name:{width}}  {_members(known.size):>10}  {how_it_stands(known)}" for known in found]


def _table(known: Known) -> list[str]:
    waited_for = _waited_for(known.said, known.states)
    rows = [("rank", "state", "process", "epoch", "step", "doing")]
    for rank, (doing, state) in enumerate(zip(known.said, known.states)):
        counts = (str(doing.epoch + 1), str(doing.step)) if doing else ("-", "-")  # epochs from 1, as in progress
        what = _what(doing, state)
        if rank in waited_for:
            what += "  <- the others wait for this one"
        rows.append((str(rank), state, str(known.pid(rank) or "-"), *counts, what))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    table = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) + "  " + row[5] for row in rows]
    return [f"{known.directory}: {how_it_stands(known)}, {_members(known.size)}", *table]


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


def _what(doing: Doing | None, state: str) -> str:
    if doing is None:
        return "nothing heard of it" if state == "gone" else "starting: has not joined"
    if state == "gone":
        return f"last: {doing.what}, {span(time.time() - doing.since)} ago"
    return f"{doing.what}, for {span(time.time() - doing.since)}"


def _members(size: int) -> str:
    return "1 member" if size == 1 else f"{size} members"
