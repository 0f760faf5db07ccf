"""What to start, and the contract of whatever starts it."""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from paceline.core import labels
from paceline.core.errors import ConfigError
from paceline.core.settings import Settings
from paceline.membership.agent import Outcome

if TYPE_CHECKING:
    from paceline.launch.ground import Ground


class Way(Protocol):
    """What leads to a host, for a launcher that starts an agent there."""

    def command(self, host: str, slots: int, labels: tuple[str, ...]) -> list[str]:
        """What is started here; its standard input goes to the agent."""

    def input(self, host: str, slots: int, labels: tuple[str, ...]) -> bytes:
        """What goes into it before where the run is found (scheduler.json, as one line)."""


@dataclass(frozen=True, kw_only=True)
class Elastic:
    """How many members a run may have, and what is done about those it loses."""

    least: int  # with fewer nobody takes a step
    most: int
    replacements: int = 3  # per member
    silence_s: float = 3.0  # after which one that is not heard of is lost
    standbys: int = 1  # processes that wait to become a member, on each host
    listen: str = ""  # an address of this host on which others reach it; "": members only here
    slots: int | None = (
        None  # for members on this host; None: as many as the run may have, or none if there are `hosts`
    )
    port: int = 0  # that the scheduler listens on; 0: any that is free
    hosts: str = ""  # other hosts (a:4,b:4), a file of them, or a program that prints them
    start_on: str = "ssh {host}"  # what leads to a host; the agent's command is put behind it
    way: Way | None = None  # what leads there instead
    begin: int = 0  # members that there is room for now, with which the run begins; 0: hosts for all are waited for
    ground: Ground | None = None  # who knows the hosts and starts agents there, instead of all that

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ConfigError(
                f"{self.least}:{self.most} members: the first number is the least, at least 1 and not above the second"
            )
        for name in ("replacements", "standbys", "port"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)}: give 0 or more")
        if not self.silence_s > 0:
            raise ConfigError(f"silence_s={self.silence_s:g}: give a time above 0")
        if self.slots is not None and self.slots < 0:
            raise ConfigError(f"slots={self.slots}: give 0 or more")
        if self.own_slots < self.least and not (self.listen or self.hosts or self.ground):
            raise ConfigError(
                f"slots={self.slots}: this host alone cannot have the {self.least} members that are needed at least; "
                "give --listen or --hosts, or more slots"
            )
        if self.listen and _is_everywhere(self.listen):
            raise ConfigError(f"listen={self.listen!r}: name the one address of this host on which the others reach it")
        if "{host}" not in self.start_on:
            raise ConfigError(f"start_on={self.start_on!r}: write where the host's name goes, as in 'ssh {{host}}'")

    @property
    def own_slots(self) -> int:
        """How many members the launcher's host may have."""
        return min(self.most, (0 if self.hosts else self.most) if self.slots is None else self.slots)


class Road(Protocol):
    """What leads to a host, for a launcher that starts each member there itself."""

    def python_on(self, host: str, arguments: Sequence[str]) -> tuple[list[str], bytes]:
        """What is started here so that Python runs there with these arguments, and what goes into its standard input
        first; what follows goes to the program there."""


class Room(NamedTuple):
    """What a host has for members."""

    slots: int = 1
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Away:
    """Other hosts for members that stay: one that is lost is not started elsewhere."""

    hosts: str  # as of `Elastic`
    listen: str = ""
    port: int = 0
    rooms: Mapping[str, Room] = field(default_factory=dict)  # by the host's name
    way: Road | None = None
    on_end: Callable[[], None] = lambda: None  # gives back what the way has taken


@dataclass(frozen=True, kw_only=True)
class Replacing:
    """What is done about lost workers of a run with server processes."""

    least: int = 1  # with fewer left, and none to come, the run ends
    replacements: int = 3  # per worker

    def __post_init__(self) -> None:
        if self.least < 1 or self.replacements < 0:
            raise ConfigError(f"least={self.least}, replacements={self.replacements}: at least 1, and 0 or more")


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """One run to be started."""

    script: str  # a file, or a module's name
    args: tuple[str, ...] = ()
    module: bool = False
    num_members: int = 1  # that train; of an elastic run: at its start
    num_servers: int = 0  # processes that hold parameters for them
    settings: Settings = field(default_factory=Settings)
    threads: int | None = None  # per member; None: its share of the cores
    forgives: bool = False  # the run goes on when a worker other than the first is lost
    elastic: Elastic | None = None  # members may come and go
    away: Away | None = None  # members that stay are on other hosts
    labels: tuple[str, ...] = ()  # of the members on this host; "gpu:0,1": of these alone
    replacing: Replacing | None = None  # with server processes: lost workers are started again
    silence_s: float = 3.0  # with server processes: after which a worker that is stopped is lost
    env: Mapping[str, str] = field(default_factory=dict)  # besides the launcher's own
    cwd: str | None = None
    python: str = sys.executable
    token: str = ""  # of a run that others are told of beforehand; "": one is made
    submission: str = ""  # what an engine repeats when it starts the same command again; "": none does
    detached: bool = False  # the launcher has no terminal, and its end is not that of who started it
    terminal: bool = False  # give member 0 a terminal to draw on

    def __post_init__(self) -> None:
        if self.num_members < 1:
            raise ConfigError(f"num_members={self.num_members}: a run has at least one member")
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"threads={self.threads}: a member needs at least one thread")
        if not self.silence_s > 0:
            raise ConfigError(f"silence_s={self.silence_s:g}: give a time above 0")
        if self.replacing and (self.elastic or not self.num_servers):
            raise ConfigError("replacing: lost workers are replaced where there are server processes, and no scheduler")
        if self.replacing and self.replacing.least > self.num_members:
            raise ConfigError(f"least={self.replacing.least} of {self.num_members} members: give fewer")
        if self.elastic and not self.elastic.least <= self.num_members <= self.elastic.most:
            raise ConfigError(
                f"num_members={self.num_members} is not within {self.elastic.least}:{self.elastic.most}, which the run "
                "may have"
            )
        most = self.elastic.most if self.elastic else self.num_members
        if others := sorted(id for id in labels.members_of(self.labels) if id >= most):
            raise ConfigError(f"labels={self.labels}: there is no member {others[0]}, only 0 to {most - 1}")

    @property
    def size(self) -> int:
        """Members and servers, as many as there may be."""
        return self.elastic.most if self.elastic else self.num_members + self.num_servers


def _is_everywhere(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_unspecified
    except ValueError:
        return False


class Job(Protocol):
    """A run that was started."""

    @property
    def dir(self) -> Path:
        """The run's directory."""

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""

    def wait(self, limit_s: float) -> Outcome | None:
        """How it ended, or None if it has not within the limit."""

    def logs(self) -> dict[int, Path]:
        """Each member's log."""

    def stop(self, number: int) -> None:
        """Ask it to stop, because of signal `number`; a second time, kill it."""

    def resize(self) -> None:
        """Our terminal has another size."""

    @property
    def met(self) -> bool:
        """Whether members have come: a script that never joins is as many plain scripts."""

    @property
    def reason(self) -> str:
        """Why the run could not go on; "": it could."""


class Launcher(Protocol):
    """Starts runs somewhere."""

    def start(self, spec: JobSpec) -> Job:
        """Start the members and return at once."""
