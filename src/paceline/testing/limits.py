"""Little memory and a share of a core for a program and all that it starts, by control groups of either version.

    with Limits(memory_bytes=400_000_000, cores=0.25) as limits:
        subprocess.run([*limits.words, sys.executable, "train.py"])
        assert limits.killed == 0

What counts as memory is what the kernel counts: what the program holds, its share of the kernel, and the file pages
that it was the first to read. These last are given up before anything is killed; nothing is swapped out. Where more is
needed, the kernel kills the largest process of the group, and `killed` tells of it.

Groups are made beside or below our own, so limits that hold for us hold for them. Needs root, as a rule.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from paceline.core.errors import ConfigError
from paceline.testing.hosts import owner

_OURS = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")
_CONTROLLERS = ("memory", "cpu")
_NAME = re.compile(r"(pace(\d+)x\d+)l\d+")
_PERIOD_US = 100_000
_numbers = itertools.count()


class Limits:
    """At most `memory_bytes` at a time, and `cores` seconds of computing in each second."""

    def __init__(self, *, memory_bytes: int, cores: float) -> None:
        if memory_bytes < 1 or cores < 0.01:
            raise ConfigError(f"memory_bytes={memory_bytes}, cores={cores:g}: give at least a byte and 0.01 cores")
        self._memory_bytes, self._cores = memory_bytes, cores
        self._name = f"{owner(os.getpid())}l{next(_numbers)}"
        self._groups: dict[str, Path] = {}  # by controller; of version 2 both are one

    @staticmethod
    def missing() -> str:
        """Why nothing can be limited on this machine; "" where it can."""
        try:
            with Limits(memory_bytes=1 << 26, cores=0.1):  # there may be files for it, and no leave to write them
                return ""
        except (ConfigError, OSError) as error:
            return f"nothing can be limited here, which takes control groups and root as a rule: {error}"

    @property
    def words(self) -> list[str]:
        """What goes before a program's words: it is in the group before it begins."""
        enter = "".join(f"echo $$ > '{group}/cgroup.procs' && " for group in self._distinct())
        return ["sh", "-c", f'{enter}exec "$@"', "sh"]

    @property
    def killed(self) -> int:
        """Processes that the kernel has killed because the limit was reached."""
        memory = self._groups["memory"]
        events = memory / "memory.events"
        told = (events if events.exists() else memory / "memory.oom_control").read_text()
        return int(dict(line.split() for line in told.splitlines())["oom_kill"])

    def __enter__(self) -> Limits:
        where = _where(_OURS, _ROOT)
        for place in where.values():
            _clean(place)
        self._groups = {controller: place / self._name for controller, place in where.items()}
        try:
            for group in self._distinct():
                group.mkdir()
            for file, value in _settings(self._groups, self._memory_bytes, self._cores):
                file.write_text(value)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill what still runs in the group, and remove it."""
        for group in self._distinct():
            _remove(group)

    def _distinct(self) -> Iterator[Path]:
        return iter(dict.fromkeys(self._groups.values()))


def _where(ours: Path, root: Path) -> dict[str, Path]:
    """The groups in which ours can be made, by controller."""
    own: dict[str, str] = {}
    for line in ours.read_text().splitlines() if ours.exists() else ():
        _, controllers, path = line.split(":", 2)
        own |= dict.fromkeys(controllers.split(","), path)
    if all(controller in own for controller in _CONTROLLERS):
        places = {c: [p for p in _upwards(root / c, own[c]) if (p / "cgroup.procs").exists()] for c in _CONTROLLERS}
        if all(places.values()):
            return {controller: found[0] for controller, found in places.items()}
    for place in _upwards(root, own.get("", "/")):  # a group that has processes cannot have limited groups below it
        handed = place / "cgroup.subtree_control"
        if handed.exists() and set(_CONTROLLERS) <= set(handed.read_text().split()):
            return dict.fromkeys(_CONTROLLERS, place)
    raise ConfigError(f"no control groups for memory and cpu in {root}")


def _upwards(root: Path, path: str) -> list[Path]:
    group = root / path.lstrip("/")
    return [group, *(p for p in group.parents if p.is_relative_to(root))]


def _settings(groups: dict[str, Path], memory_bytes: int, cores: float) -> Iterator[tuple[Path, str]]:
    """Which file gets what; swap goes last, since it may not be below memory."""
    memory, cpu, quota_us = groups["memory"], groups["cpu"], int(cores * _PERIOD_US)
    if memory == cpu:
        yield cpu / "cpu.max", f"{quota_us} {_PERIOD_US}"
        yield memory / "memory.max", str(memory_bytes)
        swap, most = memory / "memory.swap.max", 0
    else:
        yield cpu / "cpu.cfs_period_us", str(_PERIOD_US)
        yield cpu / "cpu.cfs_quota_us", str(quota_us)
        yield memory / "memory.limit_in_bytes", str(memory_bytes)
        swap, most = memory / "memory.memsw.limit_in_bytes", memory_bytes
    if swap.exists():  # else the kernel does not count it
        yield swap, str(most)


def _clean(place: Path) -> None:
    """Remove what owners that were killed outright have left."""
    for group in place.iterdir():
        match = _NAME.fullmatch(group.name)
        if match and owner(int(match[2])) != match[1]:
            _remove(group)


def _remove(group: Path) -> None:
    """Again until nothing is left, since some of it may be starting more, and the dead stay for a moment."""
    for _ in range(500):
        with contextlib.suppress(FileNotFoundError):
            for pid in (group / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        try:
            group.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.01)
        else:
            return
