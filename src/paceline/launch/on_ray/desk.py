"""The way to members on Ray that stay: one process here for each (`relay`), and an actor on each host that starts them.

A relay says at the desk which member it stands for. From then on what the member prints and how it ends goes to the
relay, and the relay's end, however it comes, is the member's. So all that the launcher knows about members that stay
(`launch.local`: servers that resume, workers that are replaced) holds here too.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, Listener
from typing import Any

from paceline.launch.on_ray import relay
from paceline.launch.on_ray.post import first_line

_READ_S = 1.0
_LOST = b"137"  # killed, as a shell counts
_WAITING = 1024  # relays that may come at once: one for each member


class Desk:
    """A `spec.Road`; `open` it before anything is started.

    Args:
        actors: by host, of `seat_host.SeatHost`.
    """

    def __init__(self) -> None:
        self._folder = ""
        self._listener: Listener | None = None
        self._actors: Mapping[str, Any] = {}
        self._relays: dict[int, tuple[str, Connection]] = {}  # by number, with its host
        self._lost: dict[str, str] = {}  # hosts, and why
        self._lock = threading.Lock()
        self._numbers = itertools.count()

    def open(self, actors: Mapping[str, Any]) -> None:
        self._actors = actors
        self._folder = tempfile.mkdtemp(prefix="paceline-")  # which only this user can enter
        self._listener = Listener(f"{self._folder}/desk", "AF_UNIX", backlog=_WAITING)
        threading.Thread(target=self._accept, name="paceline-desk", daemon=True).start()
        for host in actors:
            threading.Thread(target=self._read, args=(host,), name="paceline-seats", daemon=True).start()

    def python_on(self, host: str, arguments: Sequence[str]) -> tuple[list[str], bytes]:
        """What stands here for Python there; its actor knows the arguments, which are always `seats.FAR`."""
        return [sys.executable, "-I", "-S", relay.__file__, f"{self._folder}/desk", host], b""

    def close(self) -> None:
        if self._listener:
            with contextlib.suppress(OSError):
                self._listener.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _accept(self) -> None:
        assert self._listener
        while True:
            try:
                connection = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(connection,), name="paceline-relay", daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        """One relay, from its errand to its end."""
        number = next(self._numbers)
        ended = False
        try:
            host, _, errand = connection.recv_bytes().partition(b"\n")
            name = host.decode()
            with self._lock:
                self._relays[number] = (name, connection)
            if why := self._lost.get(name):
                self._lose(name, why)
            else:
                self._actors[name].start.remote(number, errand)
            while True:
                connection.recv_bytes()  # relay.END, whatever it is
                ended = True
                self._actors[name].end.remote(number)
        except (EOFError, OSError):  # it has its member's code, or was killed
            with self._lock:
                known = self._relays.pop(number, None)
            if known and not ended:
                self._actors[known[0]].end.remote(number)

    def _read(self, host: str) -> None:
        """What the members of a host print, until it is lost."""
        import ray

        try:
            while True:
                for number, kind, data in ray.get(self._actors[host].read.remote(_READ_S)):
                    self._tell(number, kind + data)
        except Exception as error:  # of many kinds, and one of them when we are shut down
            with contextlib.suppress(Exception):  # it is gone, whatever Ray calls that; else its members must go too
                ray.kill(self._actors[host])
            self._lose(host, first_line(error))

    def _lose(self, host: str, why: str) -> None:
        with self._lock:
            self._lost[host] = why
            numbers = [number for number, (its, _) in self._relays.items() if its == host]
        for number in numbers:
            self._tell(number, relay.ERR + f"paceline: Ray has lost host {host}: {why}\n".encode())
            self._tell(number, relay.CODE + _LOST)

    def _tell(self, number: int, data: bytes) -> None:
        with self._lock:
            found = self._relays.get(number)
            if data[:1] == relay.CODE:
                self._relays.pop(number, None)
        if found:
            with contextlib.suppress(OSError):  # it is gone
                found[1].send_bytes(data)
