"""The checks of `paceline doctor`, one function each: what was found, and what it means for a run.

An error would stop a run, a warning costs speed or comfort. Each check looks at the real thing (opens a
port, makes a memory file) and none changes anything. Those of torch are in `torch_checks`.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import PacelineError
from paceline.launch.cores import cores, share
from paceline.transport.channel import Listener, connect

_GB = 1e9
_ADAM_BYTES = 20  # per float32 parameter: weight, gradient, its bucket, and Adam's two moments


@dataclass(frozen=True)
class Check:
    """One line of the doctor."""

    name: str
    level: str  # ok, warning, error
    found: str
    means: str = ""


def all_of(root: Path) -> list[Check]:
    """The checks, in the order in which they are shown."""
    return [
        check_cores(),
        check_memory(),
        check_shared_memory(),
        check_files(),
        check_loopback(),
        check_congestion(),
        check_interfaces(),
        check_disk(root),
    ]


def check_cores() -> Check:
    have = cores()
    n = max(2, have.usable) if have.usable < 8 else 2
    threads, _ = share(n, have.usable)
    quota = "" if have.quota is None else f", a quota of {have.quota:g}"
    found = f"{have.affinity} of {os.cpu_count()} to run on{quota}"
    each = f"{threads} thread{'' if threads == 1 else 's'} each"
    if have.usable == 1:
        return Check("cores", "warning", found, f"members take turns; run -n {n} tests a script but gains no speed")
    many = f"; run -n {have.usable} with 1 thread each is the most that computes at once" if have.usable > n else ""
    return Check("cores", "ok", found, f"run -n {n} with {each}{many}")


def check_memory() -> Check:
    free = _meminfo("MemAvailable")
    limit = _memory_left()
    usable = free if limit is None else min(free, limit)
    found = f"{usable / _GB:.1f} GB free of {_meminfo('MemTotal') / _GB:.1f}"
    if limit is not None:
        found += ", bounded by the container"
    parameters = usable / 2 / _ADAM_BYTES
    means = f"on two members, models up to about {parameters / 1e6:,.0f} million float32 parameters with Adam"
    return Check("memory", "warning" if usable < 2 * _GB else "ok", found, means)


def check_shared_memory() -> Check:
    try:
        number = os.memfd_create("paceline-doctor")
        os.ftruncate(number, 1 << 20)
        os.close(number)
    except (AttributeError, OSError) as error:
        means = f"members of one host cannot share memory ({error}) and fall back to sockets, several times slower"
        return Check("shared", "warning", "memfd_create does not work", means)
    return Check("shared", "ok", "memfd_create works", "members of one host share memory; /dev/shm is not needed")


def check_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft} open files"
    if soft < 1024:
        return Check("files", "warning", found, f"may be few for data loaders: `ulimit -n {min(hard, 65536)}`")
    return Check("files", "ok", found)


def check_loopback() -> Check:
    try:
        with (
            contextlib.closing(Listener("127.0.0.1", "doctor")) as listener,
            contextlib.closing(connect(listener.address, "doctor", 5)) as here,
            contextlib.closing(listener.accept(5)) as there,
        ):
            here.send(b"well?")
            there.recv(5)
    except PacelineError as error:
        return Check("loopback", "error", str(error), "members could not meet: bring up lo, allow ports on 127.0.0.1")
    return Check("loopback", "ok", "a port was opened and reached", "members can meet")


def check_congestion() -> Check:
    base = Path("/proc/sys/net/ipv4")
    try:
        used = (base / "tcp_congestion_control").read_text().strip()
        known = (base / "tcp_available_congestion_control").read_text().split()
    except OSError:
        return Check("congestion", "ok", "unknown")
    found = f"{used} (available: {', '.join(known)})"
    if used in ("cubic", "reno"):
        return Check("congestion", "ok", found, "good for bulk between hosts")
    if {"cubic", "reno"} & set(known):
        return Check("congestion", "ok", found, "Paceline's own sockets use cubic or reno all the same")
    return Check("congestion", "warning", found, "bulk between hosts may be slower than with cubic: modprobe tcp_cubic")


def check_interfaces() -> Check:
    shown = []
    for path in sorted(Path("/sys/class/net").glob("*")):
        with contextlib.suppress(OSError, ValueError):
            if path.name == "lo" or (path / "operstate").read_text().strip() == "down":
                continue
            speed = -1
            with contextlib.suppress(OSError, ValueError):
                speed = int((path / "speed").read_text())
            mtu = (path / "mtu").read_text().strip()
            shown.append(f"{path.name} ({f'{speed} Mbit/s, ' if speed > 0 else ''}mtu {mtu})")
    if not shown:
        return Check("network", "ok", "loopback only", "runs on this host need no more")
    return Check("network", "ok", ", ".join(shown))


def check_disk(root: Path) -> Check:
    there = root.absolute()
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    found = f"{free / _GB:.1f} GB free for {root}"
    if not os.access(there, os.W_OK | os.X_OK):
        return Check("disk", "error", f"{there} cannot be written to", "give --root a directory that can")
    if free < 0.1 * _GB:
        return Check("disk", "error", found, "no room for a checkpoint: free some, or give another --root")
    parameters = free / 3 / 12 / 1e6
    means = f"three checkpoints of about {parameters:,.0f} million float32 parameters with Adam"
    return Check("disk", "warning" if free < 2 * _GB else "ok", found, means)


def _meminfo(key: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return 0


def _memory_left() -> int | None:
    """What the container may still use; None where nothing bounds it."""
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):
            base = Path("/sys/fs/cgroup")
            most = int((base / limit).read_text())
            if most < 1 << 60:
                return max(0, most - int((base / used).read_text()))
    return None
