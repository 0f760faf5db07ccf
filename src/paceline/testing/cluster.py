"""A cluster of real member processes on this host, for tests.

It starts them as `paceline run` does (agent, rendezvous, run directory), so that a test sees what a user
would. It has a time limit, after which the members print where they hang, and it fails if any process is
left, whichever way the members ended.

    >>> Cluster(2).run("import os; print(os.environ['PACELINE_RANK'])")
    [Finished(rank=0, code=0, output='0\\n'), Finished(rank=1, code=0, output='1\\n')]
"""

from __future__ import annotations

import contextlib
import inspect
import os
import shutil
import signal
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from paceline.core.errors import PacelineError, TimedOut
from paceline.core.settings import Settings
from paceline.launch.local import Local
from paceline.launch.spec import Elastic, JobSpec
from paceline.membership.agent import Outcome

_LOOK_S = 0.01


@dataclass(frozen=True)
class Finished:
    """How one member ended. `code` is negative for a signal."""

    rank: int
    code: int
    output: str  # standard output and error, as lines
    seconds: float = field(repr=False)


class LeftoverError(PacelineError):
    """A process outlived the members; it has been killed."""


class Cluster:
    """Runs scripts on `n` members, to begin with where the run is elastic."""

    def __init__(
        self,
        n: int,
        *,
        threads: int = 1,
        notice_s: float = 1.5,
        grace_s: float = 5.0,
        elastic: Elastic | None = None,
    ) -> None:
        self._n = n
        self._elastic = elastic
        self._threads = threads
        self._notice_s = notice_s
        self._grace_s = grace_s

    def run(
        self,
        script: Path | str | Callable[[], object],
        args: Sequence[str] = (),
        limit_s: float = 60.0,
        env: Mapping[str, str] | None = None,
        settings: Settings | None = None,
    ) -> list[Finished]:
        """Run to the end. `script` is a file, source text, or a function without arguments that needs nothing
        from the module around it. Failing members are for the caller to judge; TimedOut after `limit_s`.

        With the default settings the run directory is temporary; to look into it, give `root` and `name`.
        """
        with self.start(script, args, env=env, settings=settings) as running:
            return running.wait(limit_s)

    def start(
        self,
        script: Path | str | Callable[[], object],
        args: Sequence[str] = (),
        *,
        env: Mapping[str, str] | None = None,
        settings: Settings | None = None,
    ) -> Running:
        """Start and return at once; use it in a `with`, which leaves nothing behind."""
        scratch = Path(tempfile.mkdtemp(prefix="paceline-cluster-"))
        settings = settings or Settings()
        if settings.root == Settings().root:
            settings = settings.with_(root=str(scratch / "runs"))
        try:
            spec = JobSpec(
                script=str(_file(script, scratch)),
                args=tuple(map(str, args)),
                num_members=self._n,
                elastic=self._elastic,
                settings=settings,
                threads=self._threads,
                env=dict(env or {}),
            )
            return Running(spec, scratch, self._notice_s, self._grace_s)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise


