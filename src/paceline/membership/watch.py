"""The processes that one thread of an agent has started: read from, looked at, and none of them left behind.

Between `process`, which is one of them, and those who decide what is started and what an end means: `agent`, whose
members are the same from beginning to end, and `crew`, whose members come and go. The kernel ties the processes to the
thread that starts them, so all calls come from that thread.
"""

from __future__ import annotations

import contextlib
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path

from paceline.core.errors import PacelineError
from paceline.membership import tether
from paceline.membership.process import Process, Show, Start

TICK_S = 0.05  # a dead process is known within this time


class Watch:
    """Starts and watches; at the end of the `with`, whatever is left is killed."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._guard = _Guard()
        self._count = 0
        self.processes: list[Process] = []  # that are not finished

    def start(self, start: Start, show: Show, log: Path | None) -> Process:
        """Start one; PacelineError where the system has no room for it."""
        try:
            process = Process(start, show, log)
        except OSError as error:
            what = f"member {start.rank}" if start.rank >= 0 else start.command[0]
            raise PacelineError(
                f"cannot start {what}: {error}; `paceline doctor` looks at memory and limits"
            ) from error
        self._guard.add(process.pid)
        self.processes.append(process)
        for descriptor in process.streams:
            self._count += 1
            self._selector.register(descriptor, selectors.EVENT_READ, (self._count, process))
        return process

    def turn(self) -> list[Process]:
        """Pass on what was printed, for a moment; those that have just ended."""
        if self._selector.get_map():
            # In the order of registration: what a member printed comes before the trace that it died with.
            for key, _ in sorted(self._selector.select(TICK_S), key=lambda ready: ready[0].data[0]):
                process = key.data[1]
                if not process.pump(key.fd):
                    self._selector.unregister(key.fd)
                    process.close(key.fd)
        else:
            time.sleep(TICK_S)
        ended = []
        for process in list(self.processes):
            if process.poll(self._selector.unregister):
                ended.append(process)
            if process.finished:
                self._guard.discard(process.pid)
                self.processes.remove(process)
        return ended

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.signal(signal.SIGKILL)
        while not all(p.finished for p in self.processes):  # only after an error of our own
            for process in self.processes:
                process.poll(lambda descriptor: None)
            time.sleep(TICK_S)
        self._selector.close()
        self._guard.close()


class _Guard:
    """The process that kills what is left when this one is killed; see `tether`."""

    def __init__(self) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-I", "-S", tether.__file__, "guard"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            bufsize=0,
        )

    def add(self, group: int) -> None:
        self._tell(f"+{group}\n")

    def discard(self, group: int) -> None:
        self._tell(f"-{group}\n")

    def _tell(self, line: str) -> None:
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # someone killed it; the kernel's tie still holds
            self._popen.stdin.write(line.encode())

    def close(self) -> None:
        assert self._popen.stdin is not None
        self._popen.stdin.close()
        try:
            self._popen.wait(5)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
