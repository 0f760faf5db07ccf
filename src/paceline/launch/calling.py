"""`paceline.launch`: a function on several members of this host, from a script or a notebook.

The function goes to the members through a private folder (`parcels`), they run as those of `paceline run` do, under the
same launcher, and what they return comes back the same way.
"""

from __future__ import annotations

import math
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from paceline.core import loading, mesh
from paceline.core.errors import ConfigError, MemberFailed, TimedOut
from paceline.core.lost import was
from paceline.core.settings import Settings
from paceline.environment import detect
from paceline.launch import beforehand, names, parcels, servers
from paceline.launch.called import START, Call, cells
from paceline.launch.elastic import ElasticJob
from paceline.launch.local import Local, LocalJob
from paceline.launch.spec import JobSpec
from paceline.membership.agent import Outcome
from paceline.membership.lines import clean

T = TypeVar("T")

_LOOK_S = 0.1
_END_S = 15.0  # for members that were told to end, and for what they have started
_WORDS = {
    "name": names.run,
    "codec": names.codec,
    "transport": names.transport,
    "device": names.device,
    "progress": names.progress,
    "stragglers": names.stragglers,
}


def launch(
    fn: Callable[..., T],
    /,
    *args: Any,
    workers: int,
    threads: int | None = None,
    limit_s: float = math.inf,
    show: bool = True,
    **settings: Any,
) -> list[T]:
    """Call `fn(*args)` as each of `workers` members of a run on this host; what they return, in the order of ranks.

    The function joins as a script does, by `paceline.join()`. It may be a lambda or a closure, and may be defined in
    `__main__`, a notebook's cell or a module; the members have a copy of it and of what it refers to.

    An error in a member is raised here, as the error that it is, from a `MemberFailed` with the member's rank and
    traceback; a member that is killed is a `MemberFailed`. The others are ended. Ctrl-C ends all, a second one at once.

    Args:
        threads: per member; None: its share of the cores.
        limit_s: for all of it, else `TimedOut`.
        show: print what members print, with their rank in front; it is in the run's logs in any case.
        settings: of the run, as for `join`; these go before what the function gives to `join`.

    >>> launch(divmod, 7, 2, workers=2, root=getfixture("tmp_path").as_posix())
    [(3, 1), (3, 1)]
    """
    spec = _spec(fn, workers, threads, settings, limit_s)
    folder = Path(tempfile.mkdtemp(prefix="paceline-"))  # which only this user can enter
    try:
        start = folder / f"{_name(fn)}.py"
        start.write_text(START.format(path=[p for p in sys.path if isinstance(p, str)], folder=str(folder)))
        _send(folder, Call(fn, args))
        lines = _Lines(show)
        job = Local(lines, say=lines.say).start(spec(script=str(start)))
        return _results(_watched(job, lines, limit_s, folder, workers), job, folder, workers)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _spec(
    fn: Callable[..., Any], workers: int, threads: int | None, given: dict[str, Any], limit_s: float
) -> Callable[..., JobSpec]:
    """The run, but for its script; what is wrong is said before anything is made."""
    place = detect()
    if place.kind == "paceline" or place.size > 1:
        by = {"paceline": "paceline run or paceline.launch"}.get(place.kind, place.kind)
        raise ConfigError(
            f"launch() starts members, and this process is one already: member {place.rank} of {place.size}, started "
            f"by {by}. Here call the function itself; to use launch(), start the script as plain `python script.py`"
        )
    if not callable(fn):
        raise ConfigError(f"launch({fn!r}): give a function, and its arguments behind it: launch(fn, 0.1, workers=4)")
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise ConfigError(f"workers={workers!r}: give a whole number of at least 1")
    if not isinstance(limit_s, int | float) or not limit_s > 0:
        raise ConfigError(f"limit_s={limit_s!r}: give a number of seconds above 0")
    if not isinstance(strategy := given.get("strategy", ""), str):
        from paceline.strategies import words_of

        given = given | {"strategy": words_of(strategy)}
    settings = Settings().with_(**given).pin(*given)
    for field in given.keys() & _WORDS.keys():
        _WORDS[field](given[field])
    names.strategy(settings.strategy)
    names.precision(settings.precision)
    served = servers.served(settings.strategy)
    beforehand.check_fixed(settings)
    cuts = mesh.parse(settings.mesh, workers, f"strategy {settings.strategy}" if served else "")
    beforehand.refuse_zero(settings, cuts)
    beforehand.check_rounds(settings.strategy, workers)
    beforehand.check(settings)
    num_servers, _ = servers.choose(settings.strategy, settings.servers, workers)

    def spec(script: str) -> JobSpec:
        # It does not forgive: a member that is lost has no result.
        return JobSpec(script=script, num_members=workers, num_servers=num_servers, settings=settings, threads=threads)

    spec("")  # checks the rest
    return spec


