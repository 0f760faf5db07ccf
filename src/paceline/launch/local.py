"""Starts a run on this host: a rendezvous, and an agent with the members under it."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from paceline.core import lost
from paceline.core.settings import Settings
from paceline.environment.paceline import VARIABLES, variables
from paceline.environment.place import Place
from paceline.launch import cores, record, script, servers
from paceline.launch.spec import JobSpec
from paceline.membership.agent import Agent, Outcome
from paceline.membership.process import Show, Start
from paceline.membership.rendezvous import Rendezvous

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_LOOK_S = 0.2
# Large blocks in huge pages: a step asks for its gradients anew, and clearing them 4 KB at a time takes up to a third
# of it (docs/decisions/0009).
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def plan(spec: JobSpec, rendezvous: str, token: str) -> list[Start]:
    """Exactly what is started, one per member."""
    cwd = Path(spec.cwd or Path.cwd())
    command = script.command(spec.script, spec.args, module=spec.module, python=spec.python, cwd=cwd)
    inherited = {k: v for k, v in os.environ.items() if k not in VARIABLES} | dict(spec.env)
    common = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    if not any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in inherited):
        common |= HUGE_PAGES
    if spec.threads is not None:
        common |= dict.fromkeys(_THREADS, str(spec.threads))
    elif not any(inherited.get(name) for name in _THREADS):
        threads, _ = cores.share(spec.num_members, cores.cores().usable)  # servers work while workers wait
        common |= dict.fromkeys(_THREADS, str(threads))
    starts = []
    size = spec.num_members + spec.num_servers
    for rank in range(size):
        place = Place(
            kind="paceline",
            rank=rank,
            size=size,
            local_rank=rank,
            local_size=size,
            servers=spec.num_servers,
            rendezvous=rendezvous,
            token=token,
        )
        env = inherited | common | variables(place)
        terminal = spec.terminal and rank == 0
        own = command if rank < spec.num_members else (spec.python, "-m", "paceline.server")
        starts.append(Start(rank=rank, command=own, env=env, cwd=spec.cwd, terminal=terminal))
    return starts


class Local:
    """The launcher for one host."""

    def __init__(
        self,
        show: Show,
        *,
        notice_s: float = 3.0,
        grace_s: float = 5.0,
        on_lost: Callable[[int, str], None] = lambda rank, how: None,  # of members without which the others go on
    ) -> None:
        self._show = show
        self._on_lost = on_lost
        self._notice_s = notice_s
        self._grace_s = grace_s

    def start(self, spec: JobSpec) -> LocalJob:
        return LocalJob(spec, self._show, self._notice_s, self._grace_s, self._on_lost)


class LocalJob:
    """A run on this host. Its members end when this process does, however it ends."""

    def __init__(
        self,
        spec: JobSpec,
        show: Show,
        notice_s: float,
        grace_s: float,
        on_lost: Callable[[int, str], None] = lambda rank, how: None,
    ) -> None:
        self._on_lost = on_lost
        self._losses: list[lost.Lost] = []
        self.token = secrets.token_hex(32)
        plan(spec, "", self.token)  # a script that cannot be started leaves no directory behind
        size = spec.num_members + spec.num_servers
        self._record = record.Record(spec.settings, spec.script, size)
        lost.write(self._record.dir, ())
        # Absolute: a script may change its directory before it joins.
        root = str(self._record.dir.parent.absolute())
        settings = spec.settings.pin(*spec.settings.changed())  # a program that starts a run types nothing
        self.settings: Settings = settings.with_(name=self._record.run.name, root=root)
        self._rendezvous = Rendezvous(size, self.settings, self.token)
        self._agent = Agent(
            plan(spec, self._rendezvous.address, self.token),
            show,
            logs=self.dir / "logs",
            notice_s=notice_s,
            grace_s=grace_s,
            losable=range(1, spec.num_members) if spec.forgives else (),
            on_started=self._started,
            on_ended=self._ended,
            on_lost=self._lost,
        )
        self._size = size
        self._pids: list[int] = []
        self._outcome: Outcome | None = None
        self._error: BaseException | None = None
        # A daemon: when this process ends, the members end with the thread that started them.
        self._thread = threading.Thread(target=self._run, name="paceline-agent", daemon=True)
        self._thread.start()

    @property
    def dir(self) -> Path:
        return self._record.dir

    @property
    def pids(self) -> list[int]:
        """The members' process numbers, by rank; empty until all are started."""
        return self._pids

    @property
    def met(self) -> bool:
        """Whether the members have come to the rendezvous: a script that never joins is as many plain scripts."""
        return bool(self._rendezvous.arrived())

    def logs(self) -> dict[int, Path]:
        return {rank: self.dir / "logs" / f"rank-{rank}.log" for rank in range(self._size)}

    def poll(self) -> int | None:
        return None if self._thread.is_alive() else self._result().code

    def wait(self, limit_s: float) -> Outcome | None:
        deadline = time.monotonic() + limit_s
        while self._thread.is_alive():
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            # In pieces, so that a signal's handler runs soon on the main thread.
            self._thread.join(min(left, _LOOK_S))
        return self._result()

    def stop(self, number: int = signal.SIGTERM) -> None:
        self._agent.stop(number)

    def kill(self, rank: int, number: int) -> None:
        """Send a signal to one member and what it started."""
        self._agent.kill(rank, number)

    def resize(self) -> None:
        self._agent.resize()

    def _result(self) -> Outcome:
        if self._error is not None:
            raise self._error
        assert self._outcome is not None
        return self._outcome

    def _run(self) -> None:
        code = 1
        with self._record:
            try:
                self._outcome = self._agent.run()
                code = self._outcome.code
            except BaseException as error:  # raised where the job is waited for
                self._error = error
            finally:
                self._rendezvous.close()
                self._record.finish(code)

    def _started(self, pids: list[int]) -> None:
        self._pids = pids
        self._record.started(pids)

    def _ended(self, rank: int, code: int) -> None:
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        self._rendezvous.gone(rank, how)

    def _lost(self, rank: int, code: int) -> None:
        gate = servers.turned(self.dir / "events" / "rank-0.jsonl", self._record.run.started)
        if gate and not servers.forgives(gate, 1):
            return  # the others fail of it, and the end says so
        self._losses.append(lost.Lost(rank=rank, how=lost.how(code), at=time.time()))
        with contextlib.suppress(OSError):  # a full disk must not stop the others
            lost.write(self.dir, self._losses)
        self._on_lost(rank, lost.how(code))
