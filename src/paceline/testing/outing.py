"""An elastic run over several hosts: the launcher on host 0, an agent on each of the others, on this machine.

    with Hosts(3) as hosts:
        out = Outing(tmp_path, hosts, ["train.py"], slots=(1, 2, 2), least=1)
        out.start()
        with out.faults(FaultPlan().partition([2], for_s=6.0, step=10)) as faults:
            assert out.code("run") == 0, out.output

What each program prints lies in the scratch folder, where the run directory is too, unless `root` says otherwise.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import STDOUT, Popen
from types import SimpleNamespace

from paceline.core.errors import PacelineError, TimedOut
from paceline.testing.clocks import Clocks
from paceline.testing.disk import SmallDisk
from paceline.testing.faults import Faults
from paceline.testing.hosts import Hosts
from paceline.testing.plan import FaultPlan

_LOOK_S = 0.02


@dataclass
class Outing:
    """A run of `script`, as `paceline run` takes it, with `slots` members on each host, by number."""

    scratch: Path
    hosts: Hosts
    script: Sequence[str]
    slots: Sequence[int] = (1, 1, 1)
    least: int = 2
    most: int = 0  # as many as there are slots
    silence_s: float = 1.5
    wait_limit_s: float = 60.0
    options: Sequence[str] = ()  # of `paceline run`
    root: Path | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    limit_s: float = 200.0  # of every wait
    programs: dict[str, Popen[bytes]] = field(default_factory=dict)

    @property
    def dir(self) -> Path:
        return (self.root or self.scratch / "runs") / "it"

    @property
    def token(self) -> str:
        return str(json.loads((self.dir / "scheduler.json").read_text())["token"])

    @property
    def output(self) -> str:
        parts = [p.read_text(errors="replace") for p in sorted(self.scratch.glob("*.out"))]
        parts += [p.read_text(errors="replace") for p in sorted(self.dir.glob("logs/*.log"))]
        return "\n".join(parts)

    def start(self) -> None:
        """The launcher, and the agents one after the other: so ids go up with the number of the host."""
        most = self.most or sum(self.slots)
        words = ["-n", f"{self.least}:{most}", "--threads", "1", "--name", "it", "--root", str(self.dir.parent)]
        words += ["--progress", "off", "--wait-limit-s", str(self.wait_limit_s), "--silence-s", str(self.silence_s)]
        words += ["--standbys", "0", "--listen", self.hosts.ips[0], "--slots", str(self.slots[0]), *self.options]
        self.program("run", 0, ["run", *words, *self.script])
        self.until(lambda: (self.dir / "scheduler.json").exists())
        for host in range(len(self.slots)):
            if host:
                self.agent(host)
            self._until_begun(min(most, sum(self.slots[: host + 1])))

    def _until_begun(self, members: int) -> None:
        self.until(lambda: len(list(self.dir.glob("logs/rank-*.log"))) >= members)

    def agent(self, host: int, name: str = "") -> None:
        """Let a host join, or join again."""
        words = ["agent", "--join", str(self.dir / "scheduler.json"), "--slots", str(self.slots[host])]
        self.program(name or f"agent-{host}", host, words)

    def program(self, name: str, host: int, words: Sequence[str]) -> None:
        with (self.scratch / f"{name}.out").open("ab") as out:
            argv = [sys.executable, "-m", "paceline", *words]
            self.programs[name] = self.hosts.popen(host, argv, env=self.env, stdout=out, stderr=STDOUT)

    def until(self, fact: Callable[[], bool], limit_s: float | None = None) -> None:
        """Wait for it while the run lasts."""
        deadline = time.monotonic() + (limit_s or self.limit_s)
        while not fact():
            if self.programs["run"].poll() is not None:
                raise PacelineError(f"the run has ended:\n{self.output}")
            if time.monotonic() > deadline:
                raise TimedOut(f"it did not happen:\n{self.output}")
            time.sleep(_LOOK_S)

    def code(self, name: str, limit_s: float | None = None) -> int:
        """A program's exit code, once it has ended; TimedOut if it hangs."""
        deadline = time.monotonic() + (limit_s or self.limit_s)
        while (code := self.programs[name].poll()) is None:
            if time.monotonic() > deadline:
                raise TimedOut(f"{name} hangs:\n{self.output}")
            time.sleep(_LOOK_S)
        return code

    def faults(
        self,
        plan: FaultPlan,
        places: Sequence[int] = (),
        disk: SmallDisk | None = None,
        clocks: Clocks | None = None,
    ) -> Faults:
        """That carry out a plan on this run and its hosts."""
        job = SimpleNamespace(dir=self.dir, token=self.token)
        return Faults(plan, job, hosts=self.hosts, places=places, disk=disk, clocks=clocks)