class Running:
    """A cluster at work; faults are brought in through `kill`."""

    def __init__(self, spec: JobSpec, scratch: Path, notice_s: float, grace_s: float) -> None:
        self._scratch = scratch
        self._output = _Output(spec.size)
        self.said: list[str] = []  # by the launcher of an elastic run
        self._job = Local(self._output, notice_s=notice_s, grace_s=grace_s, say=self.said.append).start(spec)
        self.dir = self._job.dir
        self.token = self._job.token

    def pid(self, rank: int, limit_s: float = 10.0) -> int:
        """A member's process number; of an elastic run that of the present one."""

        def pid() -> int:
            pids = self._job.pids
            return pids[rank] if pids else 0

        _until(lambda: bool(pid()) or self._job.poll() is not None, limit_s, "the members to start")
        return pid()

    def output(self, rank: int) -> str:
        """What a member has printed so far."""
        return self._output.of(rank)

    def wait_for(self, rank: int, text: str, limit_s: float = 30.0) -> None:
        """Until a member has printed `text`."""

        def ready() -> bool:
            if text in self.output(rank):
                return True
            if self._job.poll() is not None and text not in self.output(rank):
                raise PacelineError(f"member {rank} ended without printing {text!r}:\n{self._output.all()}")
            return False

        _until(ready, limit_s, f"member {rank} to print {text!r}", self._output.all)

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to one member and what it started, such as SIGKILL or SIGSTOP."""
        self.pid(rank)
        self._job.kill(rank, number)

    def stop(self, number: int = signal.SIGTERM) -> None:
        self._job.stop(number)

    def outcome(self, limit_s: float = 60.0) -> Outcome:
        """How it ended as the launcher sees it."""
        outcome = self._job.wait(limit_s)
        if outcome is None:
            self._show_where_they_hang()
            raise TimedOut(f"the members did not end within {limit_s:g} s:\n{self._output.all()}")
        return outcome

    def wait(self, limit_s: float = 60.0) -> list[Finished]:
        """Until all have ended."""
        ended = self.outcome(limit_s).ended
        return [Finished(e.rank, e.code, self._output.of(e.rank), e.seconds) for e in ended]

    def __enter__(self) -> Running:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(PacelineError):
            for _ in range(2):  # ask, then kill
                if self._job.poll() is None:
                    self._job.stop()
                    self._job.wait(1.0)
            self._job.wait(10.0)
        left = leftovers(self.token)
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self._scratch, ignore_errors=True)
        if left and kind is None:
            what = "; ".join(f"{pid}: {command}" for pid, command in left.items())
            raise LeftoverError(f"processes outlived their members: {what}")

    def _show_where_they_hang(self) -> None:
        for rank in range(len(self._job.pids)):
            self._job.kill(rank, signal.SIGABRT)  # with PYTHONFAULTHANDLER, prints every thread's stack
        self._job.wait(1.0)


def leftovers(token: str) -> dict[int, str]:
    """Processes of a run that still live, with their commands; found by the token in their environment."""
    mark = f"PACELINE_TOKEN={token}\0".encode()
    found = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if mark in Path(entry.path, "environ").read_bytes() + b"\0":
                command = Path(entry.path, "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(entry.name)] = command.decode(errors="replace").strip()
    return found


class _Output:
    """Keeps lines by rank."""

    def __init__(self, n: int) -> None:
        self._lock = threading.Lock()
        self._lines: list[list[str]] = [[] for _ in range(n)]

    def line(self, rank: int, stream: str, text: str) -> None:
        with self._lock:
            self._lines[rank].append(text + "\n")

    def raw(self, data: bytes) -> None:
        raise AssertionError("no member has a terminal here")

    def of(self, rank: int) -> str:
        with self._lock:
            return "".join(self._lines[rank])

    def all(self) -> str:
        return "".join(f"--- member {rank}\n{self.of(rank)}" for rank in range(len(self._lines)))


def _file(script: Path | str | Callable[[], object], scratch: Path) -> Path:
    if isinstance(script, Path):
        return script
    if isinstance(script, str) and "\n" not in script and script.endswith(".py"):
        return Path(script)
    if isinstance(script, str):
        source = textwrap.dedent(script)
    else:
        source = f"{textwrap.dedent(inspect.getsource(script))}\n\n{script.__name__}()\n"
    file = scratch / "script.py"
    file.write_text(source)
    return file


def _until(ready: Callable[[], bool], limit_s: float, what: str, more: Callable[[], str] = lambda: "") -> None:
    deadline = time.monotonic() + limit_s
    while not ready():
        if time.monotonic() > deadline:
            raise TimedOut(f"waited {limit_s:g} s for {what}\n{more()}")
        time.sleep(_LOOK_S)
