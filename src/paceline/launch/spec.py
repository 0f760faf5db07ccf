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
class JobSpec:
    """One run to be started."""

    script: str  # a file, or a module's name
    args: tuple[str, ...] = ()
    module: bool = False
    num_members: int = 1  # that train
    num_servers: int = 0  # processes that hold parameters for them
    settings: Settings = field(default_factory=Settings)
    threads: int | None = None  # per member; None: its share of the cores
    forgives: bool = False  # the run goes on when a worker other than the first is lost
    env: Mapping[str, str] = field(default_factory=dict)  # besides the launcher's own
    cwd: str | None = None
    python: str = sys.executable
    terminal: bool = False  # give member 0 a terminal to draw on

    def __post_init__(self) -> None:
        if self.num_members < 1:
            raise ConfigError(f"num_members={self.num_members}: a run has at least one member")
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"threads={self.threads}: a member needs at least one thread")


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
