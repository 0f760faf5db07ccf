"""The most memory that a member has held within a stage. What is shared counts once, for ours and for peers alike.

Resident pages will not do: they count a shared page in every process that has mapped it.

`Charged` has the kernel count, where this process is root and control groups of version 1 divide the memory: each
member is put into a group of its own, inside the group of this process. A page is charged to the group that touches it
first, so to the member that has made it, whoever else reads it, and the kernel keeps the high-water mark: no short peak
is missed. It charges page tables too, and pages of files that are read for the first time; `files` tells how many.

`Sampled` is for all other machines: private memory, and of what is shared by two a half for each, read as often as
`overhead.Peak` does. Peaks between two looks are missed.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Protocol

from bench.overhead import Peak, pss

_GROUPS = Path("/sys/fs/cgroup/memory")


class Mark(Protocol):
    """Of one member; all in bytes."""

    def now(self) -> int: ...

    def restart(self) -> None:
        """A stage begins."""

    def peak(self) -> int:
        """The most since then."""

    def files(self) -> int:
        """Pages of files that are counted now."""

    def close(self) -> None:
        """After the member has ended."""


class Charged:
    counted = "charged to the member's control group, the kernel's high-water mark"

    def __init__(self, pid: int) -> None:
        lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
        own = next((path for _, controllers, path in lines if controllers == "memory"), "/none")
        self._group = _GROUPS / own.lstrip("/") / f"bench-memory-{pid}"
        self._group.mkdir()
        try:
            (self._group / "cgroup.procs").write_text(str(pid))
        except BaseException:
            self.close()
            raise

    def now(self) -> int:
        return int((self._group / "memory.usage_in_bytes").read_text())

    def restart(self) -> None:
        (self._group / "memory.max_usage_in_bytes").write_text("0")

    def peak(self) -> int:
        return int((self._group / "memory.max_usage_in_bytes").read_text())

    def files(self) -> int:
        found = dict(line.split() for line in (self._group / "memory.stat").read_text().splitlines())
        return int(found["cache"]) - int(found["shmem"])

    def close(self) -> None:
        self._group.rmdir()


class Sampled:
    counted = "proportional set size, looked at every 10 ms at best: short peaks are missed"

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._peak: Peak | None = None

    def now(self) -> int:
        return pss(self._pid, _MEMORY)

    def restart(self) -> None:
        self.close()
        self._peak = Peak([self._pid], _MEMORY).__enter__()

    def peak(self) -> int:
        assert self._peak is not None
        return max(self._peak.bytes, self.now())

    def files(self) -> int:
        return 0

    def close(self) -> None:
        if self._peak is not None:
            self._peak.__exit__()


_MEMORY = ("Pss_Anon:", "Pss_Shmem:")


def best() -> type[Charged | Sampled]:
    """What this machine allows."""
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            mark = Charged(process.pid)
        except OSError:
            return Sampled
        finally:
            process.kill()
            process.wait()
    mark.close()
    return Charged
