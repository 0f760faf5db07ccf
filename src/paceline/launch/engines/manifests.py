"""What Kubernetes is told of a run: a Secret with the token, a claim for its files, and a JobSet or a TrainJob.

The first pod has the scheduler and the first members (`paceline run --listen`), each other one an agent (`paceline
agent`): a member or pod that is lost is replaced, and the others go on. The first is found under the name that the
JobSet's headless service gives it. When it is lost, the JobSet starts all pods again, and the run goes on from its last
checkpoint on the volume.

A TrainJob runs the same command in all pods, so a shell looks at the pod's number; what follows a loss is up to the
training runtime there.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from paceline.core.errors import ConfigError
from paceline.launch.record import SUBMISSION
from paceline.launch.spec import JobSpec

Manifest: TypeAlias = dict[str, Any]

PORT = 29400
FILES = "/paceline"  # where the volume is, in every pod
_RESTARTS = 5  # of the whole, from the last checkpoint
_GRACE_S = 60  # for members to leave and to write a checkpoint, when a pod is taken away
_JOIN_S = 600  # for the first pod to have a place, its image and a name
_LONGEST = 40  # pods add to the name, and a host's name has 63 characters
_FIRST, _OTHERS = "first", "others"
KINDS = {"jobset": "jobset.jobset.x-k8s.io", "trainjob": "trainjob.trainer.kubeflow.org"}


@dataclass(frozen=True, kw_only=True)
class Pods:
    """Where a run goes."""

    run: str  # its name
    image: str
    kind: str = "jobset"
    namespace: str = ""  # "": kubectl's own
    per_pod: int = 1  # members
    gpus: int = 0  # per pod
    claim: str = ""  # that exists, for the run's files; "": one of the size `storage` is made
    storage: str = ""
    runtime: str = "torch-distributed"  # of a TrainJob
    submission: str = ""  # an id of these very manifests, by which --fresh is obeyed once, and not at each restart

    @property
    def name(self) -> str:
        """The run's name as Kubernetes allows it. One that had to be changed gets digits of its own, so that two runs
        never share a Secret.

        >>> Pods(run="digits-1", image="i").name, Pods(run="My_Run", image="i").name
        ('digits-1', 'my-run-309ffa73')
        """
        name = re.sub(r"[^a-z0-9]+", "-", self.run.lower()).strip("-")
        name = name if name[:1].isalpha() else f"run-{name}".strip("-")
        if name == self.run and len(name) <= _LONGEST:
            return name
        digits = hashlib.sha256(self.run.encode()).hexdigest()[:8]
        return f"{name[: _LONGEST - 9].strip('-')}-{digits}"


def manifests(spec: JobSpec, pods: Pods, token: str) -> list[Manifest]:
    """All that is told, in this order."""
    assert spec.elastic
    made = [_secret(pods, token)]
    if not pods.claim:
        made.append(_claim(pods, many=_count(spec, pods) > 1))
    return [*made, _job_set(spec, pods) if pods.kind == "jobset" else _train_job(spec, pods)]


def text(manifests: Sequence[Manifest]) -> str:
    """As YAML."""
    return "".join(f"---\n{_yaml(manifest)}" for manifest in manifests)


# ---- what runs in a pod


def first(spec: JobSpec, pods: Pods, address: str) -> list[str]:
    """The launcher's command, in the first pod, whose address is `address`."""
    assert spec.elastic
    elastic = spec.elastic
    words = ["python", "-m", "paceline", "run", "-n", f"{elastic.least}:{elastic.most}"]
    words += ["--listen", address, "--port", str(PORT), "--slots", str(pods.per_pod)]
    words += ["--name", pods.run, "--root", f"{FILES}/runs", "--progress", spec.settings.progress]
    words += ["--replacements", str(elastic.replacements), "--silence-s", str(elastic.silence_s)]
    words += ["--standbys", str(elastic.standbys), *_threads(spec), *_labels(spec)]
    for name in sorted(set(spec.settings.pinned) - {"name", "root", "progress"}):
        value = getattr(spec.settings, name)
        option = "--" + name.replace("_", "-")
        words += [option] if value is True else [option, str(value)]
    return [*words, *(["-m"] if spec.module else []), spec.script, *spec.args]


