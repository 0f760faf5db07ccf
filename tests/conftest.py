"""A leftover child process fails the test that left it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

# Where the tests themselves are started in the background, these are ignored, and every launcher would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

_ENGINES = ("launch", "environment")  # whose slow tests start whole runs, some of them one after the other
_BUSY_S = 900.0
_OWN = ("resource_tracker", "forkserver")  # Python's own, which stay for the life of the process


def children() -> dict[int, str]:
    found = {}
    for task in Path("/proc/self/task").glob("*/children"):
        try:
            pids = task.read_text().split()
        except OSError:  # a thread that has ended meanwhile
            continue
        for pid in pids:
            try:
                words = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if state != "Z" and not any(word in words for word in _OWN):
                found[int(pid)] = words
    return found


@pytest.fixture(autouse=True)
def nothing_left_running() -> Iterator[None]:
    before = set(children()) if os.path.exists("/proc/self/task") else set()
    yield
    deadline = time.monotonic() + 3.0
    while (left := {p: w for p, w in children().items() if p not in before}) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left, f"left running: {left}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests of engines time on a busy machine; what they wait for has limits of its own."""
    for item in items:
        if item.path.parent.name in _ENGINES and item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(_BUSY_S))
