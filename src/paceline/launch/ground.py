"""What the agents and the scheduler of a run stand on, where they are not processes that the launcher starts.

An engine gives one (`Elastic.ground`) if another program starts things for it, and knows which hosts there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from paceline.launch.spec import Room
from paceline.membership.process import Process
from paceline.membership.scheduler import Parameters
from paceline.membership.watch import Watch


class Stream(Protocol):
    """The input of an agent; its end drains it."""

    def close(self) -> None: ...


class Remote(Protocol):
    """An agent there, in the words of `subprocess.Popen`."""

    returncode: int | None

    @property
    def stdin(self) -> Stream | None: ...

    @property
    def stdout(self) -> Iterable[bytes] | None:
        """What it prints, line by line."""

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int:
        """subprocess.TimeoutExpired where it has not ended."""

    def kill(self) -> None: ...


class Keeping(Protocol):
    """See `keeper.Keeper`."""

    gave_up: str

    def turn(self, watch: Watch, ended: list[Process]) -> None: ...
    def end(self, watch: Watch) -> None: ...


class Ground(Protocol):
    """Made before the run is; `close` gives all of it back."""

    def hosts(self) -> Mapping[str, Room]:
        """Those that there are now."""

    def start(self, host: str, room: Room, where: bytes) -> Remote:
        """An agent on one of them, which finds the run at `where` (scheduler.json, as one line)."""

    def keeper(
        self, told: Parameters, token: str, on_started: Callable[[str, int], None], say: Callable[[str], None]
    ) -> Keeping:
        """What keeps the scheduler alive."""

    def close(self) -> None: ...
