"""Worker processes that a benchmark steers call by call: `team.call("block", steps=10)`.

The benchmark, not the workers, decides whose turn it is, so that ours and the peer's blocks can be
interleaved even when they live in different processes; a worker that is not being called sleeps in a read and
costs no core. Calls and answers are JSON lines over a unix socket. No torch here: this module also runs in a
peer's environment.

    worker side   serve({"block": block, ...})   connects, says its rank, answers until the socket closes
    parent side   Team.of(size, "bench.NAME")    starts `python -m bench.NAME --worker` once per member
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


class TeamError(RuntimeError):
    """A worker failed or did not answer in time; the message holds the end of its output."""


class Team:
    """Workers under way. `call` asks all of them at once and waits for all answers, in the order of ranks."""

    def __init__(self, size: int, commands: Iterable[tuple[list[str], dict[str, str]]], limit_s: float = 120.0):
        self.size = size
        self.limit_s = limit_s
        self.folder = Path(tempfile.mkdtemp(prefix="bench-"))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lines: dict[int, Any] = {}
        self._sockets: list[socket.socket] = []
        self.pids: list[int] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.folder / "socket"))
        self._listener.listen(size)
        self._commands = list(commands)

    @classmethod
    def of(
        cls,
        size: int,
        module: str,
        *,
        threads: int = 1,
        ours: bool = True,
        limit_s: float = 120.0,
        env: Mapping[str, str] | None = None,
    ) -> Team:
        """A team of `size` members that run `python -m module --worker`.

        With `ours` they find a Paceline rendezvous in their environment, as under `paceline run`, which also
        has large blocks put into huge pages: peers in these processes have the same.
        Gloo can always be started by `bench.workers.gloo()`, through a file in the team's folder.
        """
        from paceline.launch.plan import HUGE_PAGES

        command = [sys.executable, "-m", module, "--worker"]
        base = {
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "GLOO_SOCKET_IFNAME": "lo",
            "BENCH_SIZE": str(size),
            **HUGE_PAGES,
            **(env or {}),
        }
        team = cls(size, [(command, base | {"BENCH_RANK": str(rank)}) for rank in range(size)], limit_s)
        if ours and size > 1:
            team._meet()
        return team

    def _meet(self) -> None:
        """Add the variables of our own launcher, with a rendezvous in this process."""
        from paceline.core.settings import Settings
        from paceline.environment.paceline import variables
        from paceline.environment.place import Place
        from paceline.membership.rendezvous import Rendezvous

        settings = Settings(name="bench", root=str(self.folder / "runs"), progress="off", checkpoint_keep=0)
        token = secrets.token_hex(32)
        self._rendezvous = Rendezvous(self.size, settings, token)
        for rank, (_, env) in enumerate(self._commands):
            env |= variables(
                Place(
                    kind="paceline",
                    rank=rank,
                    size=self.size,
                    local_rank=rank,
                    local_size=self.size,
                    rendezvous=self._rendezvous.address,
                    token=token,
                )
            )

    def __enter__(self) -> Team:
        try:
            for index, (command, env) in enumerate(self._commands):
                paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
                full = os.environ | env | {"BENCH_FOLDER": str(self.folder), "PYTHONPATH": paths}
                with (self.folder / f"output-{index}").open("wb") as output:
                    self._processes.append(
                        subprocess.Popen(command, env=full, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
                    )
            self._accept()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(10.0 if kind is None else 1.0)

    def call(self, name: str, /, *, limit_s: float | None = None, **arguments: Any) -> list[Any]:
        """Have every worker run `name(**arguments)`; their answers in the order of ranks."""
        deadline = time.monotonic() + (limit_s or self.limit_s)
        request = json.dumps([name, arguments]) + "\n"
        for rank in range(self.size):
            self._lines[rank].write(request.encode())
            self._lines[rank].flush()
        answers = []
        for rank in range(self.size):
            self._sockets[rank].settimeout(max(0.1, deadline - time.monotonic()))
            try:
                line = self._lines[rank].readline()
            except TimeoutError:
                raise TeamError(f"worker {rank} did not answer {name!r} in time\n{self.tail()}") from None
            if not line:
                raise TeamError(f"worker {rank} ended during {name!r}\n{self.tail()}")
            answer = json.loads(line)
            if "error" in answer:
                raise TeamError(f"worker {rank} failed in {name!r}: {answer['error']}\n{self.tail()}")
            answers.append(answer["value"])
        return answers

    def slowest(self, name: str, /, **arguments: Any) -> float:
        """As `call`, for functions that return seconds: the slowest member's."""
        return max(float(s) for s in self.call(name, **arguments))

    def tail(self, lines: int = 15) -> str:
        """The last lines that each process printed."""
        texts = []
        for index in range(len(self._processes)):
            text = (self.folder / f"output-{index}").read_text(errors="replace").splitlines()[-lines:]
            texts.append(f"--- output of process {index}\n" + "\n".join(text))
        return "\n".join(texts)

    def close(self, grace_s: float = 1.0) -> None:
        """End the workers (their socket closes; those that do not leave are killed) and remove the folder."""
        for line in self._lines.values():
            line.close()
        for sock in [*self._sockets, self._listener]:
            sock.close()
        deadline = time.monotonic() + grace_s
        for process in self._processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if hasattr(self, "_rendezvous"):
            self._rendezvous.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _accept(self) -> None:
        deadline = time.monotonic() + self.limit_s
        arrived: dict[int, socket.socket] = {}
        while len(arrived) < self.size:
            self._listener.settimeout(1.0)
            try:
                sock, _ = self._listener.accept()
            except TimeoutError:
                gone = [i for i, process in enumerate(self._processes) if process.poll()]
                if gone or time.monotonic() > deadline:
                    missing = sorted(set(range(self.size)) - set(arrived))
                    raise TeamError(f"workers {missing} never arrived\n{self.tail()}") from None
                continue
            sock.settimeout(10)
            line = sock.makefile("rwb")
            hello = json.loads(line.readline())
            arrived[hello["rank"]] = sock
            self._lines[hello["rank"]] = line
            self._sockets.append(sock)
            self.pids.append(hello["pid"])
        self._sockets = [arrived[rank] for rank in range(self.size)]


def serve(functions: Mapping[str, Callable[..., Any]], rank: int | None = None) -> None:
    """The worker's side: answer the benchmark's calls until it closes the socket, then return."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no worker outlives a killed benchmark
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(os.environ["BENCH_FOLDER"] + "/socket")
        line = sock.makefile("rwb")
        me = int(os.environ["BENCH_RANK"]) if rank is None else rank
        line.write(json.dumps({"rank": me, "pid": os.getpid()}).encode() + b"\n")
        line.flush()
        while request := line.readline():
            name, arguments = json.loads(request)
            try:
                answer = {"value": functions[name](**arguments)}
            except Exception as error:
                import traceback

                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"}
            try:
                line.write(json.dumps(answer).encode() + b"\n")
                line.flush()
            except BrokenPipeError:
                return
