"""The script of a Slurm job: it starts the launcher in the allocation, and may put the job back into the queue.

A run that must go leaves a checkpoint, and the job that begins again goes on from it, since the run has the same name.
Before its time is over, or when its nodes are taken, Slurm signals the script: USR1 where it asked for that, else TERM.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

FILE = "slurm.sh"
NOTICE_S = 60  # before the end of the job's time; Slurm may be as much late
_START = """\
cd {cwd} || exit 1
{command} &
launcher=$!
"""
# A job that ends within the grace of those who take its nodes is not requeued by Slurm.
_AWAIT = """\
again= told=yes
trap 'told=yes again=yes; kill -TERM $launcher' USR1
trap 'told=yes; kill -TERM $launcher' TERM INT
while [ -n "$told" ]; do told=; wait $launcher; code=$?; done  # a signal ends a wait too
"""
_REQUEUE = """\
scontrol show job "$SLURM_JOB_ID" | grep -q 'PreemptTime=[0-9]' && again=yes
if [ -n "$again" ] && [ $code -ne 0 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
"""


def script(options: Sequence[str], words: Sequence[str], cwd: Path, *, fresh: bool, requeue: bool) -> str:
    """The text of it.

    Args:
        options: of sbatch.
        words: that start the launcher, the first five as in `python -P -m paceline run`.
        fresh: it starts over, but not when it was in the queue again.
    """
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in options)]
    if requeue:
        lines += ["#SBATCH --requeue", "#SBATCH --open-mode=append", f"#SBATCH --signal=B:USR1@{NOTICE_S}"]
    after = f"{_AWAIT}{_REQUEUE if requeue else ''}exit $code\n"
    command = shlex.join(words)
    if fresh:
        lines.append('fresh=--fresh; [ -z "$SLURM_RESTART_COUNT" ] || fresh=')
        command = f"{shlex.join(words[:5])} $fresh {shlex.join(words[5:])}"
    return "\n".join(lines) + "\n" + _START.format(cwd=shlex.quote(str(cwd)), command=command) + after
