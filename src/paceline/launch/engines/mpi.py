"""Members that Open MPI's mpirun starts, here or on the hosts that it knows of.

The launcher keeps the rendezvous, and mpirun gives the ranks (`environment.mpi`): workers first, then servers. mpirun
ends all ranks when one fails, so members cannot come and go; with the same --name the run goes on from its checkpoint.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from paceline.core.errors import ConfigError
from paceline.environment import this_host
from paceline.launch import plan, preflight, preview, script, typed
from paceline.launch.engines import Option, Shown
from paceline.launch.engines.starter_job import Failed, Part, Starter, StarterJob
from paceline.launch.spec import JobSpec
from paceline.membership import tether
from paceline.transport.wires import own_address

_APT = "Debian and Ubuntu: apt-get install openmpi-bin"
_ASK_S = 60.0
_CARRIED = ("PACELINE_", "OMP_", "MKL_", "PYTHON", "GLIBC_TUNABLES", "NCCL_", "CUDA_", "LD_LIBRARY_PATH")
# What each rank says of itself before anything starts.
_ASKED = """
import importlib.metadata as m, json, os, platform, socket
def version(name):
    try: return m.version(name)
    except m.PackageNotFoundError: return "none"
try:
    from paceline.environment import this_host
except ImportError:  # told by its version
    this_host = socket.gethostname
try:
    from paceline.launch.beforehand import shows_gpu
except ImportError:
    shows_gpu = lambda: True