def _send(folder: Path, call: Call) -> None:
    try:
        parcels.write(folder / "call", call)
    except Exception as error:
        raise ConfigError(
            f"{_name(call.fn)} cannot be sent to the members: {error}. What it refers to is sent along: open files, "
            "locks, sockets and processes cannot be; make them within the function"
        ) from error
    parcels.write(folder / "cells", cells())


def _watched(job: LocalJob | ElasticJob, lines: _Lines, limit_s: float, folder: Path, workers: int) -> Outcome:
    """How the run ended; it does not outlive this call."""
    deadline = time.monotonic() + limit_s
    try:
        while (outcome := job.wait(_LOOK_S)) is None:
            lines.print()
            if time.monotonic() > deadline:
                late = [str(rank) for rank in range(workers) if not (folder / f"result-{rank}").exists()]
                who = f"member {', '.join(late)}" if late else "the run"
                raise TimedOut(f"{who} had not ended within limit_s={limit_s:g}; logs: {job.dir / 'logs'}")
    except BaseException:
        _end(job)
        lines.print()
        raise
    lines.print()
    return outcome


def _end(job: LocalJob | ElasticJob) -> None:
    job.stop(signal.SIGINT)
    try:
        job.wait(_END_S)
    except KeyboardInterrupt:
        job.stop(signal.SIGINT)  # the second time kills
        job.wait(_END_S)


def _results(outcome: Outcome, job: LocalJob | ElasticJob, folder: Path, workers: int) -> list[Any]:
    files = [folder / f"result-{rank}" for rank in range(workers)]
    first = outcome.first_failed
    if first is None or first.followed:  # nobody is to blame but who left
        for ended in outcome.ended[:workers]:
            if ended.code == 0 and not files[ended.rank].exists():
                text = f"member {ended.rank} of {workers} ended without a result: did it call sys.exit()?"
                raise MemberFailed(text, ended.rank)
    if first is None:
        return [_returned(file, rank, workers) for rank, file in enumerate(files)]
    rank, log = first.rank, job.logs()[first.rank]
    who = f"member {rank} of {workers}" if rank < workers else f"server {rank - workers}"
    if not (folder / f"failure-{rank}").exists():
        last = "".join(f"\n  {clean(line, colours=False)}" for line in first.tail)
        said = f"; its last lines:{last}" if last else "; it had printed nothing"
        raise MemberFailed(f"{who} {was(first.how)} after {first.seconds:.1f} s ({log}){said}", rank)
    cause = MemberFailed(f"{who} failed ({log}):\n\n{parcels.about(folder / f'failure-{rank}')}", rank)
    try:
        error = parcels.read(folder / f"failure-{rank}")
    except (Exception, SystemExit):  # it can be made there, and not here
        error = None
    if error is None:  # its text says all
        raise cause
    error.add_note(f"raised by {who}; its traceback is above, its whole output in {log}")
    raise error from cause


def _returned(file: Path, rank: int, workers: int) -> Any:
    kind = parcels.about(file)
    try:
        return parcels.read(file)
    except (Exception, SystemExit) as error:
        at = loading.where(error)
        by = "" if at.startswith(parcels.__file__) else f" ({at})"
        text = (
            f"what member {rank} of {workers} returned, {kind}, cannot be made again here: {type(error).__name__}: "
            f"{error}{by}; return plain values, arrays or tensors"
        )
    raise MemberFailed(text, rank)


def _name(fn: Callable[..., Any]) -> str:
    """What the run is named after."""
    name = getattr(fn, "__name__", type(fn).__name__)
    return re.sub(r"\W+", "", name) or "launch"


class _Lines:
    """What members print, which the thread that waits for them prints in turn: it is the one that a notebook shows."""

    def __init__(self, show: bool) -> None:
        self._show = show
        self._waiting: deque[tuple[str, str]] = deque()

    def line(self, rank: int, stream: str, text: str) -> None:
        if self._show:
            self._waiting.append((stream, f"[{rank}] {clean(text, colours=False)}"))

    def raw(self, data: bytes) -> None:
        raise AssertionError("no member was given a terminal")

    def say(self, text: str) -> None:
        self._waiting.append(("err", f"paceline: {text}"))

    def print(self) -> None:
        while self._waiting:
            stream, text = self._waiting.popleft()
            print(text, file=sys.stderr if stream == "err" else sys.stdout, flush=True)
