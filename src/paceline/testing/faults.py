"""Carries out a plan of faults against a run, by watching how far its members have come.

    plan = FaultPlan().kill(member=1, step=7)
    with Cluster(2).start("train.py") as running:
        with Faults(plan, running) as faults:
            running.wait(60.0)
    print(faults.injected)

A thread reads the members' status files every two milliseconds, so that a fault at a step comes within that step or the
next; each is noted with the step at which it really happened. On leaving the `with`, whatever still lasts is undone:
stopped processes go on, hosts meet again, cards get their speed, the disk its room and the clocks their time.

What a fault needs is given to `Faults`: hosts for those of the network, a disk, clocks. `paceline scale` runs as a
program of its own, on host 0 where there are hosts; where it was refused, that is noted when it has ended.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from paceline.core.errors import ConfigError, TimedOut
from paceline.testing import plan as kinds
from paceline.testing import processes
from paceline.testing.clocks import Clocks
from paceline.testing.disk import SmallDisk
from paceline.testing.hosts import Hosts
from paceline.testing.plan import Fault, FaultPlan
from paceline.testing.processes import Process

__all__ = ["FaultPlan", "Faults", "Injected"]

_LOOK_S = 0.002
_EVER = float("inf")  # until the `with` ends


class Job(Protocol):
    """A run that was started. If it has a `token`, its servers, agents and scheduler are found by it."""

    @property
    def dir(self) -> Path: ...


class Injected(msgspec.Struct, frozen=True, kw_only=True):
    """A fault that has happened."""

    fault: Fault
    step: int  # done by the target, or by the foremost member
    at: float  # time.time()
    monotonic: float  # time.monotonic(), the same for all processes of a machine
    pids: tuple[int, ...] = ()  # of the processes it hit
    missed: str = ""  # why it hit nothing


class Faults:
    """Carries out `plan` on `job` while the `with` lasts.

    Args:
        places: the host of each member, for faults of the network that are aimed at a member or at all of a host.
        first: who has rank 0; by default the member whose process is the oldest.
    """

    def __init__(
        self,
        plan: FaultPlan,
        job: Job,
        *,
        hosts: Hosts | None = None,
        places: Sequence[int] = (),
        disk: SmallDisk | None = None,
        clocks: Clocks | None = None,
        first: Callable[[], int | None] | None = None,
    ) -> None:
        self.plan = plan
        self.injected: list[Injected] = []
        self.pending = list(plan.faults)
        self.members = processes.Members(job.dir)
        self._dir = job.dir
        self._token = str(getattr(job, "token", ""))
        self._hosts, self._places, self._disk, self._clocks = hosts, places, disk, clocks
        self._rates = [hosts.rate(i) for i in range(hosts.count)] if hosts else []
        self._first = first or (lambda: self.members.first)
        self._undo: list[tuple[float, Callable[[], object]]] = []
        self._scaling: dict[int, subprocess.Popen[bytes]] = {}  # by place in `injected`
        self._since: dict[int, float] = {}  # when a fault's moment had come, by its id()
        self._error: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-faults", daemon=True)
        for fault in plan.faults:
            self._check(fault)

    def __enter__(self) -> Faults:
        self._began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._stop.set()
        self._thread.join()
        for _, undo in self._undo:
            with contextlib.suppress(Exception):  # the others are to be undone too
                undo()
        self._undo.clear()
        for program in self._scaling.values():
            program.kill()
            program.communicate()
        if self._error is not None and error is None:
            raise self._error

    def wait(self, limit_s: float) -> list[Injected]:
        """Until all have happened and those that last are over; TimedOut says which have not."""
        deadline = time.monotonic() + limit_s
        while self._busy and self._thread.is_alive():
            if time.monotonic() > deadline:
                left = FaultPlan(self.pending)
                raise TimedOut(f"waited {limit_s:g} s; at step {self.members.front} there is left: {left}")
            time.sleep(_LOOK_S)
        if self._error is not None:
            raise self._error
        return self.injected

    @property
    def _busy(self) -> bool:
        return bool(self.pending or self._scaling) or any(until < _EVER for until, _ in self._undo)

    # ---- the thread

    def _run(self) -> None:
        try:
            while not self._stop.wait(_LOOK_S):
                self.members.look()
                now = time.monotonic()
                for fault in self._due(now):
                    self.injected.append(self._inject(fault))
                    self.pending.remove(fault)
                self._note_scaled()
                for each in [u for u in self._undo if u[0] <= now]:
                    each[1]()
                    self._undo.remove(each)
        except BaseException as error:  # raised where the `with` ends
            self._error = error

    def _due(self, now: float) -> list[Fault]:
        # Faults of one step come at once: when the last of their targets has come so far.
        early = {f.step for f in self.pending if f.step is not None and self._step(f) < f.step}
        due = []
        for fault in self.pending:
            if id(fault) not in self._since:
                if fault.step in early or now - self._began < (fault.at_s or 0.0) or not self._does(fault):
                    continue
                self._since[id(fault)] = now
            if now - self._since[id(fault)] >= fault.after_s:
                due.append(fault)
        return due

    def _does(self, fault: Fault) -> bool:
        """Whether the member at which it is aimed, or anybody that lives, does what the fault waits for."""
        member = self._member(getattr(fault, "target", ""))
        living = [member] if member is not None else self.members.alive
        return not fault.doing or any(fault.doing in self.members.doing.get(m, "") for m in living)

    def _step(self, fault: Fault) -> int:
        """How far the member has come that it is aimed at; where it is aimed at none, or at a dead one, anybody."""
        member = self._member(getattr(fault, "target", ""))
        if member is not None and self.members.process(member):
            return self.members.steps.get(member, 0)
        return self.members.front

    def _inject(self, fault: Fault) -> Injected:
        step, now = self._step(fault), time.monotonic()
        hit: list[Process] = []
        missed = ""
        match fault:
            case kinds.Kill():
                number = signal.Signals[f"SIG{fault.signal}"]
                hit = [p for p in self._aim(fault.target) if p.signal(number)]
                missed = "" if hit else f"there was no {fault.target}"
            case kinds.Pause():
                hit = [p for p in self._aim(fault.target) if p.signal(signal.SIGSTOP)]
                missed = "" if hit else f"there was no {fault.target}"
                self._later(fault.for_s, lambda: [p.signal(signal.SIGCONT) for p in hit])
            case kinds.Partition():
                self._network.partition(fault.hosts, way=fault.way)
                self._later(fault.for_s, lambda: self._network.heal(fault.hosts))
            case kinds.Slow():
                self._network.set_rate(fault.host, fault.rate)
                self._later(fault.for_s, lambda: self._network.set_rate(fault.host, self._rates[fault.host]))
            case kinds.Reset():
                self._network.reset(fault.host)
            case kinds.Corrupt():
                self._network.corrupt(self._host(fault.target), fault.after_bytes)
            case kinds.FillDisk():
                assert self._disk is not None
                self._disk.fill()
                self._later(fault.for_s, self._disk.free)
            case kinds.JumpClock():
                assert self._clocks is not None
                member = self._member(fault.target)
                self._clocks.jump(fault.by_s, member=member)
                self._undo.append((_EVER, self._clocks.back))
            case kinds.Scale():
                self._scaling[len(self.injected)] = self._scale(fault.size)
        pids = tuple(p.pid for p in hit)
        return Injected(fault=fault, step=step, at=time.time(), monotonic=now, pids=pids, missed=missed)

    def _scale(self, size: int) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "paceline", "scale", str(self._dir.absolute()), str(size)]
        start = partial(self._hosts.popen, 0) if self._hosts else subprocess.Popen
        return start(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def _note_scaled(self) -> None:
        for place in [place for place, program in self._scaling.items() if program.poll() is not None]:
            program = self._scaling.pop(place)
            output = program.communicate()[0].decode(errors="replace")
            if program.returncode:
                self.injected[place] = msgspec.structs.replace(self.injected[place], missed=output.strip())

    def _later(self, after_s: float, undo: Callable[[], object]) -> None:
        self._undo.append((time.monotonic() + after_s, undo))

    # ---- targets

    def _aim(self, target: str) -> list[Process]:
        if (member := self._member(target)) is not None:
            process = self.members.process(member)
            return [process] if process else []
        kind, _, number = target.partition(" ")
        if kind == "host" and self._hosts:
            return [p for pid in self._hosts.pids(int(number)) if (p := Process.of(pid))]
        if kind == "host":
            there = [m for m, host in enumerate(self._places) if host == int(number)]
            agents = processes.find("agent", self._token)[int(number) : int(number) + 1]
            return agents + [p for m in there if (p := self.members.process(m))]
        found = processes.find(kind, self._token) if kind in ("scheduler", "agent", "server") else []
        if kind == "agent" and self._hosts:
            there = self._hosts.pids(int(number))
            return [p for p in found if p.pid in there]
        return found[int(number or 0) : int(number or 0) + 1]

    def _member(self, target: str) -> int | None:
        if target == "first":
            return self._first()
        return int(target.removeprefix("member ")) if target.startswith("member ") else None

    def _host(self, target: str) -> int:
        member = self._member(target)
        return int(target.removeprefix("host ")) if member is None else self._places[member]

    @property
    def _network(self) -> Hosts:
        assert self._hosts is not None
        return self._hosts

    def _check(self, fault: Fault) -> None:
        """Say at the start what is missing, not at the step where it would be needed."""
        call = str(FaultPlan([fault])).removeprefix("FaultPlan()")
        target = getattr(fault, "target", "")
        if isinstance(fault, kinds.Partition | kinds.Slow | kinds.Reset | kinds.Corrupt) and self._hosts is None:
            raise ConfigError(f"{call}: the network can only fail between hosts: give Faults(..., hosts=hosts)")
        if isinstance(fault, kinds.Corrupt):
            known = [f"host {i}" for i in range(self._network.count)] + [
                f"member {m}" for m in range(len(self._places))
            ]
            if target not in [*known, *(["first"] if self._places else [])]:
                raise ConfigError(f"{call}: on which host is that? give Faults(..., places=[0, 0, 1]), by member")
            if not self._network.delay_ms:
                raise ConfigError(f"{call}: needs hosts with a delay, such as Hosts(2, delay_ms=0.1)")
        if target.startswith("host ") and not self._hosts and not self._places:
            raise ConfigError(f"{call}: give Faults(..., hosts=hosts), or places=[0, 0, 1], the host of each member")
        if isinstance(fault, kinds.FillDisk) and self._disk is None:
            raise ConfigError(f"{call}: give Faults(..., disk=disk), a SmallDisk that holds the run directory")
        if isinstance(fault, kinds.JumpClock):
            if self._clocks is None:
                raise ConfigError(f"{call}: give Faults(..., clocks=clocks), and start the run with clocks.env")
            if target not in ("all", "first") and not target.startswith("member "):
                raise ConfigError(f"{call}: clocks jump on a member, on 'first', or on all")
