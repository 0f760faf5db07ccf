"""A Slurm of this machine's own: its credentials, a controller, and node daemons on loopback.

    with Slurm(directory, nodes=2) as slurm:
        subprocess.run(["srun", "-N", "2", "hostname"], env=os.environ | slurm.env)

All nodes are this machine; what they run has its cores in common, and no cgroups. Nothing of an installation that is
there already is read or written: commands find this one by `env`. Node daemons want root.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.core.errors import ConfigError, PacelineError
from paceline.membership import tether

_LIMIT_S = 30.0
_PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/usr/local/sbin"
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "sinfo", "scontrol", "scancel")
_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdTimeout=10
KillWait=10
MinJobAge=600
{more}
{nodes}
PartitionName=main Nodes=n[1-{count}] Default=YES MaxTime=60 State=UP PriorityTier=1
PartitionName=urgent Nodes=n[1-{count}] MaxTime=60 State=UP PriorityTier=10
"""
_NODE = "NodeName=n{n} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} RealMemory=500 State=UNKNOWN"


class Slurm:
    """A controller and `nodes` node daemons, named n1, n2 and so on.

    Args:
        directory: for configuration, state and logs.
        cpus: that each node says it has.
        more: lines of its configuration; `Slurm.PREEMPTS` lets jobs in the partition urgent take nodes from main.
    """

    PREEMPTS = ("PreemptType=preempt/partition_prio", "PreemptMode=REQUEUE")

    def __init__(self, directory: Path, nodes: int = 2, *, cpus: int = 2, more: Sequence[str] = ()) -> None:
        self.dir = directory
        self.nodes = [f"n{n}" for n in range(1, nodes + 1)]
        self._cpus, self._more = cpus, more
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    @staticmethod
    def missing() -> str:
        """Why there can be none on this machine; "" where there can."""
        if lacking := [name for name in _PROGRAMS if shutil.which(name, path=_PATH) is None]:
            return f"no {', '.join(lacking)}: apt-get install slurm-wlm munge"
        if os.geteuid() != 0:
            return "Slurm's node daemons want root"
        return ""

    @property
    def env(self) -> dict[str, str]:
        """By which Slurm's commands find this one."""
        return {"SLURM_CONF": str(self.dir / "slurm.conf")}

    def run(self, *words: str) -> str:
        """What a command of Slurm's prints; PacelineError if it fails."""
        env = os.environ | self.env
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=_LIMIT_S, cwd=self.dir)
        if done.returncode:
            raise PacelineError(f"{' '.join(words)}: {done.stderr.strip()}")
        return done.stdout

    def __enter__(self) -> Slurm:
        if reason := self.missing():
            raise ConfigError(f"cannot make a Slurm: {reason}")
        for name in ("state", *(f"spool-{node}" for node in self.nodes)):
            (self.dir / name).mkdir(parents=True, exist_ok=True)
        self.dir.chmod(0o755)  # munge wants to know that nobody else writes here
        key = self.dir / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        host = socket.gethostname().partition(".")[0]
        ports = _free_ports(1 + len(self.nodes))
        nodes = [_NODE.format(n=n, host=host, port=p, cpus=self._cpus) for n, p in enumerate(ports[1:], 1)]
        own = {"folder": self.dir, "host": host, "port": ports[0], "count": len(self.nodes)}
        text = _CONF.format(more="\n".join(self._more), nodes="\n".join(nodes), **own)
        (self.dir / "slurm.conf").write_text(text)
        try:
            self._munge()
            self._start("slurmctld", "slurmctld", "-D", "-i")
            for node in self.nodes:
                self.start(node)
            self._await_nodes()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def start(self, node: str) -> None:
        self._start(node, "slurmd", "-D", "-N", node)

    def kill(self, node: str) -> None:
        """A node is lost: its daemon, and whatever it runs."""
        daemon = self._running.pop(node)
        daemon.kill()
        daemon.wait()
        self._end_all_on(node)

    def cancel_all(self) -> None:
        """End all jobs, and wait until the nodes are free."""
        jobs = self.run("squeue", "--noheader", "--format=%A").split()
        if jobs:
            with contextlib.suppress(PacelineError):  # one may end meanwhile
                self.run("scancel", "--signal=KILL", "--full", *jobs)
            with contextlib.suppress(PacelineError):
                self.run("scancel", *jobs)
        deadline = time.monotonic() + _LIMIT_S
        while self.run("squeue", "--noheader") and time.monotonic() < deadline:
            time.sleep(0.1)

    def close(self) -> None:
        """End all jobs, then all daemons."""
        with contextlib.suppress(PacelineError, OSError, subprocess.TimeoutExpired):
            self.cancel_all()
        for node in self.nodes:
            self._end_all_on(node)
        for name in reversed(list(self._running)):
            daemon = self._running.pop(name)
            daemon.terminate()
            try:
                daemon.wait(_LIMIT_S / 3)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _end_all_on(self, node: str) -> None:
        for pid in self._on(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _munge(self) -> None:
        files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        words = [f"--{option}={self.dir}/munge.{name}" for option, name in files.items()]
        self._start("munged", "munged", "--foreground", "--force", *words)
        self._await(lambda: (self.dir / "munge.socket").exists(), "munged")

    def _start(self, name: str, *words: str) -> None:
        program = shutil.which(words[0], path=_PATH)
        assert program
        env = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")} | self.env
        with (self.dir / f"{name}.out").open("ab") as log:
            self._running[name] = subprocess.Popen(
                [sys.executable, "-I", "-S", tether.__file__, "bind", str(os.getpid()), program, *words[1:]],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _await_nodes(self) -> None:
        def idle() -> bool:
            with contextlib.suppress(PacelineError):  # the controller is not up yet
                told = self.run("sinfo", "--noheader", "--partition=main", "--states=idle", "--format=%D")
                return told.strip() == str(len(self.nodes))
            return False

        self._await(idle, "slurmctld")

    def _await(self, ready: Callable[[], bool], name: str) -> None:
        deadline = time.monotonic() + _LIMIT_S
        while not ready():
            if any(daemon.poll() is not None for daemon in self._running.values()) or time.monotonic() > deadline:
                said = [(self.dir / f"{one}.out").read_text(errors="replace")[-2000:] for one in self._running]
                raise PacelineError(f"Slurm did not start (waited for {name}): {'; '.join(said)}")
            time.sleep(0.05)

    def _on(self, node: str) -> list[int]:
        """What a node runs, and the daemons of its steps, which stand apart from its own."""
        marks = {f"SLURM_CONF={self.dir / 'slurm.conf'}".encode(), f"SLURMD_NODENAME={node}".encode()}
        found = set()
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with contextlib.suppress(OSError):
                    if marks <= set((entry / "environ").read_bytes().split(b"\0")):
                        parent = _parent(entry)
                        stepd = (Path("/proc") / str(parent) / "comm").read_text().startswith("slurmstepd")
                        found |= {int(entry.name), *([parent] if stepd else [])}
        return sorted(found)


def _parent(entry: Path) -> int:
    return int((entry / "stat").read_text().rpartition(")")[2].split()[1])


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(count)]
        for probe in sockets:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in sockets]
