"""What a user has asked for of local steps, as `local` has read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.core.errors import ConfigError
from paceline.strategies.averaging import Averaging
from paceline.strategies.hosting import Guests
from paceline.strategies.outer import Outer
from paceline.strategies.reducers import Method
from paceline.strategies.schedule import Every, Overlap


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the user has asked for."""

    every: Every
    outer: Outer
    average: Averaging
    overlap: Overlap
    method: Method
    feedback: bool | None = None
    decay: float = 1.0
    guests: Guests
    quorum: int = 0  # once so many are at a round, the others have `grace_s` to come; 0: all are waited for
    grace_s: float = 10.0

    @property
    def options(self) -> dict[str, Any]:
        """In words, as a user would give them."""
        codec = self.method.words
        codec += f", feedback={self.feedback}" if self.feedback is not None else ""
        codec += f", decay={self.decay}" if self.decay != 1.0 else ""
        words = {name: getattr(self, name).words for name in ("every", "outer", "average", "overlap", "guests")}
        return {**words, "codec": codec, "quorum": self.quorum, "grace_s": self.grace_s}

    def refuse_fixed(self) -> None:
        """Say what of this is for members that come and go only."""
        if self.quorum:
            raise ConfigError(
                f"quorum={self.quorum}: only a run whose members may come and go leaves out who is late: give -n "
                "MIN:MAX, or leave quorum out"
            )

    def refuse_elastic(self, least: int, most: int, *, warmup: int, inner: str) -> None:
        """Say what of this is not for members that come and go, as few and as many as these."""
        if self.quorum and not max(least, 2) <= self.quorum <= most:
            raise ConfigError(
                f"quorum={self.quorum} with -n {least}:{most}: from {max(least, 2)}, since rounds need {least} members "
                f"at least, to {most}"
            )
        if self.guests.most:
            raise ConfigError(
                f"-n MIN:MAX does not go with guests={self.guests.words}: they call the first member, which must stay; "
                "leave guests out, or give one number (-n 4)"
            )
        self.average.check(max(least, 2))
        for what, asked in (
            (f"warmup={warmup}", warmup > 0),
            (f"inner={inner}", inner != "none"),
            (f"overlap={self.overlap.words}", self.overlap.steps > 0),
        ):
            if asked:
                raise ConfigError(
                    f"-n MIN:MAX does not go with {what}: members that come and go do so between whole rounds of steps "
                    f"that each takes alone; leave {what.partition('=')[0]} out, or give one number (-n 4)"
                )
