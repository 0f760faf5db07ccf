"""The engines of `paceline run --on NAME`: one module each, imported when it is named.

A module here has a class `Engine`, a frozen dataclass whose fields are its options (`OPTIONS`), each with a default.
What only one engine needs is imported inside its functions: `paceline run --help` must work without it.

An engine starts a run in one of two ways, or in both:

- it starts a launcher here, whose scheduler has agents on other hosts (`spreads`): `prepare` says which hosts there are
  and what leads to them (`Elastic.hosts`, `Elastic.start_on`, `Elastic.listen`), and `start` is `elastic.ElasticJob`'s.
  `paceline status | logs | stop | scale` then ask the run's directory and its scheduler, as for a run on one host;
- it hands the run to somebody else's queue, and returns `Submitted`: what comes later is started from there, and is an
  engine of the first kind there. Its `engine.json` (`held`) says whom to ask until then.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

from paceline.core.errors import ConfigError, nearest
from paceline.launch.held import Held
from paceline.launch.spec import Away, Job, JobSpec
from paceline.membership.process import Show

ENGINES = {
    "local": "on this host",
    "ssh": "on hosts that ssh leads to",
    "ray": "on a Ray cluster",
    "slurm": "in a Slurm job",
    "mpi": "by mpirun",
    "torchrun": "by torchrun",
    "kubernetes": "in pods, by a JobSet or a TrainJob",
}


@dataclass(frozen=True, kw_only=True)
class Option:
    """How one field of an engine is written on the command line."""

    field: str
    metavar: str = ""  # "": a switch
    help: str
    parse: Callable[[str], Any] = str

    @property
    def name(self) -> str:
        return "--" + self.field.replace("_", "-")


@dataclass(frozen=True, kw_only=True)
class Shown:
    """Where what happens is told, in lines."""

    show: Show  # what members print
    say: Callable[[str], None]  # what the launcher has to say
    on_lost: Callable[[int, str], None] = lambda rank, how: None  # one without which the others go on


@dataclass(frozen=True)
class Submitted:
    """A run that somebody else starts later."""

    text: str  # what there is to know now
    directory: Path | None = None  # of the run, with its engine.json; None: it is not held by anybody yet


class Engine(Protocol):
    """Starts runs in one kind of place."""

    OPTIONS: ClassVar[tuple[Option, ...]]
    spreads: ClassVar[bool]  # members are under a scheduler, on other hosts: -n N is then N:N
    elsewhere: ClassVar[bool]  # it looks for GPUs where members will be; else those without a host named run here
    no_hosts: ClassVar[str]  # why --hosts does not go with it, and what does; "": it does, or `prepare` says why not
    stays: ClassVar[str]  # why its members cannot come and go; "": they can

    def prepare(self, spec: JobSpec) -> JobSpec:
        """The run as it is started here; ConfigError for what cannot be. Starts nothing, asks no other host."""

    def preview(self, spec: JobSpec) -> str:
        """Exactly what would be started (`--dry-run`), of a spec that was prepared; secrets are left out."""

    def check(self, spec: JobSpec) -> None:
        """ConfigError where it could not start: what is missing, with the pip or apt line that brings it."""

    def start(self, spec: JobSpec, shown: Shown) -> Job | Submitted:
        """Start it and return at once."""


@runtime_checkable
class Queue(Protocol):
    """What an engine that submits has besides."""

    def state(self, held: Held) -> str:
        """How a run that was submitted stands, in half a line."""

    def stop(self, held: Held) -> str:
        """Take it back, or end it; what was done."""


@runtime_checkable
class Ends(Protocol):
    """A queue that knows whether a job is over."""

    def over(self, held: Held) -> bool:
        """Whether it neither waits nor runs."""


@runtime_checkable
class Remote(Protocol):
    """A queue whose runs leave nothing here: what they print and what they do is asked where they are."""

    def logs(self, held: Held, *, follow: bool, lines: int | None) -> int:
        """Print what the members print; the exit code."""

    def inside(self, held: Held, run: str, words: Sequence[str]) -> str:
        """What `paceline` says there about a run: `words` are a command, and what follows the run's name."""


@runtime_checkable
class Seating(Protocol):
    """What an engine that spreads has besides, if it also starts members that stay (`JobSpec.away`): of runs with
    servers, with a mesh, or with torch's own groups."""

    def seat(self, spec: JobSpec, away: Away) -> JobSpec:
        """As `prepare`, of such a run."""


def load(name: str) -> Callable[..., Engine]:
    """The class of an engine."""
    if name not in ENGINES:
        raise ConfigError(f"--on {name!r} is not an engine: {nearest(name, ENGINES)}")
    made: Callable[..., Engine] = importlib.import_module(f"paceline.launch.engines.{name}").Engine
    return made


def options(name: str) -> tuple[Option, ...]:
    """What `--on NAME` takes besides what all runs take."""
    found: tuple[Option, ...] = load(name).OPTIONS  # type: ignore[attr-defined]
    return found


def make(name: str, values: Mapping[str, Any]) -> Engine:
    """An engine with these of its options."""
    return load(name)(**values)


def owner(option: str) -> str:
    """The engine that has an option of this name; "": none."""
    return next((name for name in ENGINES if option in (o.name for o in options(name))), "")


def over(held: Held) -> bool:
    """Whether a run that was submitted is over, as far as its queue can tell."""
    asked = queue(held)
    return isinstance(asked, Ends) and asked.over(held)


def queue(held: Held) -> Queue:
    """Whom to ask about a run that was submitted."""
    engine = make(held.engine, {})
    if not isinstance(engine, Queue):
        raise ConfigError(f"engine.json names {held.engine!r}, which submits nothing: was it written by hand?")
    return engine
