"""What the members of a host do, as metrics of Ray: where its users look for them.

Read from the run's events, a little behind: members know nothing of it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

_LOOK_S = 2.0
_TAIL_BYTES = 1 << 14


class Step(msgspec.Struct):
    """The fields of an event that count here."""

    kind: str = ""
    step: int = 0
    samples: float = 0.0
    scalars: dict[str, Any] | None = None


class Gauges:
    """Those of one agent, on a thread of its own; used as a context.

    Args:
        members: who runs here now.
    """

    def __init__(self, directory: Path, members: Callable[[], Iterable[int]]) -> None:
        self._directory, self._members = directory, members
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-gauges", daemon=True)

    def __enter__(self) -> Gauges:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        self._thread.join(_LOOK_S)

    def _run(self) -> None:
        from ray.util.metrics import Gauge

        keys = ("run", "member")
        step = Gauge("paceline_step", description="Steps that a member has taken.", tag_keys=keys)
        samples = Gauge("paceline_samples", description="Samples of a member's last step.", tag_keys=keys)
        scalar = Gauge("paceline_scalar", description="What run.log was given last.", tag_keys=(*keys, "name"))
        while not self._closed.wait(_LOOK_S):
            for member in list(self._members()):
                last = newest(self._directory / "events" / f"rank-{member}.jsonl")
                if last is None:
                    continue
                tags = {"run": self._directory.name, "member": str(member)}
                step.set(last.step, tags)
                samples.set(last.samples, tags)
                for name, value in (last.scalars or {}).items():
                    if isinstance(value, int | float):
                        scalar.set(value, {**tags, "name": name})


def newest(path: Path) -> Step | None:
    """The last step that a member wrote down; None: there is none near the end of its events."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            if (found := msgspec.json.decode(line, type=Step)).kind == "step":
                return found
    return None
