"""An elastic run of the counted training over several hosts (network namespaces), an agent on each, with faults."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import STDOUT, Popen
from types import SimpleNamespace

from paceline.testing.cluster import leftovers
from paceline.testing.faults import Faults, Injected
from paceline.testing.hosts import Hosts
from paceline.testing.ledger import Findings, Ledger
from paceline.testing.plan import FaultPlan

LIMIT_S = 200.0


@dataclass
class Outing:
    """A run whose launcher is on host 0; `slots` of each host, by number."""

    tmp_path: Path
    hosts: Hosts
    slots: Sequence[int] = (1, 1, 1)
    least: int = 2
    most: int = 0  # as many as there are slots
    wait_limit_s: float = 60.0
    epochs: int = 3
    step_s: float = 0.01
    options: Sequence[str] = ()
    args: Sequence[str] = ()  # of the script
    programs: dict[str, Popen[bytes]] = field(default_factory=dict)

    @property
    def dir(self) -> Path:
        return self.tmp_path / "runs" / "it"

    @property
    def token(self) -> str:
        return str(json.loads((self.dir / "scheduler.json").read_text())["token"])

    @property
    def output(self) -> str:
        parts = [p.read_text(errors="replace") for p in sorted(self.tmp_path.glob("*.out"))]
        parts += [p.read_text(errors="replace") for p in sorted(self.dir.glob("logs/*.log"))]
        return "\n".join(parts)

    def start(self) -> None:
        """The launcher, and the agents one after the other: so ids go up with the number of the host."""
        most = self.most or sum(self.slots)
        settings = ["--name", "it", "--root", str(self.tmp_path / "runs"), "--progress", "off"]
        settings += ["--wait-limit-s", str(self.wait_limit_s)]
        elastic = [
            "--silence-s",
            "1.5",
            "--standbys",
            "0",
            "--listen",
            self.hosts.ips[0],
            "--slots",
            str(self.slots[0]),
        ]
        script = ["-m", "paceline.testing.train_counted", "--ledger", str(self.tmp_path / "ledger")]
        script += ["--epochs", str(self.epochs), "--step-s", str(self.step_s), *self.args]
        size = ["-n", f"{self.least}:{most}", "--threads", "1"]
        self.program("run", 0, ["run", *size, *settings, *elastic, *self.options, *script])
        self.until(lambda: (self.dir / "scheduler.json").exists())
        for host in range(len(self.slots)):
            if host:
                self.agent(host)
            begun = min(most, sum(self.slots[: host + 1]))
            self.until(lambda begun=begun: len(list(self.dir.glob("logs/rank-*.log"))) >= begun)

    def agent(self, host: int, name: str = "") -> None:
        words = ["agent", "--join", str(self.dir / "scheduler.json"), "--slots", str(self.slots[host])]
        self.program(name or f"agent-{host}", host, words)

    def program(self, name: str, host: int, words: Sequence[str]) -> None:
        with (self.tmp_path / f"{name}.out").open("wb") as out:
            argv = [sys.executable, "-m", "paceline", *words]
            self.programs[name] = self.hosts.popen(host, argv, stdout=out, stderr=STDOUT)

    def until(self, fact: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
        deadline = time.monotonic() + limit_s
        while not fact():
            assert self.programs["run"].poll() is None, f"the run has ended:\n{self.output}"
            assert time.monotonic() < deadline, f"it did not happen:\n{self.output}"
            time.sleep(0.02)

    def code(self, name: str, limit_s: float = LIMIT_S) -> int:
        """Its exit code; a program that hangs fails."""
        deadline = time.monotonic() + limit_s
        while (code := self.programs[name].poll()) is None:
            assert time.monotonic() < deadline, f"{name} hangs:\n{self.output}"
            time.sleep(0.02)
        return code

    def faults(self, plan: FaultPlan, places: Sequence[int] = ()) -> Faults:
        job = SimpleNamespace(dir=self.dir, token=self.token)
        return Faults(plan, job, hosts=self.hosts, places=places)

    @property
    def steps(self) -> int:
        """That any process has written down."""
        files = (self.tmp_path / "ledger").glob("member-*.jsonl")
        return max((file.read_bytes().count(b'"step"') for file in files), default=0)

    def check(self, epochs: int | None = None) -> Findings:
        found = Ledger.read(self.tmp_path / "ledger").check(epochs)
        assert found.clean, f"{found}\n{self.output}"
        return found


@contextlib.contextmanager
def outing(
    tmp_path: Path,
    count: int = 3,
    *,
    delay_ms: float = 0.0,
    rate: str | Sequence[str | None] | None = None,
    **options: object,
) -> Iterator[Outing]:
    """Started; nothing may be left behind at the end."""
    with Hosts(count, rate=rate, delay_ms=delay_ms) as hosts:
        out = Outing(tmp_path, hosts, **options)  # type: ignore[arg-type]
        out.start()
        token = out.token
        yield out
        if out.programs["run"].poll() is not None:
            deadline = time.monotonic() + 20.0
            while left := leftovers(token):
                assert time.monotonic() < deadline, f"left behind: {left}\n{out.output}"
                time.sleep(0.1)


def run_with(tmp_path: Path, plan: FaultPlan, count: int = 3, **options: object) -> tuple[Outing, list[Injected]]:
    """Train to the end while the plan is carried out; the ledger must be clean."""
    with outing(tmp_path, count, **options) as out:  # type: ignore[arg-type]
        with out.faults(plan) as faults:
            code = out.code("run")
        assert code == 0, out.output
        assert not faults.pending, f"not every fault happened: {faults.pending}\n{out.output}"
        for name in out.programs:
            out.code(name, 60.0)
        out.check()
    return out, faults.injected
