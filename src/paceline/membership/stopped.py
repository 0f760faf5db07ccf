"""Members whose process somebody has stopped (SIGSTOP, a debugger), and who of them has been so for too long.

The evidence is the state of the process as the kernel tells it: one that computes for long, sleeps, or keeps the
interpreter to itself is not stopped, and is never suspected.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Protocol, TypeVar

_LOOK_S = 0.25
_STALLED = 0.5  # of a silence without a look: it was we who slept
_LEAST_S = 0.5  # without a look, that count as having slept


class Stoppable(Protocol):
    """A process; see `process.Process`."""

    pid: int

    @property
    def paused(self) -> bool: ...


P = TypeVar("P", bound=Stoppable)


class Stopped:
    """Those of one agent.

    Args:
        silence_s: after which one that is stopped is lost.
        counts: whether the run can go on without it now; asked only while one is stopped.
        ranks: of those who are looked at.
    """

    def __init__(
        self, silence_s: float, counts: Callable[[], bool] = lambda: True, *, ranks: Collection[int] = ()
    ) -> None:
        self.silence_s = silence_s
        self.ranks = ranks
        self._counts = counts
        self._since: dict[int, float] = {}  # by process number
        self._looked_at = 0.0

    def too_long(self, processes: Iterable[P], now: float) -> list[P]:
        """Look at them; those who have been stopped for longer than the silence."""
        ago = now - self._looked_at
        if ago < min(_LOOK_S, self.silence_s / 4):
            return []
        self._looked_at = now
        stopped = [process for process in processes if process.paused]
        slept = ago > max(_STALLED * self.silence_s, _LEAST_S)
        known = {} if slept or (stopped and not self._counts()) else self._since
        self._since = {process.pid: known.get(process.pid, now) for process in stopped}
        return [process for process in stopped if now - self._since[process.pid] >= self.silence_s]
