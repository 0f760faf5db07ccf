"""What became of a worker's pushes: how many, how old, and why some were dropped."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.server.client import Table


class Pushes:
    """Counts the pushes of one table.

    >>> pushes = Pushes()
    >>> pushes.add(age=3, reason="it is 3 versions old")
    >>> pushes.add(age=1)
    >>> pushes.count, pushes.ages, pushes.oldest, dict(pushes.dropped)
    (2, 4, 3, {'it is n versions old': 1})
    """

    def __init__(self) -> None:
        self.count = 0
        self.ages = 0  # their sum
        self.oldest = 0
        self.dropped: Counter[str] = Counter()  # by the reason, without its numbers: so they are few

    def add(self, *, age: int, reason: str = "") -> None:
        """A push is over; `reason`: why it was dropped."""
        self.count += 1
        self.ages += age
        self.oldest = max(self.oldest, age)
        if reason:
            self.dropped[re.sub(r"\d+", "n", reason)] += 1


def readings_of(tables: Sequence[Table], codec: str, sent_bytes: int) -> dict[str, Any]:
    """What the summary tells of a worker's tables, as plain numbers and words; see `paceline.train.summary`."""
    all_pushes = [table.pushes for table in tables]
    dropped = sum((pushes.dropped for pushes in all_pushes), Counter[str]())
    told: dict[str, Any] = {
        "pushes": sum(pushes.count for pushes in all_pushes),
        "pushed_bytes": sent_bytes,
        "dropped_pushes": dropped.total(),
        "drop_reasons": dict(dropped),
        "ages": sum(pushes.ages for pushes in all_pushes),
        "oldest": max(pushes.oldest for pushes in all_pushes),
    }
    if packers := [packer for table in tables for packer in table.packers]:
        told["codec"] = codec
        told |= {key: sum(getattr(p, key) for p in packers) for key in ("bytes_before", "bytes_after", "encode_s")}
        told["residual_norm"] = math.hypot(*(float(r.norm()) for p in packers for r in p.residuals.values()))
    return told
