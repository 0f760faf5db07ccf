"""`paceline status`: a line per member that says what it does or waits for, and since when.

It reads files, so that it works on members that hang, are stopped or were killed; see `runs`. Of an elastic run the
scheduler is asked as well: it knows who is in the view, who was lost and how, and who is being started again.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from paceline.cli import queue, runs
from paceline.cli.flags import Parser
from paceline.cli.runs import Known, how_it_stands, span
from paceline.core import lost
from paceline.core.errors import ConfigError, PacelineError
from paceline.core.settings import Settings
from paceline.core.status import Doing
from paceline.launch import engines, held, reach
from paceline.membership import agent_line

_LIMIT_S = 2.0  # for the scheduler's answer
_TAIL_BYTES = 1 << 20  # of the events, which may be long
_WAITS = re.compile(r"\bwaiting\b")
_WAITS_FOR = re.compile(r"waiting for members? (\d+(?:(?:, | and )\d+)*)")


def main(argv: list[str]) -> int:
    parser = Parser(prog="paceline status", description="What each member of a run is doing or waiting for.")
    parser.option("--root", parse=str, metavar="DIR", default=Settings().root, help="where runs live (runs)")
    parser.option("--all", help="list the runs, newest first")
    parser.add_argument(
        "run", nargs="?", type=runs.named, metavar="RUN", help="its name or directory (default: the newest)"
    )
    _, rest = parser.split(argv)
    parser.split(rest[1:])  # an unknown option after RUN gets the nearest name too
    given = parser.parse_args(argv)
    root = Path(given.root)
    if given.all:
        print("\n".join(_list(runs.all_in(root), runs.waiting_in(root))))
    elif given.run and (waiting := runs.waiting(root, given.run)):
        print(
            "\n".join([f"{given.run}: {engines.queue(waiting).state(waiting)}", *_there(waiting, Path(given.run).name)])
        )
    else:
        print("\n".join(_lines(runs.find(root, given.run))))
    return 0


def _there(job: held.Held, run: str) -> list[str]:
    """What the members of a run do that leaves nothing here."""
    asked = engines.queue(job)
    if not isinstance(asked, engines.Remote) or engines.over(job):
        return []
    try:
        return asked.inside(job, run, ("status",)).splitlines()
    except PacelineError as error:  # its pods may not be there yet
        return [f"the members cannot be asked: {error}"]


def _queue(directory: Path) -> list[str]:
    """Of a run that was submitted: what holds it, which it may wait for again."""
    try:
        return [engines.queue(found).state(found)] if (found := held.read(directory)) else []
    except PacelineError as error:
        return [f"the queue cannot be asked: {error}"]


def describe(directory: Path) -> list[str]:
    """The lines for one run."""
    known = runs.look(directory)
    if known is None:
        raise ConfigError(f"{directory} holds no run: it has neither a run.json that can be read nor a status/")
    return _lines(known)


def _lines(known: Known) -> list[str]:
    if known.run and known.run.least:
        came = _elastic(known)
    else:
        came = _lost(known)
    slow = _slow(known.directory / "events" / "rank-0.jsonl")
    return [*_table(known), *queue.lines(known), *came, *slow, *_queue(known.directory)]


def _slow(events: Path) -> list[str]:
    """Who was found to hold the others up lately."""
    try:
        with events.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = [line for line in file.read().splitlines() if b'"straggler"' in line]
    except OSError:
        return []
    found: dict[object, str] = {}  # by member: the last word of each
    for line in lines:
        try:
            event = msgspec.json.decode(line, type=_Straggler)
        except (msgspec.DecodeError, UnicodeDecodeError):  # torn, or of another kind
            continue
        found[event.member] = f"slow: member {event.member} {event.text} (step {event.step}; {event.done})"
    return list(found.values())


class _Straggler(msgspec.Struct, tag_field="kind", tag="straggler"):
    member: int
    text: str
    done: str
    step: int


def _lost(known: Known) -> list[str]:
    return [f"{one}, {span(time.time() - one.at)} ago" for one in lost.read(known.directory)]


def _elastic(known: Known) -> list[str]:
    """The scheduler's picture; where it no longer runs, who was lost on the launcher's host."""
    try:
        where = reach.read(known.directory)
        if where is None or runs.launcher_gone(known):
            return _lost(known)
        picture = agent_line.look(where.address, where.token, limit_s=_LIMIT_S)
    except PacelineError as error:
        return [f"the scheduler cannot be asked: {error}"]
    view = f"view {picture.view.number} of {_members(picture.view.size)}" if picture.view else "no view yet"
    head = (
        f"{view}; {picture.target} wanted, {picture.least} to {picture.most} allowed; scheduler's term {picture.term}"
    )
    rows = [("member", "state", "for", "process", "replaced", "labels", "lost last")]
    labels = {m.id: ",".join(m.labels) for m in picture.view.members} if picture.view else {}
    several = len(picture.hosts) > 1
    for seen in picture.members:
        since, process = span(time.time() - seen.since), str(seen.pid or "-")
        if several and seen.host:
            process += f" on {seen.host}"
        has = labels.get(seen.id) or "-"
        rows.append((str(seen.id), seen.state, since, process, str(seen.replaced), has, seen.why or "-"))
    table = _aligned(rows if any(labels.values()) else [row[:5] + row[6:] for row in rows])
    if len(picture.hosts) < 2:
        return [head, *table, *(f"quarantined: {host}" for host in picture.quarantined)]
    hosts = [f"host {h.name}: {h.state}, {h.running} of {_slots(h.slots)} in use" for h in picture.hosts]
    return [head, *table, *hosts]


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns, of which the last one is as long as it is."""
    widths = [max(map(len, column)) for column in zip(*(row[:-1] for row in rows))]
    return ["  ".join((*(cell.rjust(width) for cell, width in zip(row, widths)), row[-1])) for row in rows]


def _slots(count: int) -> str:
    return "1 slot" if count == 1 else f"{count} slots"


def _list(found: list[Known], waiting: list[tuple[Path, held.Held]]) -> list[str]:
    """Those that began, and those that were submitted and have not, which their queues are asked about."""
    rows = [(k.started, k.directory.name, _members(k.size), how_it_stands(k)) for k in found]
    rows += [(job.at, path.name, "submitted", _queue(path)[0].splitlines()[0]) for path, job in waiting]
    width = max(len(name) for _, name, _, _ in rows)
    rows.sort(key=lambda row: row[0], reverse=True)
    return [f"{name:{width}}  {what:>10}  {stands}" for _, name, what, stands in rows]


def _table(known: Known) -> list[str]:
    waited_for = _waited_for(known.said, known.states)
    if known.run:  # nobody waits for a process that has ended: all notice, and go on, replace it, or end
        waited_for -= {rank for rank, state in enumerate(known.states) if state == "gone"}
    rows = [("rank", "state", "process", "epoch", "step", "labels", "doing")]
    for rank, (doing, state) in enumerate(zip(known.said, known.states)):
        counts = (str(doing.epoch + 1), str(doing.step)) if doing else ("-", "-")  # epochs from 1, as in progress
        what = _what(doing, state)
        if rank in waited_for:
            what += "  <- the others wait for this one"
        has = (doing and doing.labels) or "-"
        rows.append((str(rank), state, str(known.pid(rank) or "-"), *counts, has, what))
    labelled = any(doing and doing.labels for doing in known.said)
    table = _aligned(rows if labelled else [row[:5] + row[6:] for row in rows])
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
