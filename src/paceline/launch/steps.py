"""The way to the nodes of a Slurm allocation: a step on each, by srun, which carries the environment.

Where the run is found goes through the standard input, so that no command line shows the token. An agent ends when the
step does, and drains when the input ends. SIGTERM is sent to all steps of a job, so it is for the run. Members that
stay have a step each.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.launch import jobs

# What srun takes from the allocation for its tasks: here one task has all that a node has of it.
_OF_TASKS = (
    *(
        "SLURM_CPUS_PER_TASK",
        "SRUN_CPUS_PER_TASK",
        "SLURM_NTASKS_PER_NODE",
        "SLURM_NTASKS_PER_GPU",
        "SLURM_DISTRIBUTION",
    ),
    *("SLURM_GPUS", "SLURM_GPUS_PER_TASK", "SLURM_CPUS_PER_GPU", "SLURM_TRES_PER_TASK"),
    *("SLURM_CPU_BIND", "SLURM_CPU_BIND_LIST", "SLURM_CPU_BIND_TYPE", "SLURM_CPU_BIND_VERBOSE"),
)
_STEP = ("--overlap", "--nodes=1", "--ntasks=1", "--kill-on-bad-exit=0", "--quiet")  # it has much to say of signals


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Steps in the allocation that the environment names."""

    python: str = ""  # on the nodes; "": the same path as here
    cwd: str = ""

    def words(self, node: str, environ: Mapping[str, str] = os.environ) -> list[str]:
        """The srun command, up to the program.

        >>> Steps(cwd="/data").words("n1", {"SLURM_GPUS": "8"})[:5]
        ['env', '-u', 'SLURM_GPUS', 'srun', '--nodelist=n1']
        """
        misleading = [word for name in _OF_TASKS if name in environ for word in ("-u", name)]
        start = ["env", *misleading, "srun"] if misleading else ["srun"]
        return [*start, f"--nodelist={node}", *_STEP, f"--chdir={self.cwd}"]

    def command(self, host: str, slots: int, labels: tuple[str, ...]) -> list[str]:
        """What is started here for an agent there."""
        more = [word for label in labels for word in ("--label", label)]
        agent = ["-P", "-m", "paceline", "agent", "--join", "-", "--together", "--name", host, "--slots", str(slots)]
        return self.python_on(host, [*agent, *more])[0]

    def input(self, host: str, slots: int, labels: tuple[str, ...]) -> bytes:
        """Nothing but where the run is found."""
        return b""

    def python_on(self, host: str, arguments: Sequence[str]) -> tuple[list[str], bytes]:
        """What is started here so that Python runs there with these arguments; nothing goes into it first."""
        return [*self.words(host), self.python or sys.executable, *arguments], b""

    def start(self, host: str, program: str) -> subprocess.Popen[bytes]:
        """Run a program there, in a Python process of its own."""
        pipe = subprocess.PIPE
        command, _ = self.python_on(host, ["-c", program])
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)

    def passes(self, code: int, said: str) -> bool:
        """Nothing that a step fails by does: Slurm knows its nodes."""
        return False

    def why(self, host: str, code: int, said: str, printed: str = "") -> str:
        """Why a step did not start, or Python in it, by what srun said; and what to change."""
        if re.search(r"execve|No such file|command not found", said):
            python = self.python or sys.executable
            return f"host {host}: there is no {python}; share the disk with it, or give --python PATH"
        return f"host {host}: {jobs.refusal('srun', said or printed)} (exit code {code})"
