"""The processes of a run as the kernel sees them: who is who, alive or not, and signals that cannot hit a stranger."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path

from paceline.core import status

_MODULES = {
    "scheduler": [b"paceline.membership.scheduler"],
    "agent": [b"paceline", b"agent"],
    "server": [b"paceline.server"],
}


@dataclass(frozen=True)
class Process:
    """A process by number and time of start: a number alone may be given to another one."""

    pid: int
    started: int  # clock ticks since the machine started
    member: bool = field(default=False, compare=False)  # it leads a group of all that it has started

    @classmethod
    def of(cls, pid: int, *, member: bool = False) -> Process | None:
        stat = _stat(pid)
        return cls(pid, int(stat[19]), member) if stat and stat[0] not in "ZX" else None

    @property
    def alive(self) -> bool:
        """A stopped one is; one that has ended and is not yet waited for is not."""
        return Process.of(self.pid) == self

    def signal(self, number: int) -> bool:
        """Send a signal, to a member's children too; whether it was still there."""
        if not self.alive:
            return False
        with contextlib.suppress(ProcessLookupError):
            if self.member and os.getpgid(self.pid) == self.pid:
                os.killpg(self.pid, number)
            else:
                os.kill(self.pid, number)
            return True
        return False


class Members:
    """How far the members of a run have come, by their number, from the status files in its directory."""

    def __init__(self, directory: Path) -> None:
        self._dir = directory / "status"
        self._seen: dict[int, Process] = {}  # who wrote last
        self.steps: dict[int, int] = {}  # done, by member
        self.doing: dict[int, str] = {}

    def look(self) -> None:
        """Read what has changed. Files of the dead are left alone: one killed while writing would hold us up."""
        try:
            entries = list(os.scandir(self._dir))
        except OSError:
            return
        for entry in entries:
            number = entry.name.removeprefix("rank-")
            if not number.isdecimal():
                continue
            member, path = int(number), Path(entry.path)
            pid, before = _pid(path), self._seen.get(member)
            if not pid or (before and before.pid == pid and not before.alive):
                continue
            doing = status.read(path, member)
            if doing is None:
                continue
            self.steps[member], self.doing[member] = doing.step, doing.what
            if before is None or before.pid != doing.pid:
                process = Process.of(doing.pid, member=True)
                if process:
                    self._seen[member] = process

    def process(self, member: int) -> Process | None:
        """Of a member that lives."""
        process = self._seen.get(member)
        return process if process and process.alive else None

    @property
    def alive(self) -> list[int]:
        return sorted(member for member in self._seen if self.process(member))

    @property
    def front(self) -> int:
        """Steps that the foremost has done."""
        return max(self.steps.values(), default=0)

    @property
    def first(self) -> int | None:
        """Who has rank 0: the longest in the run, since those who come later come last."""
        started = [(process.started, m) for m in self._seen if (process := self.process(m))]
        return min(started)[1] if started else None


def find(kind: str, token: str) -> list[Process]:
    """A run's "scheduler", "agent" or "server" processes, servers by rank, others by age.

    They are known by the module they run, and by the run's token in their environment or by being descendants of this
    process.
    """
    mark = f"PACELINE_TOKEN={token}".encode()
    found: list[tuple[int, int, Process]] = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError):
            words = Path(entry.path, "cmdline").read_bytes().split(b"\0")
            after = words[words.index(b"-m") + 1 :] if b"-m" in words else []
            if after[: len(_MODULES[kind])] != _MODULES[kind]:
                continue
            variables = Path(entry.path, "environ").read_bytes().split(b"\0")
            process = Process.of(int(entry.name))
            if process and ((token and mark in variables) or _descends(process.pid)):
                ranks = [v.partition(b"=")[2] for v in variables if v.startswith(b"PACELINE_RANK=")]
                found.append((int(ranks[0]) if ranks and ranks[0].isdigit() else 0, process.started, process))
    found.sort(key=lambda each: each[:2])
    return [process for *_, process in found]


def _descends(pid: int) -> bool:
    for _ in range(100):
        stat = _stat(pid)
        if not stat or pid <= 1:
            return False
        pid = int(stat[1])
        if pid == os.getpid():
            return True
    return False


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _pid(path: Path) -> int:
    """Who writes a status file: its second number of eight bytes."""
    try:
        with path.open("rb", buffering=0) as file:
            return int.from_bytes(file.read(16)[8:], "little")
    except OSError:
        return 0
