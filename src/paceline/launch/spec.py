"""What to start, and the contract of whatever starts it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from paceline.core.errors import ConfigError
from paceline.core.settings import Settings
from paceline.membership.agent import Outcome


@dataclass(frozen=True, kw_only=True)
class Elastic:
    """How many members a run may have, and what is done about those it loses."""

    least: int  # with fewer nobody takes a step
    most: int
    replacements: int = 3  # per member
    silence_s: float = 3.0  # after which one that is not heard of is lost
    standbys: int = 1  # processes that wait to become a member

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ConfigError(
                f"{self.least}:{self.most} members: the first number is the least, at least 1 and not above the second"
            )
        for name in ("replacements", "standbys"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)}: give 0 or more")
        if not self.silence_s > 0:
            raise ConfigError(f"silence_s={self.silence_s:g}: give a time above 0")


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
    env: Mapping[str, str] = field(default_factory=dict)  # besides the launcher's own
    cwd: str | None = None
    python: str = sys.executable
    terminal: bool = False  # give member 0 a terminal to draw on

    def __post_init__(self) -> None:
        if self.num_members < 1:
            raise ConfigError(f"num_members={self.num_members}: a run has at least one member")
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"threads={self.threads}: a member needs at least one thread")
        if self.elastic and not self.elastic.least <= self.num_members <= self.elastic.most:
            raise ConfigError(
                f"num_members={self.num_members} is not within {self.elastic.least}:{self.elastic.most}, which the run "
                "may have"
            )

    @property
    def size(self) -> int:
        """Members and servers, as many as there may be."""
        return self.elastic.most if self.elastic else self.num_members + self.num_servers


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


class Launcher(Protocol):
    """Starts runs somewhere."""

    def start(self, spec: JobSpec) -> Job:
        """Start the members and return at once."""
