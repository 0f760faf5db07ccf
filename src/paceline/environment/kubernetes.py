"""A pod of Kubernetes: of a Kubeflow TrainJob or PyTorchJob, or of an indexed Job, as those of a JobSet are.

One member per pod. Member 0 keeps the rendezvous, under the name that its headless service gives it; the token is
demanded, as a Secret in PACELINE_TOKEN, since a pod shares nothing else with the others that strangers do not see. For
more members per pod let torchrun or paceline start them; their variables go before these.
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.core.errors import ConfigError
from paceline.environment import engine
from paceline.environment.place import Place, below, given, whole

PORT = 29400  # a pod has its ports to itself


def detect(env: Mapping[str, str]) -> Place | None:
    inside = bool(env.get("KUBERNETES_SERVICE_HOST"))
    if inside and env.get("RANK") and env.get("WORLD_SIZE") and not env.get("LOCAL_RANK"):
        place = _pytorch_job(env)
    elif inside and env.get("PET_NODE_RANK"):
        place = _train_job(env)
    elif env.get("JOB_COMPLETION_INDEX") and env.get("WORLD_SIZE"):
        place = _of(_numbered(env), "indexed Job", "JOB_COMPLETION_INDEX", _first_pod(env))
    else:
        return None
    if place.size > 1 and not place.token:
        raise ConfigError(
            f"PACELINE_TOKEN is not set in this pod of a {place.job}: members prove themselves by it, and a cluster "
            "gives them no secret of their own; make one (kubectl create secret generic train --from-literal="
            'token="$(openssl rand -hex 32)") and put it into the container\'s env as PACELINE_TOKEN'
        )
    return place


def hint(env: Mapping[str, str]) -> str:
    """What to say in a pod of an indexed Job, which may be one of several independent ones."""
    if not env.get("JOB_COMPLETION_INDEX"):
        return ""
    return (
        f"pod {env['JOB_COMPLETION_INDEX']} of an indexed Job, without WORLD_SIZE: if the pods are to train together, "
        "set it to their number"
    )


def _pytorch_job(env: Mapping[str, str]) -> Place:
    """Its operator sets torchrun's PET_ variables besides; "auto" processes where the user says nothing."""
    here, nodes = env.get("PET_NPROC_PER_NODE") or "1", (env.get("PET_NNODES") or "").rpartition(":")[2]
    if here != "auto" or nodes not in ("", env["WORLD_SIZE"]):
        _one_each(here, "PyTorchJob")
    if (number := env.get("PET_NODE_RANK") or env["RANK"]) != env["RANK"]:
        raise ConfigError(
            f"RANK={env['RANK']!r} contradicts PET_NODE_RANK={number!r}: the PyTorchJob's operator sets both, and a "
            "TrainJob's only the second; do not set RANK and WORLD_SIZE by hand"
        )
    return _of(env, "PyTorchJob", "RANK")


def _one_each(here: str, kind: str) -> None:
    if here != "1":
        raise ConfigError(
            f"PET_NPROC_PER_NODE={here!r} asks for several processes in each pod, but this was not started by "
            f"torchrun, which starts them: write torchrun train.py into the {kind}, not python train.py"
        )


def _train_job(env: Mapping[str, str]) -> Place:
    _one_each(env.get("PET_NPROC_PER_NODE") or "1", "TrainJob")
    # torchrun reads these; so a script that is started without it can be told of them in the names that it knows.
    known = {"MASTER_ADDR": env.get("PET_MASTER_ADDR", ""), "MASTER_PORT": env.get("PET_MASTER_PORT", "")}
    told = {**env, **{name: value for name, value in known.items() if value}}
    told["WORLD_SIZE"] = (env.get("PET_NNODES") or "").rpartition(":")[2]  # MIN:MAX where it is elastic
    return _of(told, "TrainJob", "PET_NODE_RANK")


def _of(env: Mapping[str, str], kind: str, rank: str, first_pod: str = "") -> Place:
    starter = f"the {kind}"
    place = Place(
        kind="kubernetes",
        job=f"Kubernetes {kind}",
        rank=whole(env, rank, starter),
        size=whole(env, "WORLD_SIZE", starter, least=1),
        other_host=env.get("KUBERNETES_SERVICE_HOST", ""),
    )
    if place.size > 1 and not first_pod and not env.get("PACELINE_RENDEZVOUS"):
        given(env, "MASTER_ADDR", starter)
    below(place, rank, "WORLD_SIZE", rank, "WORLD_SIZE")
    return engine.meeting(place, env, first_pod, port=PORT)


def _numbered(env: Mapping[str, str]) -> Mapping[str, str]:
    """With a pod's number among those of all Jobs of a JobSet, where there are several (`replicas`): each numbers its
    own from 0. Which of them this is, is in a label that may be passed, and in the pod's name."""
    begins = f"{env.get('JOBSET_NAME')}-{env.get('REPLICATED_JOB_NAME')}-"
    name = env.get("HOSTNAME", "").removeprefix(begins).split("-") if env.get("JOBSET_NAME") else []
    found = env.get("JOB_INDEX") or (name[0] if len(name) == 2 and "".join(name).isdecimal() else "0")
    starter = "the JobSet"
    job = whole({"JOB_INDEX": found}, "JOB_INDEX", starter)
    if not env.get("REPLICATED_JOB_REPLICAS"):
        if not job:
            return env
        raise ConfigError(
            f"this pod is of Job {job} of a JobSet, and each of its Jobs numbers its pods from 0: give the replicated "
            "job replicas: 1 and as many completions as members, or pass the label "
            "jobset.sigs.k8s.io/replicatedjob-replicas to the pods as REPLICATED_JOB_REPLICAS"
        )
    jobs, size = whole(env, "REPLICATED_JOB_REPLICAS", starter, least=1), whole(env, "WORLD_SIZE", starter, least=1)
    if size % jobs:
        raise ConfigError(
            f"WORLD_SIZE={size} is not a multiple of REPLICATED_JOB_REPLICAS={jobs}: set it to the pods of all Jobs"
        )
    index = whole(env, "JOB_COMPLETION_INDEX", starter)
    return {**env, "JOB_COMPLETION_INDEX": str(job * (size // jobs) + index)}


def _first_pod(env: Mapping[str, str]) -> str:
    """The first pod of a JobSet, whose labels are in variables: as its headless service names it."""
    names = (env.get("JOBSET_NAME"), env.get("REPLICATED_JOB_NAME"))
    return f"{names[0]}-{names[1]}-0-0.{names[0]}" if all(names) else ""