versions = [platform.python_version(), version("torch"), version("paceline")]
said = [socket.gethostname(), *versions, this_host(), shows_gpu()]
os.write(1, f"paceline-rank {json.dumps(said)}\\n".encode())  # at once: others write to the same place
"""


_TAG = re.compile(r"\[([^\[\]\s]+@)?\d+,(\d+)\]<(stdout|stderr)>:")
_SIGNAL = re.compile(r"process rank (\d+) with PID \d+ on node \S+ exited on signal (\d+)")
_CODE = re.compile(r"Process name: \[.*?,(\d+)\]")


class Dialect:
    """How mpirun writes, with --tag-output or --output tag."""

    def __init__(self) -> None:
        self.failed = Failed()

    def parts(self, stream: str, text: str) -> tuple[str, list[Part]]:
        tags = list(_TAG.finditer(text))
        found = []
        for tag, behind in zip(tags, [*tags[1:], None]):
            part = text[tag.end() : behind.start() if behind else None]
            if tag[1]:  # as Open MPI 5 writes it
                part = part.removeprefix(" ")
            found.append(Part(int(tag[2]), "err" if tag[3] == "stderr" else "out", part))
        return text[: tags[0].start()] if tags else text, found

    def own(self, text: str) -> str:
        if match := _SIGNAL.search(text):
            self.failed = Failed(int(match[1]), -int(match[2]))
        elif match := _CODE.search(text):
            self.failed = Failed(int(match[1]))
        return f"mpirun: {text}" if text.strip(" -") else ""


def command(spec: JobSpec, mpirun: str, *, major: int = 4) -> list[str]:
    """What starts the members: workers, then servers, as one job of mpirun."""
    words = shlex.split(mpirun)
    words += ["--output", "tag"] if major >= 5 else ["--tag-output"]
    if not any(word.startswith(("--bind-to", "-bind-to")) for word in words):
        words += ["--bind-to", "none"]  # else each rank, with all its threads, gets one core
    cwd = Path(spec.cwd or Path.cwd())
    train = script.command(spec.script, spec.args, module=spec.module, python=spec.python, cwd=cwd)
    carried = [word for name in carries(spec) for word in ("-x", name)]
    tied = (spec.python, "-I", "-S", tether.__file__, "bind", "parent")  # mpirun killed would leave its ranks behind
    words += ["-n", str(spec.num_members), *carried, *tied, *train]
    if spec.num_servers:
        words += [":", "-n", str(spec.num_servers), *carried, *tied, spec.python, "-m", "paceline.server"]
    return words


def environment(spec: JobSpec, address: str, token: str) -> dict[str, str]:
    """Of mpirun, which hands on what `carries` names."""
    told = {"PACELINE_RENDEZVOUS": address, "PACELINE_TOKEN": token, "PACELINE_SERVERS": str(spec.num_servers)}
    return plan.environment(spec) | told


def carries(spec: JobSpec) -> list[str]:
    """The names of variables that ranks on other hosts get too; values do not show on any command line."""
    env = environment(spec, "-", "-")
    return sorted(name for name in env if name.startswith(_CARRIED) or name in spec.env)


@dataclass(frozen=True, kw_only=True)
class Engine:
    """`--on mpi`."""

    OPTIONS: ClassVar[tuple[Option, ...]] = (
        Option(
            field="mpirun",
            metavar="COMMAND",
            parse=typed.words,
            help='mpirun with options of its own, as in "mpirun --hostfile hosts" (default: mpirun)',
        ),
        Option(
            field="interface", metavar="NAME", help="of this host, by which the others reach it (default: by route)"
        ),
    )
    spreads: ClassVar[bool] = False
    elsewhere: ClassVar[bool] = True
    no_hosts: ClassVar[str] = (
        'mpirun is told of hosts in its own words: --mpirun "mpirun --host {hosts}", or --hostfile FILE there; over '
        "ssh, without MPI, leave --on out"
    )
    stays: ClassVar[str] = "mpirun ends all ranks when one is lost, so members cannot come and go"

    mpirun: str = "mpirun"
    interface: str = ""

    def prepare(self, spec: JobSpec) -> JobSpec:
        if spec.elastic or spec.replacing:
            raise ConfigError(f"--on mpi: {self.stays}; give one number (-n 4) and no --replacements")
        if spec.labels:
            raise ConfigError("--on mpi: mpirun decides which rank runs where, so --label has no meaning; leave it out")
        if not shlex.split(self.mpirun):
            raise ConfigError("--mpirun '': give mpirun's name or path, and its options")
        return spec

    def preview(self, spec: JobSpec) -> str:
        env = environment(spec, "<address>:<port>", "<token>")
        added = {k: v for k, v in env.items() if os.environ.get(k) != v}
        words = [f"{name}={shlex.quote(value)}" for name, value in added.items()]
        return "\n".join([f"{' '.join(words)} {shlex.join(command(spec, self.mpirun))}", preview.settings(spec)])

    def check(self, spec: JobSpec) -> None:
        _major(self.mpirun)
        ranks = _ask(self.mpirun, spec.size, spec.python)
        if self.interface and all(rank[4] == this_host() for rank in ranks):
            raise ConfigError("--interface: mpirun would start all members on this host; leave it out")
        if self.interface:
            preflight.interface_address(self.interface)
        mine = ranks[0]
        for other in ranks:
            for what, here, there in zip(("Python", "torch", "paceline"), mine[1:4], other[1:4]):
                if here != there:
                    raise ConfigError(
                        f"host {other[0]} has {what} {there}, host {mine[0]} has {here}: install the same version "
                        "on all of them"
                    )
        lacking = sorted({rank[0] for rank in ranks[: spec.num_members] if not rank[5]})
        if spec.settings.device.startswith("cuda") and lacking:
            raise ConfigError(
                f"--device {spec.settings.device}: host {', '.join(lacking)}, where mpirun would start members, shows "
                "no GPU; name other hosts to --mpirun, or use --device cpu"
            )

    def start(self, spec: JobSpec, shown: Shown) -> StarterJob:
        others = [rank[0] for rank in _ask(self.mpirun, spec.size, spec.python) if rank[4] != this_host()]
        address = "127.0.0.1"
        if others:
            address = preflight.interface_address(self.interface) if self.interface else own_address(others[0])
        words = command(spec, self.mpirun, major=_major(self.mpirun))
        starter = Starter(
            command=lambda directory: words,
            environment=lambda where, token: environment(spec, where, token),
            dialect=Dialect(),
            host=address,
        )
        return StarterJob(spec, starter, shown)


@functools.cache
def _major(mpirun: str) -> int:
    """Of which version it is; ConfigError where it is not there, or somebody else's."""
    program = shlex.split(mpirun)[0]
    if shutil.which(program) is None:
        raise ConfigError(f"--on mpi: there is no {program!r} here; install Open MPI ({_APT})")
    said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=_ASK_S).stdout
    match = re.search(r"\(Open ?MPI\) (\d+)|\(PRRTE\) (\d+)", said)
    if match is None:
        first = said.strip().splitlines()[0] if said.strip() else "nothing"
        raise ConfigError(
            f"--on mpi: {program!r} is not Open MPI's (it says {first!r}); give that one's path to --mpirun, or start "
            "the script by itself, as in mpiexec -n 4 python train.py: paceline.join() finds its rank"
        )
    return int(match[1] or match[2])


@functools.cache
def _ask(mpirun: str, size: int, python: str) -> list[Any]:
    """Host and versions of each rank, as mpirun would place them."""
    words = [*shlex.split(mpirun), "-n", str(size), python, "-c", _ASKED]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_ASK_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"--on mpi: {shlex.join(words[:-2])} did not start {size} processes within {_ASK_S:g} s: can all hosts be "
            "reached by ssh without a question, and is the script's Python on all of them?"
        ) from None
    lines = [line.partition("paceline-rank ")[2] for line in done.stdout.splitlines() if "paceline-rank " in line]
    if done.returncode or len(lines) != size:
        said = [line for line in (done.stderr + done.stdout).splitlines() if line.strip(" -")]
        raise ConfigError(
            f"--on mpi: {shlex.join(words[:-2])} started {len(lines)} of {size} processes. It says:\n"
            + "\n".join(f"  {line}" for line in said[:12])
        )
    return [json.loads(line) for line in lines]
