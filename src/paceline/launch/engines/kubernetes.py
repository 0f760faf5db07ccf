"""Members in pods: writes the manifests of a run (`manifests`), and with --apply hands them to kubectl.

What is written holds the token, in a Secret: a file of it is for its owner alone. A run that was applied is held by
the cluster: `paceline status` and `paceline stop` ask it, through kubectl.
"""

from __future__ import annotations

import secrets
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from paceline.core.directory import new_name, write_private
from paceline.core.errors import ConfigError, nearest
from paceline.launch import held
from paceline.launch.engines import Option, Shown, Submitted
from paceline.launch.engines.manifests import KINDS, Pods, manifests, text
from paceline.launch.held import Held
from paceline.launch.spec import Elastic, JobSpec

_KUBECTL_S = 60.0
_SEEN = "jsonpath={range .status.conditions[?(@.status=='True')]}{.type} {end}"


def whole(text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"{text!r} is not a whole number of at least 0")
    return int(text)


@dataclass(frozen=True, kw_only=True)
class Engine:
    """`--on kubernetes`."""

    OPTIONS: ClassVar[tuple[Option, ...]] = (
        Option(field="image", metavar="IMAGE", help="of the containers, with Paceline and the script in it"),
        Option(field="kind", metavar="|".join(KINDS), help="of manifest (default: jobset)"),
        Option(field="namespace", metavar="NAME", help="where it runs (default: kubectl's)"),
        Option(field="per_pod", metavar="K", parse=whole, help="members in each pod (default: 1)"),
        Option(field="gpus", metavar="K", parse=whole, help="of each pod (default: 0)"),
        Option(field="claim", metavar="NAME", help="a PersistentVolumeClaim that exists, for checkpoints and logs"),
        Option(field="storage", metavar="SIZE", help="such as 10Gi: a claim of this size is made"),
        Option(field="runtime", metavar="NAME", help="of --kind trainjob (default: torch-distributed)"),
        Option(field="output", metavar="FILE", help="where the manifests are written (default: standard output)"),
        Option(field="apply", help="hand the manifests to kubectl"),
    )
    spreads: ClassVar[bool] = True
    elsewhere: ClassVar[bool] = False

    image: str = ""
    kind: str = "jobset"
    namespace: str = ""
    per_pod: int = 1
    gpus: int = 0
    claim: str = ""
    storage: str = ""
    runtime: str = "torch-distributed"
    output: str = ""
    apply: bool = False

    def prepare(self, spec: JobSpec) -> JobSpec:
        elastic = spec.elastic
        assert elastic
        if not self.image:
            raise ConfigError("--on kubernetes: which image? --image registry/name:tag, with Paceline and the script")
        if self.kind not in KINDS:
            raise ConfigError(f"--kind {self.kind!r}: {nearest(self.kind, KINDS)}")
        if self.per_pod < 1:
            raise ConfigError("--per-pod 0: a pod has at least one member")
        if self.claim and self.storage:
            raise ConfigError(
                "--claim and --storage: files go to a claim that exists or to a new one; give one of them"
            )
        for given, option in (
            (elastic.hosts, "--hosts"),
            (elastic.listen, "--listen"),
            (elastic.port, "--port"),
            (elastic.start_on != Elastic.start_on, "--start-on"),
            (elastic.slots is not None, "--slots (see --per-pod)"),
            (spec.detached, "--detach"),
        ):
            if given:
                raise ConfigError(f"{option} does not go with --on kubernetes, whose pods are the hosts: leave it out")
        if not spec.settings.name:  # pods that are started again must find the run
            name = new_name(spec.script, time.time())
            spec = replace(spec, settings=spec.settings.with_(name=name))
        made = replace(spec, elastic=replace(elastic, listen=self._pods(spec).name, slots=0), terminal=False)
        manifests(made, self._pods(made), "")  # says what is missing
        return made

    def preview(self, spec: JobSpec) -> str:
        return text(manifests(spec, self._pods(spec, "<submission>"), "<token>")).rstrip()

    def check(self, spec: JobSpec) -> None:
        if self.apply and shutil.which("kubectl") is None:
            raise ConfigError(
                "--apply: there is no kubectl here (https://kubernetes.io/docs/tasks/tools); or leave --apply out, and "
                "hand what is printed to a cluster by other means"
            )

    def start(self, spec: JobSpec, shown: Shown) -> Submitted:
        pods = self._pods(spec, secrets.token_hex(8))
        made = text(manifests(spec, pods, secrets.token_hex(32)))
        directory = Path(spec.settings.root) / pods.run
        if self.output:
            write_private(Path(self.output), made.encode())
        if self.apply:
            said = _kubectl("apply", "--server-side", "-f", "-", text=made)
            id = f"{KINDS[self.kind]}/{pods.namespace}/{pods.name}"
            held.write(directory, Held(engine="kubernetes", id=id, command=list(sys.argv), at=time.time()))
            return Submitted(f"{' '.join(said.split())}; files in the pods: /paceline/runs/{pods.run}", directory)
        if self.output:
            return Submitted(f"to start it: kubectl apply --server-side -f {self.output}", directory)
        sys.stdout.write(made)
        return Submitted("to start it, pipe this to: kubectl apply --server-side -f -", directory)

    def state(self, held: Held) -> str:
        kind, place, name = _found(held)
        conditions = _kubectl("get", kind, name, *place, "-o", _SEEN).split()
        return f"{kind.partition('.')[0]} {name}: {', '.join(conditions) or 'not finished'}"

    def stop(self, held: Held) -> str:
        """The claim, with the checkpoints, stays."""
        kind, place, name = _found(held)
        said = _kubectl("delete", f"{kind}/{name}", f"secret/{name}", "--ignore-not-found", *place)
        return " ".join(said.split()) or f"{name} is gone already"

    def _pods(self, spec: JobSpec, submission: str = "") -> Pods:
        return Pods(
            run=spec.settings.name,
            image=self.image,
            kind=self.kind,
            namespace=self.namespace,
            per_pod=self.per_pod,
            gpus=self.gpus,
            claim=self.claim,
            storage=self.storage,
            runtime=self.runtime,
            submission=submission,
        )


def _found(held: Held) -> tuple[str, list[str], str]:
    kind, namespace, name = held.id.split("/")
    return kind, ["-n", namespace] if namespace else [], name


def _kubectl(*words: str, text: str = "") -> str:
    try:
        done = subprocess.run(["kubectl", *words], input=text, capture_output=True, text=True, timeout=_KUBECTL_S)
    except FileNotFoundError:
        raise ConfigError("there is no kubectl here: https://kubernetes.io/docs/tasks/tools") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"kubectl {words[0]} did not end within {_KUBECTL_S:g} s: is the cluster reached?") from None
    if done.returncode:
        raise ConfigError(f"kubectl {words[0]} failed: {done.stderr.strip()}")
    return done.stdout
