"""A thread or a process that is left behind fails the test."""

from __future__ import annotations

import gc
import multiprocessing
import threading
import time
from collections.abc import Iterator

import pytest


def leftovers() -> list[str]:
    threads = [thread.name for thread in threading.enumerate() if thread.name == "paceline-prefetch"]
    return threads + [str(child) for child in multiprocessing.active_children()]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    limit = time.monotonic() + 5
    while leftovers() and time.monotonic() < limit:
        gc.collect()
        time.sleep(0.02)
    assert not leftovers()
