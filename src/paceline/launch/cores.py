"""How many cores a run may use, and each member's share of them.

What counts is what this process may use: the affinity that a batch system sets, and the quota that a
container has. Threads beyond the share cost more than they give, since members compute at the same time.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Cores:
    """What this process may use."""

    affinity: int  # cores that it may run on
    quota: float | None  # cores' worth of time that its container may use; None: no bound

    @property
    def usable(self) -> int:
        """
        >>> Cores(8, 2.5).usable, Cores(8, None).usable, Cores(8, 0.5).usable
        (2, 8, 1)
        """
        return self.affinity if self.quota is None else max(1, min(self.affinity, math.floor(self.quota)))


def cores() -> Cores:
    return Cores(len(os.sched_getaffinity(0)), _quota(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")))


def share(num_members: int, usable: int) -> tuple[int, str]:
    """Threads per member, and a warning where there are more members than cores, else "".

    >>> share(2, 8)
    (4, '')
    >>> share(4, 2)[0]
    1
    """
    if num_members <= usable:
        return usable // num_members, ""
    return 1, (
        f"{num_members} members share {usable} core{'s' if usable > 1 else ''}: they take turns, so each "
        f"step takes about {num_members / usable:.2g} times as long as with -n {usable}, and no more samples "
        f"are trained per second"
    )


def _quota(membership: Path, root: Path) -> float | None:
    """The smallest quota between the root and this process's control group, of either version."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    quotas = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            quotas += [_read_max(g / "cpu.max") for g in _upwards(root, path)]
        elif "cpu" in controllers.split(","):
            quotas += [_read_cfs(g) for g in _upwards(root / "cpu", path)]
    return min((q for q in quotas if q is not None), default=None)


def _upwards(root: Path, path: str) -> list[Path]:
    group = root / path.lstrip("/")
    return [group, *(p for p in group.parents if p.is_relative_to(root))]


def _read_max(file: Path) -> float | None:
    try:
        quota, period = file.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _read_cfs(group: Path) -> float | None:
    try:
        quota = int((group / "cpu.cfs_quota_us").read_text())
        period = int((group / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return quota / period if quota > 0 else None
