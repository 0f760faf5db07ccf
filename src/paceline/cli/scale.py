"""`paceline scale`: let an elastic run have more members, or fewer."""

from __future__ import annotations

from pathlib import Path

from paceline.cli import runs
from paceline.cli.flags import Parser, whole
from paceline.core.errors import ConfigError
from paceline.core.settings import Settings
from paceline.launch import engines, reach
from paceline.membership import agent_line

_LIMIT_S = 10.0
_EPILOG = """\
examples:
  paceline scale big 3         three members from now on, in a run that was started with -n 2:4

More are started at once and join at the end of a step; the most junior leave at the end of one.
"""


def main(argv: list[str]) -> int:
    parser = Parser(
        prog="paceline scale", description="Let an elastic run have more members, or fewer.", epilog=_EPILOG
    )
    parser.option("--root", parse=str, metavar="DIR", default=Settings().root, help="where runs live (runs)")
    parser.add_argument("run", type=runs.named, metavar="RUN", help="its name or directory")
    parser.add_argument("size", metavar="SIZE", help="how many members, within the MIN:MAX that it was started with")
    _, rest = parser.split(argv)
    parser.split(rest[2:])  # an unknown option after RUN and SIZE gets the nearest name too
    given = parser.parse_args(argv)
    job = runs.waiting(Path(given.root), given.run)
    asked = engines.queue(job) if job else None
    if job and isinstance(asked, engines.Remote):
        print(asked.inside(job, Path(given.run).name, ("scale", str(whole(1)(given.size)))).rstrip())
        return 0
    known = runs.find(Path(given.root), given.run)
    size = whole(1)(given.size)
    where = _reach(known)
    print(agent_line.scale(where.address, where.token, size, limit_s=_LIMIT_S))
    return 0


def _reach(known: runs.Known) -> reach.Reach:
    name, run = known.directory.name, known.run
    if run is None or not run.least:
        raise ConfigError(
            f"run {name!r} has a fixed number of members: start it with -n MIN:MAX, without servers and not by mpirun "
            "or torchrun, to scale it"
        )
    where = reach.read(known.directory)
    if where is None or runs.launcher_gone(known):  # it leaves scheduler.json behind where it was killed
        raise ConfigError(f"run {name!r} is not running: {runs.why_over(known)}")
    return where