def other(spec: JobSpec, pods: Pods, address: str, name: str) -> list[str]:
    """An agent's command, in another pod of this name, which joins the first at `address`."""
    words = ["python", "-m", "paceline", "agent", "--join", f"{address}:{PORT}", "--slots", str(pods.per_pod)]
    return [*words, "--name", name, "--limit-s", str(_JOIN_S), *_labels(spec)]


def _threads(spec: JobSpec) -> list[str]:
    return ["--threads", str(spec.threads)] if spec.threads else []


def _labels(spec: JobSpec) -> list[str]:
    return [word for label in spec.labels for word in ("--label", label)]


def _count(spec: JobSpec, pods: Pods) -> int:
    return math.ceil(spec.size / pods.per_pod)


# ---- what is told to Kubernetes


def _head(pods: Pods, version: str, kind: str) -> Manifest:
    labels = {"app.kubernetes.io/managed-by": "paceline", "app.kubernetes.io/instance": pods.name}
    place = {"namespace": pods.namespace} if pods.namespace else {}
    return {"apiVersion": version, "kind": kind, "metadata": {"name": pods.name, **place, "labels": labels}}


def _secret(pods: Pods, token: str) -> Manifest:
    return {**_head(pods, "v1", "Secret"), "type": "Opaque", "stringData": {"token": token}}


def _claim(pods: Pods, *, many: bool) -> Manifest:
    if not pods.storage:
        raise ConfigError(
            "--on kubernetes: where do checkpoints go? --claim NAME for a PersistentVolumeClaim that exists, or "
            "--storage 10Gi to have one made"
        )
    # Checkpoints are written by the first member, wherever it is.
    modes = ["ReadWriteMany" if many else "ReadWriteOnce"]
    spec = {"accessModes": modes, "resources": {"requests": {"storage": pods.storage}}}
    return {**_head(pods, "v1", "PersistentVolumeClaim"), "spec": spec}


def _job_set(spec: JobSpec, pods: Pods) -> Manifest:
    where = f"{pods.name}-{_FIRST}-0-0.{pods.name}"
    launcher = _container(spec, pods, _literal(first(spec, pods, "\0POD_IP")))
    # Others are started once it answers: there is then somebody to join.
    launcher["readinessProbe"] = {"tcpSocket": {"port": PORT}, "periodSeconds": 2, "failureThreshold": 150}
    launcher["ports"] = [{"containerPort": PORT}]
    jobs = [_replicated(_FIRST, 1, 0, launcher, pods)]  # when it fails, so does the set, which is then started again
    if (others := _count(spec, pods) - 1) > 0:
        agent = _container(spec, pods, _literal(other(spec, pods, where, "\0POD_NAME")))
        jobs.append(_replicated(_OTHERS, others, 100 * others, agent, pods))
    return {
        **_head(pods, "jobset.x-k8s.io/v1alpha2", "JobSet"),
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": pods.name, "publishNotReadyAddresses": True},
            "startupPolicy": {"startupPolicyOrder": "InOrder"},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": [_FIRST]},
            "failurePolicy": {"maxRestarts": _RESTARTS},
            "replicatedJobs": jobs,
        },
    }


def _replicated(name: str, count: int, restarts: int, container: Manifest, pods: Pods) -> Manifest:
    pod = {
        "restartPolicy": "OnFailure" if restarts else "Never",
        "terminationGracePeriodSeconds": _GRACE_S,
        "containers": [container],
        "volumes": _volumes(pods),
    }
    job = {"completionMode": "Indexed", "completions": count, "parallelism": count, "backoffLimit": restarts}
    return {"name": name, "replicas": 1, "template": {"spec": {**job, "template": {"spec": pod}}}}


