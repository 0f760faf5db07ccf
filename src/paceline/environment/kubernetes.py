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
    if inside and env.get("PET_NODE_RANK"):
        place = _train_job(env)
    elif inside and env.get("RANK") and env.get("WORLD_SIZE") and not env.get("LOCAL_RANK"):
        place = _of(env, "PyTorchJob", "RANK")
    elif env.get("JOB_COMPLETION_INDEX") and env.get("WORLD_SIZE"):
        place = _of(env, "indexed Job", "JOB_COMPLETION_INDEX", _first_pod(env))
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


def _train_job(env: Mapping[str, str]) -> Place:
    here = env.get("PET_NPROC_PER_NODE") or "1"
    if here != "1":
        raise ConfigError(
            f"PET_NPROC_PER_NODE={here!r} asks for several processes in each pod, but this was not started by "
            "torchrun, which starts them: write torchrun train.py into the TrainJob, not python train.py"
        )
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


def _first_pod(env: Mapping[str, str]) -> str:
    """The first pod of a JobSet, whose labels are in variables: as its headless service names it."""
    names = (env.get("JOBSET_NAME"), env.get("REPLICATED_JOB_NAME"))
    return f"{names[0]}-{names[1]}-0-0.{names[0]}" if all(names) else ""
