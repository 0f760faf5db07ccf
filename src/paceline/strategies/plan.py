"""What a user has asked for of local steps, as `local` has read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.strategies.averaging import Averaging
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
    quorum: int = 0  # once so many are at a round, the others have `grace_s` to come; 0: all are waited for
    grace_s: float = 10.0

    @property
    def options(self) -> dict[str, Any]:
        """In words, as a user would give them."""
        codec = self.method.words
        codec += f", feedback={self.feedback}" if self.feedback is not None else ""
        codec += f", decay={self.decay}" if self.decay != 1.0 else ""
        words = {name: getattr(self, name).words for name in ("every", "outer", "average", "overlap")}
        return {**words, "codec": codec, "quorum": self.quorum, "grace_s": self.grace_s}
