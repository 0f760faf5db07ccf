"""Bytes per hour: what a metered link may carry. In no hour is more spent, whenever it begins."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from paceline.core.errors import ConfigError
from paceline.core.words import finite

_HOUR_S = 3600.0


class Allowance:
    """Of one guest; the clock goes on while it is not running.

    >>> now = 0.0
    >>> allowance = Allowance(100, clock=lambda: now)
    >>> allowance.spend(70)
    >>> allowance.wait_s(30), allowance.wait_s(31)
    (0.0, 3600.0)
    """

    def __init__(self, bytes_per_hour: float | None, clock: Callable[[], float] = time.time) -> None:
        if bytes_per_hour is not None and (not finite(bytes_per_hour) or bytes_per_hour <= 0):
            raise ConfigError(f"bytes_per_hour={bytes_per_hour!r}: more than 0, such as 20e6, or None")
        self.bytes_per_hour = bytes_per_hour
        self._clock = clock
        self._spent: list[tuple[float, int]] = []  # when, how many bytes
        self.total = 0

    def check(self, nbytes: int) -> None:
        """Refuse an allowance that would never permit so many."""
        if self.bytes_per_hour is not None and nbytes > self.bytes_per_hour:
            raise ConfigError(
                f"bytes_per_hour={self.bytes_per_hour:g}: one call takes up to {nbytes:,}; give at least that, another "
                "codec, or weights='quantize(8)'"
            )

    def spend(self, nbytes: int) -> None:
        self.total += nbytes
        if self.bytes_per_hour is not None and nbytes:
            self._spent.append((self._clock(), nbytes))

    def wait_s(self, nbytes: int) -> float:
        """Seconds until so many may be spent; 0: now."""
        if self.bytes_per_hour is None:
            return 0.0
        now = self._clock()
        # A clock that was put back must not stop the calls for good.
        self._spent = [(min(at, now), n) for at, n in self._spent if at > now - _HOUR_S]
        left = self.bytes_per_hour - sum(n for _, n in self._spent)
        if left >= nbytes:
            return 0.0
        for at, n in self._spent:
            left += n
            if left >= nbytes:
                return at + _HOUR_S - now
        return math.inf

    def state(self) -> dict[str, Any]:
        return {"spent": [list(each) for each in self._spent], "total": self.total}

    def load(self, state: dict[str, Any]) -> None:
        self._spent = [(float(at), int(n)) for at, n in state["spent"]]
        self.total = int(state["total"])
