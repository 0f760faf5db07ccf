"""What to do when a server process is lost: its part of the parameters is in the last checkpoint, and nowhere else.

All members are started again and resume from that checkpoint: shards, optimizer, loaders and schedules are then of one
step, as sync promises, and every sample counts once. Without a checkpoint the run ends.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple

import msgspec

from paceline.core import status
from paceline.membership.agent import Outcome

_MOST = 3  # times in a run


class Saved(NamedTuple):
    """A checkpoint, as far as the launcher needs to know it."""

    number: int
    step: int
    versions: list[int]  # of the servers' shards


class Resuming:
    """Decides, of one run after another in `directory`, whether another one is to follow."""

    def __init__(self, directory: Path, num_members: int) -> None:
        self._directory = directory
        self._num_members = num_members
        self._times = 0
        self._began = newest(directory / "checkpoints")  # what the run that ends has begun with

    def possible(self) -> bool:
        """Whether another run could follow now, if a server were lost."""
        return self._times < _MOST and newest(self._directory / "checkpoints") is not None

    def after(self, outcome: Outcome) -> str:
        """In words, what was lost and how the run goes on; "": it is over."""
        first = outcome.first_failed
        if first is None or outcome.stopped_by or first.rank < self._num_members or self._times >= _MOST:
            return ""
        saved = newest(self._directory / "checkpoints")
        if saved is None:
            return ""
        number = first.rank - self._num_members
        doing = status.read(self._directory / "status" / f"rank-{first.rank}", first.rank)
        at = doing.step if doing else 0
        # Versions are counted by a server's process: one that has resumed began at 0 with its checkpoint.
        since = saved.versions[number] if saved != self._began and number < len(saved.versions) else 0
        gone = f"versions {since + 1} to {at} of its shard are lost" if at > since else "no version of it is lost"
        self._times += 1
        self._began = saved
        return (
            f"server {number} was lost ({first.how}): {gone}; all members go on from the checkpoint at step "
            f"{saved.step} (time {self._times} of at most {_MOST})"
        )


def newest(checkpoints: Path) -> Saved | None:
    """The checkpoint that was written last. Whether its files are whole is found by who loads it."""
    found = []
    for path in checkpoints.glob("step-*/manifest.json"):
        with contextlib.suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
            found.append(msgspec.json.decode(path.read_bytes(), type=_Manifest))
    if not found:
        return None
    last = max(found, key=lambda manifest: manifest.number)
    return Saved(last.number, last.step, last.meta.versions)


class _Meta(msgspec.Struct):
    versions: list[int] = []


class _Manifest(msgspec.Struct):
    """What is read here of `paceline.checkpoint.manifest`, without torch."""

    number: int
    step: int
    meta: _Meta
