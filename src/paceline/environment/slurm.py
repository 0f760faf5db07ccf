"""A task of a Slurm step, started by srun.

The batch script itself, and a shell in an allocation, are no tasks: there this is a run of one, and `hint` says so.
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.core.errors import ConfigError
from paceline.environment import engine, hostlist
from paceline.environment.place import Place, below, given, whole

_STARTER = "srun"


def in_step(env: Mapping[str, str]) -> bool:
    """Whether this is a task of a step, and not somebody's shell."""
    return env.get("SLURM_STEP_ID", "").isdecimal() and not env.get("SLURM_PTY_PORT")


def detect(env: Mapping[str, str]) -> Place | None:
    if not in_step(env):
        return None
    hosts = hostlist.expand(given(env, "SLURM_STEP_NODELIST", _STARTER))
    size = "SLURM_STEP_NUM_TASKS" if env.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    job, step = given(env, "SLURM_JOB_ID", _STARTER), env["SLURM_STEP_ID"]
    again = env.get("SLURM_RESTART_COUNT", "0")
    here = env.get("SLURMD_NODENAME", "")
    place = Place(
        kind="slurm",
        job=f"Slurm job {job}, step {step}" + (f", restart {again}" if again != "0" else ""),
        rank=whole(env, "SLURM_PROCID", _STARTER),
        size=whole(env, size, _STARTER, least=1),
        local_rank=whole(env, "SLURM_LOCALID", _STARTER),
        local_size=_tasks_here(env, len(hosts)),
        other_host=next((host for host in hosts if host != here), ""),
    )
    below(place, "SLURM_PROCID", size, "SLURM_LOCALID", "SLURM_TASKS_PER_NODE")
    place = engine.meeting(place, env, hosts[0])
    on_first = not here or here == hosts[0] or bool(env.get("MASTER_ADDR") and env.get("MASTER_PORT"))
    if place.rank == 0 and place.keeps and not on_first:
        raise ConfigError(
            f"rank 0 of {place.job} runs on {here}, but the others look for it on {hosts[0]}, the first of the step: "
            f"set MASTER_ADDR={here} and a MASTER_PORT, or leave srun's --distribution out"
        )
    return place


def hint(env: Mapping[str, str]) -> str:
    """What to say to one who stands in an allocation, with room for more than this one process.

    >>> hint({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"})[:50]
    'in Slurm job 7, which has 4 tasks, but not as one '
    """
    tasks = env.get("SLURM_NTASKS", "")
    if not env.get("SLURM_JOB_ID") or not tasks.isdecimal() or int(tasks) < 2:
        return ""
    job = env["SLURM_JOB_ID"]
    return f"in Slurm job {job}, which has {tasks} tasks, but not as one of them: for all of them, start it with srun"


def _tasks_here(env: Mapping[str, str], num_hosts: int) -> int:
    name = "SLURM_STEP_TASKS_PER_NODE" if env.get("SLURM_STEP_TASKS_PER_NODE") else "SLURM_TASKS_PER_NODE"
    counts = hostlist.tasks(given(env, name, _STARTER))
    here = whole(env, "SLURM_NODEID", _STARTER) if num_hosts > 1 else 0
    if here >= len(counts) or len(counts) != num_hosts:
        raise ConfigError(
            f"SLURM_NODEID={here}, {name}={env[name]!r} and SLURM_STEP_NODELIST={env['SLURM_STEP_NODELIST']!r} "
            "contradict each other: one of them is left over from another step; start the script with srun"
        )
    return counts[here]
