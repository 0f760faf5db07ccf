"""Workers of a run with servers that were lost on the way, in what all members tell at the end.

Whoever comes to the end knows what those have done who are there. What the lost ones had trained the first server has
counted (`core.trained`), to the last push; where their time went is in their events, to the last tenth of a second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from paceline.core.trained import Trained
from paceline.train.figures import value

_TIMES = ("seconds", "data_s", "compute_s", "wait_s", "sent_bytes")


class _Line(msgspec.Struct):
    kind: Any = None
    time: Any = 0.0
    seconds: Any = 0.0
    data_s: Any = 0.0
    compute_s: Any = 0.0
    wait_s: Any = 0.0
    sent_bytes: Any = 0.0


def with_lost(members: Sequence[Mapping[str, Any]], known: Trained, directory: Path) -> list[dict[str, Any]]:
    """What each member has done, in all of its processes; of those of whom none came to the end, `lost` is true."""
    told = {int(value(member.get("rank") or 0)): dict(member) for member in members}
    for rank, work in known.lost.items():
        times = _times(directory / "events" / f"rank-{rank}.jsonl", known.began, to_the_end=rank not in told)
        member = told.setdefault(rank, {"rank": rank, "lost": True})
        for key, amount in {**times, "samples": work.samples, "pushes": work.pushes}.items():
            member[key] = value(member.get(key) or 0.0) + amount
    return [told[rank] for rank in sorted(told)]


def _times(path: Path, since: float, *, to_the_end: bool) -> dict[str, float]:
    """Sums over the steps since then: all of them, or those before the last start of a process."""
    sums = dict.fromkeys(_TIMES, 0.0)
    earlier = dict(sums)
    decode = msgspec.json.Decoder(_Line).decode
    try:
        with path.open("rb") as file:
            for raw in file:
                try:
                    line = decode(raw)
                except (msgspec.DecodeError, UnicodeDecodeError):  # torn by a kill
                    continue
                if value(line.time) < since:
                    continue
                if line.kind == "start":
                    earlier = dict(sums)
                elif line.kind == "step":
                    sums = {key: total + _amount(getattr(line, key)) for key, total in sums.items()}
    except OSError:
        return earlier
    return sums if to_the_end else earlier


def _amount(x: Any) -> float:
    x = value(x)
    return x if 0.0 <= x < float("inf") else 0.0
