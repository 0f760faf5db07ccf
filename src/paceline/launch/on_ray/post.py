"""An agent on Ray as the launcher sees it: in the words of a process (`subprocess.Popen`), which `posts` keeps."""

from __future__ import annotations

import contextlib
import queue
import signal
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

_READ_S = 1.0
_LOST = -int(signal.SIGKILL)


class Post:
    """Reads from one actor, on a thread of its own, until it ends or is lost."""

    def __init__(self, actor: Any, node: str, where: bytes) -> None:
        self.actor, self.node = actor, node
        self.returncode: int | None = None
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._drained = False
        threading.Thread(target=self._read, args=(where,), name="paceline-post", daemon=True).start()

    @property
    def stdin(self) -> Post:
        return self

    @property
    def stdout(self) -> Iterator[bytes]:
        while (line := self._lines.get()) is not None:
            yield line

    def close(self) -> None:
        """The end of its input: it drains."""
        if not self._drained and self.returncode is None:
            self._drained = True
            with contextlib.suppress(Exception):  # it is gone, whatever Ray calls that
                self.actor.drain.remote()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired("the agent's actor", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        import ray

        with contextlib.suppress(Exception):  # it is gone, whatever Ray calls that
            ray.kill(self.actor)
        self._end(_LOST)

    def _read(self, where: bytes) -> None:
        import ray

        code: int | None = None
        try:
            ray.get(self.actor.begin.remote(where))
            while code is None:
                lines, code = ray.get(self.actor.read.remote(_READ_S))
                for line in lines:
                    self._lines.put(line.encode())
        except Exception as error:  # of many kinds, and one of them when we are shut down
            if self.returncode is None:
                self._lines.put(f"paceline: Ray has lost it: {first_line(error)}".encode())
            code = _LOST
        self._end(code)
        with contextlib.suppress(Exception):
            ray.kill(self.actor)

    def _end(self, code: int) -> None:
        self.returncode = code if self.returncode is None else self.returncode
        self._ended.set()
        self._lines.put(None)


def first_line(error: BaseException) -> str:
    """What Ray says, without its pages: of an error in an actor the last line, which names it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[-1] if "ray::" in str(error) else lines[0]
