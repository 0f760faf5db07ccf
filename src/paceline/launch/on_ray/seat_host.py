"""The actor of a host whose members stay: it starts `launch.far` for each, and passes on what comes of it.

What members print goes to the actor's own output too, where `ray logs` finds it. They end with the actor: it has their
input, whose end they notice.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from typing import IO, Any

from paceline.launch import probe
from paceline.launch.on_ray.relay import CODE, ERR, OUT
from paceline.launch.seats import FAR
from paceline.membership.lines import clean

_CHUNK = 1 << 16
_MANY = 256  # chunks that wait for the launcher; then members wait in turn, as for any pipe


class SeatHost:
    """See `actors.HostAgent`, whose place it takes.

    Args:
        cwd: of the members; "": the copy of the working directory that Ray brought here.
    """

    def __init__(self, name: str, slots: int, labels: tuple[str, ...] = (), *, cwd: str = "") -> None:
        self._cwd = cwd or os.getcwd()
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._told: list[tuple[int, bytes, bytes]] = []
        self._more = threading.Condition()

    def facts(self, ask: dict[str, Any]) -> dict[str, Any]:
        """What this host has; see `launch.probe`."""
        return probe.facts(ask)

    def exists(self, path: str) -> bool:
        return os.path.exists(os.path.join(self._cwd, path))

    def start(self, number: int, errand: bytes) -> None:
        """A member; what it is to do is an errand (`launch.seats`)."""
        pipe = subprocess.PIPE
        try:
            process = subprocess.Popen(
                [sys.executable, *FAR], stdin=pipe, stdout=pipe, stderr=pipe, cwd=self._cwd, start_new_session=True
            )
        except OSError as error:
            self._tell(number, ERR, f"paceline: cannot be started here: {error}\n".encode())
            self._tell(number, CODE, b"1")
            return
        assert process.stdin
        self._running[number] = process
        with contextlib.suppress(OSError):  # it has ended already
            process.stdin.write(errand)
            process.stdin.flush()
        threading.Thread(target=self._watch, args=(number, process), daemon=True).start()

    def end(self, number: int) -> None:
        """Ask it to end; it has some seconds for that."""
        process = self._running.get(number)
        if process and process.stdin:
            with contextlib.suppress(OSError):
                process.stdin.close()

    def read(self, limit_s: float) -> list[tuple[int, bytes, bytes]]:
        """What came since, waiting for some: a member's number, what it is, and its bytes."""
        with self._more:
            self._more.wait_for(lambda: self._told, limit_s)
            told, self._told = self._told, []
            self._more.notify_all()
            return told

    def _watch(self, number: int, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout
        assert process.stderr
        errors = threading.Thread(target=self._pass_on, args=(number, ERR, process.stderr), daemon=True)
        errors.start()
        self._pass_on(number, OUT, process.stdout)
        errors.join()
        code = process.wait()
        self._running.pop(number, None)
        self._tell(number, CODE, str(code if code >= 0 else 128 - code).encode())

    def _pass_on(self, number: int, kind: bytes, stream: IO[bytes]) -> None:
        while data := os.read(stream.fileno(), _CHUNK):
            with contextlib.suppress(OSError, ValueError):
                text = data.decode(errors="replace")
                print("\n".join(clean(line, colours=False) for line in text.split("\n")), end="", flush=True)
            self._tell(number, kind, data)

    def _tell(self, number: int, kind: bytes, data: bytes) -> None:
        with self._more:
            self._more.wait_for(lambda: len(self._told) < _MANY)
            self._told.append((number, kind, data))
            self._more.notify_all()
