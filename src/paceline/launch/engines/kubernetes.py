"""Members in pods: writes the manifests of a run (`manifests`), and with --apply hands them to kubectl.

What is written holds the token, in a Secret: a file of it is for its owner alone. A run that was applied is held by
the cluster: `paceline status | logs | scale | stop` ask it, through kubectl.
"""

from __future__ import annotations

import re
import secrets
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from paceline.core.directory import new_name, write_private
from paceline.core.errors import ConfigError, nearest
from paceline.launch import held, kubectl
from paceline.launch.engines import Option, Shown, Submitted
from paceline.launch.engines.manifests import FILES, KINDS, Pods, manifests, text
from paceline.launch.held import Held
from paceline.launch.kubectl import Job
from paceline.launch.spec import Elastic, JobSpec

_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
_SIZE = re.compile(r"[0-9]*\.?[0-9]+([kMGTPE]|[KMGTPE]i)?")


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
    no_hosts: ClassVar[str] = ""
    stays: ClassVar[str] = ""

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
        for value, option in ((self.namespace, "--namespace"), (self.claim, "--claim"), (self.runtime, "--runtime")):
            if value and not _NAME.fullmatch(value):
                raise ConfigError(
                    f"{option} {value!r}: Kubernetes allows lower-case letters, digits, - and . in a name, with a "
                    "letter or digit at both ends"
                )
        if self.storage and not _SIZE.fullmatch(self.storage):
            raise ConfigError(f"--storage {self.storage!r}: give a size, such as 10Gi or 500Mi")
        if self.claim and self.storage:
            raise ConfigError(
                "--claim and --storage: files go to a claim that exists or to a new one; give one of them"
            )
        self._check_gpus(spec.settings.device)
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
        made = text(manifests(spec, self._pods(spec, "<submission>"), "<token>")).rstrip()
        return "\n".join([*(f"# warning: {line}" for line in self._odd(spec)), made])

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
        for line in self._odd(spec):
            shown.say(f"warning: {line}")
        if self.output:
            self._write(made)
        if self.apply:
            job = Job(KINDS[self.kind], pods.namespace, pods.name)
            said = f"{_make_room(job, pods.run)}{kubectl.call('apply', '--server-side', '-f', '-', text=made)}"
            held.write(directory, Held(engine="kubernetes", id="/".join(job), command=list(sys.argv), at=time.time()))
            return Submitted(f"{' '.join(said.split())}; files in the pods: {FILES}/runs/{pods.run}", directory)
        if self.output:
            return Submitted(f"to start it: kubectl apply --server-side -f {self.output}")
        sys.stdout.write(made)
        return Submitted("to start it, pipe this to: kubectl apply --server-side -f -")

    # ---- of a run that was applied

    def state(self, held: Held) -> str:
        job = Job.of(held)
        return f"{job}: {kubectl.state(job) or 'gone'}"

    def over(self, held: Held) -> bool:
        return kubectl.over(kubectl.state(Job.of(held)))

    def stop(self, held: Held) -> str:
        """The claim, with the checkpoints, stays."""
        job = Job.of(held)
        said = kubectl.call("delete", f"{job.kind}/{job.name}", f"secret/{job.name}", "--ignore-not-found", *job.place)
        return " ".join(said.split()) or f"{job.name} is gone already"

    def logs(self, held: Held, *, follow: bool, lines: int | None) -> int:
        return kubectl.logs(Job.of(held), follow=follow, lines=lines)

    def inside(self, held: Held, run: str, words: Sequence[str]) -> str:
        """Any pod will do: all have the volume, where the scheduler's address is."""
        job = Job.of(held)
        command, *rest = words
        first = "first" if job.kind == KINDS["jobset"] else "node"
        return kubectl.call(*kubectl.inside(job, first, command, "--root", f"{FILES}/runs", run, *rest))

    # ----

    def _check_gpus(self, device: str) -> None:
        """Refuse what cannot be: members on GPUs that no pod has, or GPUs for members that compute on the CPU."""
        if device == "cpu" and self.gpus:
            raise ConfigError(
                f"--gpus {self.gpus} with --device cpu: pods would hold GPUs that no member uses; leave one of them out"
            )
        if device.startswith("cuda") and not self.gpus:
            raise ConfigError(f"--device {device}: pods have no GPU without --gpus; give --gpus {self.per_pod}")
        if device.startswith("cuda:") and int(device[5:]) >= self.gpus:
            raise ConfigError(
                f"--device {device}: a pod with --gpus {self.gpus} has cuda:0 to cuda:{self.gpus - 1}; give --device "
                "cuda for one each"
            )

    def _odd(self, spec: JobSpec) -> list[str]:
        """What can be, and is hardly meant."""
        found = []
        members = min(self.per_pod, spec.size)
        each = "1 member" if members == 1 else f"{members} members"
        if members < self.per_pod:
            found.append(f"--per-pod {self.per_pod}: the run has {each} at most, so there is one pod, with these")
        if 0 < self.gpus < members:
            found.append(f"--gpus {self.gpus}: the {each} of a pod share them; --gpus {members} is one for each")
        if self.gpus > members:
            found.append(
                f"--gpus {self.gpus}: a member computes on one of them, and a pod has {each} (--per-pod), so "
                f"{self.gpus - members} of each pod do nothing, unless the script itself uses them"
            )
        if "root" in spec.settings.pinned:
            found.append(
                f"--root {spec.settings.root}: here alone, for the note by which paceline status and others find the "
                f"run; in the pods files are on the volume, in {FILES}/runs"
            )
        return found

    def _write(self, made: str) -> None:
        try:
            write_private(Path(self.output), made.encode())
        except OSError as error:
            raise ConfigError(
                f"--output {self.output!r} cannot be written: {error.strerror}; name a file in a directory that exists "
                "and that you may write to"
            ) from None

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


def _make_room(job: Job, run: str) -> str:
    """Let a run of this name that has ended be started again: JobSets do not change, so it is deleted first."""
    state = kubectl.state(job)
    if not state:
        return ""
    if not kubectl.over(state):
        raise ConfigError(
            f"run {run!r} is {job} already, which is {state}: paceline stop {run} first, or give another --name"
        )
    return f"{job}, which had {state}, goes on: {kubectl.call('delete', f'{job.kind}/{job.name}', *job.place)}; "
