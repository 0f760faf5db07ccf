"""Members that torchrun starts: on this host, or with `--nodes` on this one and on others where it is started too.

The launcher keeps the rendezvous, and torchrun gives the ranks (`environment.torchrun`). torchrun ends all members when
one fails, so they cannot come and go; with the same --name the run goes on from its checkpoint.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from paceline.core.errors import ConfigError
from paceline.launch import plan, preflight, preview, probe, script, tokens, typed
from paceline.launch.engines import Option, Shown
from paceline.launch.engines.starter_job import Failed, Part, Starter, StarterJob
from paceline.launch.spec import JobSpec
from paceline.membership import tether

_PORT = 29500  # of torchrun, by default
_TORCHRUN = ("-m", "torch.distributed.run")  # of Python: what torchrun runs
_COPIES = "torchrun"  # in the run's logs while it runs: torchrun passes on what it has written there
_TAG = re.compile(r"\[paceline-rank(\d+)\]:")
_RANK = re.compile(r"^\s*rank\s*: (\d+) \(local_rank")
_CODE = re.compile(r"^\s*exitcode\s*: (-?\d+) \(pid")


def _number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _port(text: str) -> int:
    return typed.port(text, least=1, last=typed.LAST_PORT - 1)  # the rendezvous is at the next one


class Dialect:
    """How torchrun writes: parts of members' lines behind our tag, and at the end who failed first, with its code."""

    def __init__(self) -> None:
        self.failed = Failed()
        self._cause = False  # it is told from here on

    def parts(self, stream: str, text: str) -> tuple[str, list[Part]]:
        tags = list(_TAG.finditer(text))
        ends = [*(tag.start() for tag in tags[1:]), len(text)]
        found = [Part(int(tag[1]), stream, text[tag.end() : end]) for tag, end in zip(tags, ends)]
        return text[: tags[0].start()] if tags else text, found

    def own(self, text: str) -> str:
        """Its tracebacks say nothing of the members' errors: those end with their own words, and with a code."""
        if text.startswith("Root Cause"):
            self._cause = True
        elif self._cause and (match := _RANK.match(text)):
            self.failed = Failed(int(match[1]))
        elif self._cause and (match := _CODE.match(text)):
            self.failed, self._cause = Failed(self.failed.rank, int(match[1])), False
        said = re.match(r"(\w+\.)*\w*Error: .|\S+: error: ", text)
        return f"torchrun: {text}" if said and "ChildFailedError" not in text else ""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """`--on torchrun`."""

    OPTIONS: ClassVar[tuple[Option, ...]] = (
        Option(field="nodes", metavar="K", parse=_number, help="hosts in all, of which this is the first (default: 1)"),
        Option(field="interface", metavar="NAME", help="of this host, by which the others reach it; with --nodes"),
        Option(
            field="master_port",
            metavar="P",
            parse=_port,
            help=f"of torchrun; the rendezvous is at the next one; with --nodes (default: {_PORT})",
        ),
    )
    spreads: ClassVar[bool] = False
    elsewhere: ClassVar[bool] = False
    no_hosts: ClassVar[str] = (
        "torchrun reaches no other host; it is started on each: give --nodes, and --dry-run shows what to start on the "
        "others; over ssh, without torchrun, leave --on out"
    )
    stays: ClassVar[str] = "torchrun ends all members when one is lost, so they cannot come and go"

    nodes: int = 1
    interface: str = ""
    master_port: int = _PORT

    def prepare(self, spec: JobSpec) -> JobSpec:
        if spec.elastic or spec.replacing:
            raise ConfigError(f"--on torchrun: {self.stays}; give one number (-n 4) and no --replacements")
        if spec.num_servers:
            raise ConfigError(
                "--on torchrun: it starts members alone, and this strategy is to have server processes; give --servers "
                "colocated (a shard with every worker), or leave --on out"
            )
        if spec.labels:
            raise ConfigError("--on torchrun: it gives all members one environment; leave --label out")
        if spec.num_members % self.nodes:
            raise ConfigError(
                f"-n {spec.num_members} with --nodes {self.nodes}: torchrun starts as many members on each host; give "
                f"a multiple of {self.nodes}"
            )
        if self.nodes > 1 and not self.interface:
            own = ", ".join(f"{name} ({address})" for name, address in probe.interfaces().items() if address)
            raise ConfigError(
                f"--nodes {self.nodes}: by which interface do the others reach this host? --interface: {own}"
            )
        if self.nodes == 1 and self.interface:
            raise ConfigError("--interface: without --nodes all members are on this host; leave it out")
        if self.nodes == 1 and self.master_port != _PORT:
            raise ConfigError("--master-port: without --nodes torchrun takes a port that is free; leave it out")
        return spec

    def preview(self, spec: JobSpec) -> str:
        env = self._environment(spec, self._address(spec), "<token>")
        added = {k: v for k, v in env.items() if os.environ.get(k) != v}
        words = [f"{name}={shlex.quote(value)}" for name, value in added.items()]
        start = f"{' '.join(words)} {shlex.join(self._command(spec, Path('<run>')))}"
        return "\n".join([start, *(f"# {line}" for line in self._others(spec)), preview.settings(spec)])

    def check(self, spec: JobSpec) -> None:
        if self.nodes > 1 and not tokens.told():
            raise ConfigError(
                "--nodes: PACELINE_TOKEN is not set, by which the hosts know each other: export "
                "PACELINE_TOKEN=$(openssl rand -hex 32) here, and the same on the others"
            )
        for port in (self.master_port, self.master_port + 1) if self.nodes > 1 else ():
            try:
                socket.create_server((self._host(), port)).close()
            except OSError as error:
                raise ConfigError(
                    f"--master-port {self.master_port}: cannot listen at {self._host()}:{port} ({error.strerror}); "
                    "give another one, which is free with the one after it, here and on the other hosts"
                ) from None

    def start(self, spec: JobSpec, shown: Shown) -> StarterJob:
        for line in self._others(spec):
            shown.say(line)
        several = self.nodes > 1
        starter = Starter(
            command=lambda directory: self._command(spec, directory),
            environment=lambda where, token: self._environment(spec, where, token),
            dialect=Dialect(),
            host=self._host(),
            port=self.master_port + 1 if several else 0,
            token=tokens.told() if several else "",
            close=lambda directory: shutil.rmtree(directory / "logs" / _COPIES, ignore_errors=True),
        )
        return StarterJob(spec, starter, shown)

    def _host(self) -> str:
        return preflight.interface_address(self.interface) if self.nodes > 1 else "127.0.0.1"

    def _address(self, spec: JobSpec) -> str:
        return f"{self._host()}:{self.master_port + 1 if self.nodes > 1 else '<port>'}"

    def _environment(self, spec: JobSpec, address: str, token: str) -> dict[str, str]:
        own = {"PACELINE_RENDEZVOUS": address, "PACELINE_TOKEN": token, "PACELINE_SERVERS": "0"}
        each = spec.num_members // self.nodes
        tags = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[paceline-rank${rank}]:"}
        return plan.environment(spec, slots=each) | own | tags

    def _command(self, spec: JobSpec, directory: Path) -> list[str]:
        """What is started here; the members are tied to torchrun, which, killed, would leave them behind."""
        copies = ["--tee", "3", "--log-dir", str(directory / "logs" / _COPIES)]
        tied = [spec.python, "-I", "-S", tether.__file__, "bind", "parent"]
        return [spec.python, *_TORCHRUN, *self._where(spec, "0"), *copies, "--no-python", *tied, *self._script(spec)]

    def _where(self, spec: JobSpec, node: str) -> list[str]:
        each = ["--nproc-per-node", str(spec.num_members // self.nodes)]
        if self.nodes == 1:
            return ["--standalone", "--nnodes", "1", *each]  # whatever PET_NNODES says, as in a pod
        master = ["--master-addr", self._host(), "--master-port", str(self.master_port)]
        return ["--nnodes", str(self.nodes), *each, "--node-rank", node, *master]

    def _others(self, spec: JobSpec) -> list[str]:
        """What to start on the other hosts."""
        if self.nodes == 1:
            return []
        numbers = "1" if self.nodes == 2 else f"1 to {self.nodes - 1}"
        same = ", ".join(["PACELINE_TOKEN", *spec.env])  # only names: values may be secret
        where = f"PACELINE_RENDEZVOUS={self._address(spec)}"
        words = shlex.join(["torchrun", *self._where(spec, "I"), "--no-python", *self._script(spec)])
        return [f"on the other hosts, I being {numbers}, and {same} the same as here: {where} {words}"]

    def _script(self, spec: JobSpec) -> Sequence[str]:
        cwd = Path(spec.cwd or Path.cwd())
        return script.command(spec.script, spec.args, module=spec.module, python=spec.python, cwd=cwd)