def _train_job(spec: JobSpec, pods: Pods) -> Manifest:
    launcher = _shell(first(spec, pods, "\0POD_IP"))
    agent = _shell(other(spec, pods, "\0PET_MASTER_ADDR", "\0POD_NAME"))
    # A runtime without torch's policy numbers nobody: all pods would wait for a first one.
    numbered = f': "${{PET_NODE_RANK:?is not set: runtime {pods.runtime} has no mlPolicy torch, see --runtime}}"'
    script = f'{numbered}; if [ "$PET_NODE_RANK" = 0 ]; then exec {launcher}; fi; exec {agent}'
    container = _container(spec, pods, ["sh", "-c", _verbatim(script)])
    trainer = {
        **{name: container[name] for name in ("image", "command", "env")},
        "numNodes": _count(spec, pods),
        "numProcPerNode": 1,
        **({"resourcesPerNode": container["resources"]} if "resources" in container else {}),
    }
    mounts = [{"name": "node", "volumeMounts": container["volumeMounts"]}]
    pod = {"terminationGracePeriodSeconds": _GRACE_S, "containers": mounts, "volumes": _volumes(pods)}
    job = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    patch = {"manager": "paceline", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job]}}}}
    return {
        **_head(pods, "trainer.kubeflow.org/v1alpha1", "TrainJob"),
        "spec": {"runtimeRef": {"name": pods.runtime}, "trainer": trainer, "runtimePatches": [patch]},
    }


def _container(spec: JobSpec, pods: Pods, command: list[str]) -> Manifest:
    limits = {"nvidia.com/gpu": pods.gpus}
    return {
        "name": "paceline",
        "image": pods.image,
        "command": command,
        "env": _env(spec.env, pods),
        **({"resources": {"limits": limits, "requests": limits}} if pods.gpus else {}),
        "volumeMounts": [{"name": "files", "mountPath": FILES}, {"name": "memory", "mountPath": "/dev/shm"}],
    }


def _env(more: Mapping[str, str], pods: Pods) -> list[Manifest]:
    fields = {"POD_IP": "status.podIP", "POD_NAME": "metadata.name"}
    return [
        *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()),
        {"name": "PACELINE_TOKEN", "valueFrom": {"secretKeyRef": {"name": pods.name, "key": "token"}}},
        {"name": SUBMISSION, "value": pods.submission},
        *({"name": name, "value": _verbatim(value)} for name, value in more.items()),
    ]


def _volumes(pods: Pods) -> list[Manifest]:
    return [
        {"name": "files", "persistentVolumeClaim": {"claimName": pods.claim or pods.name}},
        {"name": "memory", "emptyDir": {"medium": "Memory"}},  # pods have 64 MB by default, too few for data loaders
    ]


def _literal(words: list[str]) -> list[str]:
    """Words as Kubernetes takes them: \\0NAME is a variable, and nothing else is."""
    return [f"$({word[1:]})" if word[:1] == "\0" else _verbatim(word) for word in words]


def _verbatim(text: str) -> str:
    """As Kubernetes writes what it is not to expand: of $$ it makes $, and of $(NAME) that variable's value."""
    return text.replace("$", "$$")


def _shell(words: list[str]) -> str:
    """Words as a shell takes them; \\0NAME is a variable, also as the beginning of a word."""
    quoted = []
    for word in words:
        name = re.match(r"\0(\w+)", word)
        quoted.append(f'"${{{name[1]}}}"{word[name.end() :]}' if name else shlex.quote(word))
    return " ".join(quoted)


# ---- YAML


def _yaml(value: Any, indent: int = 0) -> str:
    """A value in lines. Words are written as JSON writes them, which YAML takes too."""
    pad = "  " * indent
    if isinstance(value, dict):
        return "".join(f"{pad}{key}:{_behind(each, indent)}" for key, each in value.items())
    return "".join(f"{pad}-{_behind(each, indent, item=True)}" for each in value)


def _behind(value: Any, indent: int, *, item: bool = False) -> str:
    if isinstance(value, dict | list) and value:
        lines = _yaml(value, indent + 1)
        return f" {lines.lstrip()}" if item and isinstance(value, dict) else f"\n{lines}"
    return f" {json.dumps(value, ensure_ascii=False)}\n"
