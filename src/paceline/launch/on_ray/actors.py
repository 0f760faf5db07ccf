"""The actors of a run: plain classes, which the launcher hands to Ray.

An agent's members are processes, as on any other host. They are tied to the actor's process: whatever ends that ends
them, be it Ray, the node's death or the launcher's.
"""

from __future__ import annotations

import collections
import contextlib
import os
import threading
import time
from typing import Any

import msgspec

from paceline.core.errors import PacelineError
from paceline.launch import probe
from paceline.launch.joined import APART, JoinedHost
from paceline.launch.reach import Reach
from paceline.membership.lines import clean
from paceline.membership.scheduler import Parameters, Scheduler

_MANY = 10_000  # lines that wait for the launcher; the oldest go first, they are in the logs


class HostAgent:
    """The agent of one bundle.

    What it and its members print goes to its own output, where `ray logs` finds it, and to whoever calls `read`.

    Args:
        synced: members work in the copy of the working directory that Ray brought here.
    """

    def __init__(self, name: str, slots: int, labels: tuple[str, ...] = (), *, synced: bool = False) -> None:
        self._name, self._slots, self._labels = name, slots, labels
        self._cwd = os.getcwd() if synced else ""
        self._lines: collections.deque[str] = collections.deque(maxlen=_MANY)
        self._more = threading.Condition()
        self._host: JoinedHost | None = None
        self._code: int | None = None
        self._drains = False

    def facts(self, ask: dict[str, Any]) -> dict[str, Any]:
        """What this host has; see `launch.probe`."""
        return probe.facts(ask)

    def exists(self, path: str) -> bool:
        return os.path.exists(os.path.join(self._cwd, path))

    def begin(self, where: bytes) -> None:
        """Join the run, on a thread of its own: the members live no longer than that."""
        found = msgspec.json.decode(where, type=Reach)
        threading.Thread(target=self._work, args=(found,), name="paceline-agent", daemon=True).start()

    def read(self, limit_s: float) -> tuple[list[str], int | None]:
        """What was printed since, waiting for some; and once all was read, the exit code."""
        with self._more:
            self._more.wait_for(lambda: self._lines or self._code is not None, limit_s)
            lines = list(self._lines)
            self._lines.clear()
            return lines, self._code

    def drain(self) -> None:
        """The members finish the step under way and leave."""
        self._drains = True
        if self._host:
            self._host.drain()

    # ---- as a display

    def line(self, rank: int, stream: str, text: str) -> None:
        self._tell(f"[{rank}] {clean(text, colours=False)}")

    def raw(self, data: bytes) -> None:
        raise AssertionError("no member was given a terminal")

    def _say(self, text: str) -> None:
        self._tell(f"paceline: {text}")

    def _tell(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            print(text, flush=True)
        with self._more:
            self._lines.append(text)
            self._more.notify_all()

    def _work(self, where: Reach) -> None:
        code = 1
        try:
            code = self._join(where)
        except PacelineError as error:
            self._say(f"error: {error}")
            code = 2
        finally:
            with self._more:
                self._code = code
                self._more.notify_all()

    def _join(self, where: Reach) -> int:
        from paceline.launch.on_ray.gauges import Gauges

        host = JoinedHost(where, self._name, self._slots, self, labels=self._labels, cwd=self._cwd, say=self._say)
        self._host = host
        if self._drains:  # meanwhile
            host.drain()
        slots = "1 slot" if host.slots == 1 else f"{host.slots} slots"
        apart = f" {APART}" if host.apart else ""
        self._say(f"joined the run at {where.address} with {slots}; logs in {host.dir / 'logs'}{apart}")
        with Gauges(host.dir, lambda: host.running):
            code = host.run()
        if host.reason:
            self._say(f"over: {host.reason}")
        return code


class SchedulerActor:
    """The scheduler. Ray makes it again when its process ends: what it was told and its journal are all it needs."""

    def __init__(self, told: bytes, token: str) -> None:
        parameters = msgspec.json.decode(told, type=Parameters)
        self._scheduler = Scheduler(
            parameters.rules(), token, parameters.journal, parameters.host, parameters.work, parameters.port
        )
        print(f"paceline: scheduler at {self._scheduler.address}, term {self._scheduler.term}", flush=True)

    def where(self, after_s: float = 0.0) -> tuple[str, int]:
        """Its address and its process number."""
        time.sleep(after_s)
        return self._scheduler.address, os.getpid()

    def close(self) -> None:
        self._scheduler.close()
