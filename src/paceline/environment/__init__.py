"""Where am I: alone, under `paceline run`, under torchrun, or started by an engine. Starts and opens nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

from paceline.core.errors import ConfigError
from paceline.environment import alone, kubernetes, mpi, paceline, ray, slurm, torchrun
from paceline.environment.place import Place, this_host

__all__ = ["Place", "crowd", "detect", "this_host"]

# Whoever started this process last stands first: mpirun starts its daemons by srun, Ray and Slurm run in pods.
_ENGINES = (ray, mpi, slurm, kubernetes)


def detect(env: Mapping[str, str] = os.environ) -> Place:
    """The place that the environment describes: our own launcher comes before torchrun, torchrun before the engines,
    and these before none.

    >>> detect({}).kind
    'alone'
    >>> detect({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    ...         "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}).kind
    'mpi'
    """
    if paceline.given_a_place(env):
        return paceline.detect(env)
    if torchrun.complete(env):
        place = torchrun.detect(env)
        assert place is not None
        if not torchrun.by_its_agent(env):
            _compare(_engine(env), env)
        return place
    if place := _engine(env):
        _compare(place, env)
        return place
    paceline.refuse_parts(env)
    return torchrun.detect(env) or alone.detect(env)


def crowd(env: Mapping[str, str] = os.environ) -> str:
    """For a launcher: the engine that has started it several times over, in words; "": none.

    >>> crowd({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    ...        "OMPI_COMM_WORLD_LOCAL_SIZE": "2"})
    "rank 1 of 2 of Open MPI's mpirun"
    """
    with contextlib.suppress(ConfigError):  # of a place that is only half described, which the launcher does not need
        place = _engine(env)
        if place and place.size > 1:
            return f"rank {place.rank} of {place.size} of {place.job}"
    return ""


def _engine(env: Mapping[str, str]) -> Place | None:
    return next((place for engine in _ENGINES if (place := engine.detect(env))), None)


def _compare(place: Place | None, env: Mapping[str, str]) -> None:
    """Refuse RANK and WORLD_SIZE that somebody set by hand, or that are left over, if an engine says otherwise."""
    for name, told in (("RANK", place.rank), ("WORLD_SIZE", place.size)) if place else ():
        if env.get(name, str(told)) != str(told):
            assert place is not None
            raise ConfigError(
                f"{name}={env[name]!r} contradicts {place.job}, which says {told}: unset RANK, WORLD_SIZE, LOCAL_RANK "
                f"and LOCAL_WORLD_SIZE, or do not start the script by {place.kind}"
            )
