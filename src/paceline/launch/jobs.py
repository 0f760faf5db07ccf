"""Slurm's commands about jobs: submit one, ask how it stands, take it back. What they refuse is told in their words."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from paceline.core.errors import ConfigError

INSTALL = "apt-get install slurm-client, or go to a host from which jobs are submitted"
_LIMIT_S = 60.0
_TAIL = 15  # lines
# What sbatch and srun say, and what to do about it.
_REFUSALS = (
    (r"artition name|invalid partition", "sinfo lists the partitions"),
    (r"[Ii]nvalid account|account/partition", "sacctmgr show associations user=$USER lists your accounts"),
    (
        r"[Nn]ode configuration|[Nn]ode count|[Tt]oo many|[Cc]PU count|Memory specification",
        "there is no room for as much: start fewer members (-n), with fewer --threads; sinfo -Nl lists the nodes",
    ),
    (r"[Tt]ime ?limit|time limit", "give less with --time; sinfo lists the limits"),
    (r"gres|GRES|generic resource", "give other --gpus; sinfo -o '%N %G' lists what nodes have"),
    (r"contact slurm controller|[Uu]nable to connect", "is the controller up? sinfo asks it too"),
    (r"unrecognized option|invalid option|Invalid --|directive", "see --sbatch, and man sbatch"),
)
# Why a job waits, where Slurm's word for it does not say what to do.
_WAITS = {
    "Priority": "others are before it",
    "Resources": "for nodes that are in use",
    "ReqNodeNotAvail": "for nodes that are down or reserved",
    "Dependency": "for another job",
    "BeginTime": "for a moment, as it was in the queue before",
    "PartitionConfig": "for what its partition does not have: start fewer members, or give less --time",
    "PartitionTimeLimit": "for ever: --time is above what its partition allows",
    "PartitionNodeLimit": "for ever: its partition does not allow as many nodes",
    "JobHeldUser": "held: scontrol release {id}",
    "JobHeldAdmin": "held by who runs the cluster",
    "launch failed requeued held": "held, since it could not be started: scontrol release {id}",
}


class Job(NamedTuple):
    """How a job stands."""

    state: str  # PENDING, RUNNING, COMPLETED and so on; "": Slurm does not know it any more
    reason: str = ""
    nodes: str = ""
    code: str = ""  # as Slurm writes it, 1:0

    @property
    def waits(self) -> bool:
        return self.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "CONFIGURING", "SUSPENDED")

    @property
    def over(self) -> bool:
        return not self.waits and self.state not in ("RUNNING", "COMPLETING")


def call(*words: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """ConfigError where Slurm is not installed, or does not answer."""
    if shutil.which(words[0]) is None:
        raise ConfigError(f"--on slurm needs {words[0]}, which is not installed here: {INSTALL}")
    try:
        return subprocess.run(
            words, capture_output=True, text=True, timeout=_LIMIT_S, env=env, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{words[0]} did not answer within {_LIMIT_S:g} s: is the controller up? sinfo asks it too"
        ) from None


def submit(script: Path, env: Mapping[str, str]) -> str:
    """The number of the job."""
    done = call("sbatch", "--parsable", str(script), env=env)
    number = done.stdout.strip().partition(";")[0]
    if done.returncode or not number.isdecimal():
        raise ConfigError(refusal("sbatch", done.stderr or done.stdout))
    return number


def refusal(command: str, said: str) -> str:
    """
    >>> refusal("sbatch", "sbatch: error: invalid partition specified: x\\nsbatch: error: Batch job submission failed")
    'sbatch refuses: invalid partition specified: x; Batch job submission failed; sinfo lists the partitions'
    """
    lines = [re.sub(r"^\w+: (error: )?", "", line) for line in said.strip().splitlines() if line.strip()]
    hints = [hint for pattern, hint in _REFUSALS if re.search(pattern, said)]
    return f"{command} refuses: {'; '.join([*(lines or ['no reason given']), *hints[:1]])}"


def ask(id: str) -> Job:
    """Of the queue; of a job that has left it, of what the controller or the accounting remembers."""
    done = call("squeue", "--noheader", f"--jobs={id}", "--format=%T|%r|%N|")
    if not done.returncode and done.stdout.strip():
        state, reason, nodes = done.stdout.strip().splitlines()[0].split("|")[:3]
        return Job(state, reason, nodes)
    if "contact" in done.stderr or "connect" in done.stderr:
        raise ConfigError(refusal("squeue", done.stderr))
    told = call("scontrol", "--oneliner", "show", "job", id).stdout
    if found := re.search(r"JobState=(\S+)", told):
        code = re.search(r"ExitCode=(\S+)", told)
        return Job(found[1], code=code[1] if code else "")
    if shutil.which("sacct"):
        told = call(
            "sacct", "--noheader", "--allocations", "--parsable2", f"--jobs={id}", "--format=State,ExitCode"
        ).stdout
        if "|" in told:
            state, code_ = told.strip().splitlines()[0].split("|")[:2]
            return Job(state.split()[0], code=code_)
    return Job("")


def told(id: str, since: float, log: str = "") -> str:
    """How a job stands, in half a line; of one that failed, with the last lines of its output."""
    job = ask(id)
    name = f"Slurm job {id}"
    if not job.state:
        return f"{name} is not known to Slurm any more" + _tail(log)
    if job.waits:
        why = _WAITS.get(job.reason.partition(",")[0].strip("()"), "").format(id=id)
        return f"{name} waits {why or f'({job.reason})'}{f' ({job.reason})' if why else ''}, for {_span(since)}"
    if not job.over:
        return f"{name} runs{f' on {job.nodes}' if job.nodes else ''}"
    how = job.state.lower().replace("_", " ")
    code = f" with exit code {job.code.partition(':')[0]}" if job.code not in ("", "0:0") else ""
    return f"{name} ended: {how}{code}" + ("" if job.state == "COMPLETED" else _tail(log))


def cancel(id: str) -> str:
    """What was done."""
    if (job := ask(id)).over:
        return f"Slurm job {id} is over already" + (f": {job.state.lower()}" if job.state else "")
    done = call("scancel", id)
    if done.returncode:
        raise ConfigError(refusal("scancel", done.stderr))
    return f"Slurm job {id} is taken back" if job.waits else f"Slurm job {id} is told to end"


def _tail(log: str) -> str:
    try:
        lines = Path(log).read_text(errors="replace").splitlines()[-_TAIL:] if log else []
    except OSError:
        lines = []
    return f"; the last lines of {log}:\n" + "\n".join(f"  {line}" for line in lines) if lines else ""


def _span(since: float) -> str:
    seconds = max(0.0, time.time() - since)
    return (
        f"{seconds:.0f} s"
        if seconds < 60
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.0f} h"
    )
