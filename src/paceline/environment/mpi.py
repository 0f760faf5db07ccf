"""A rank of mpirun or mpiexec: Open MPI, or what speaks PMI (MPICH, Intel MPI, Cray).

MPI itself is not used: it only starts the members. It does not say on which host rank 0 is, so that where there are
several, MASTER_ADDR must.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from paceline.core.errors import ConfigError
from paceline.environment import engine, slurm
from paceline.environment.place import Place, below, whole


class _Names(NamedTuple):
    starter: str
    rank: str
    size: str
    local_rank: str
    local_size: str


_OPEN_MPI = _Names(
    "Open MPI's mpirun",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
_HYDRA = _Names("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_PALS = _Names("mpiexec", "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")
# What tells this start from others on the same host: the first that is set.
_JOBS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PALS_APID", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")


def detect(env: Mapping[str, str]) -> Place | None:
    names = _names(env)
    if names is None:
        return None
    id = next((env[name] for name in _JOBS if env.get(name)), "")
    place = Place(
        kind="mpi",
        job=f"{names.starter}{f' ({id})' if id else ''}",
        rank=whole(env, names.rank, names.starter),
        size=whole(env, names.size, names.starter, least=1),
        local_rank=whole(env, names.local_rank, names.starter),
        local_size=whole(env, names.local_size, names.starter, least=1),
    )
    return engine.meeting(below(place, *names[1:]), env)


def _names(env: Mapping[str, str]) -> _Names | None:
    if env.get(_OPEN_MPI.rank) or env.get(_OPEN_MPI.size):
        return _OPEN_MPI
    if env.get("PMI_RANK"):
        if slurm.in_step(env) and env["PMI_RANK"] == env.get("SLURM_PROCID"):
            return None  # srun speaks PMI too, and says more in variables of its own
        return _PALS if env.get("PMI_LOCAL_RANK") else _HYDRA
    if env.get("PMIX_RANK") and not slurm.in_step(env):
        raise ConfigError(
            f"PMIX_RANK={env['PMIX_RANK']!r} is set, but neither OMPI_COMM_WORLD_SIZE nor another variable says how "
            "many ranks there are: start the script with mpirun or srun, or unset PMIX_RANK to run it alone"
        )
    return None
