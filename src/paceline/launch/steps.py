"""The way to the nodes of a Slurm allocation: a step on each, by srun, which carries the environment.

Where the run is found goes through the standard input, so that no command line shows the token. An agent ends when the
step does, and drains when the input ends. SIGTERM is sent to all steps of a job, so it is for the run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

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
_STEP = ("--overlap", "--nodes=1", "--ntasks=1", "--kill-on-bad-exit=0")


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
        return [*self.words(host), self.python or sys.executable, *agent, *more]

    def input(self, host: str, slots: int, labels: tuple[str, ...]) -> bytes:
        """Nothing but where the run is found."""
        return b""
