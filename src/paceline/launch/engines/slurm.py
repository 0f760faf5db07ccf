"""Members on the nodes of a Slurm cluster: `--on slurm` submits a job, or starts the run in the allocation it is in.

The job runs the same command again, inside (`batch`): there the launcher starts an agent on each node by srun
(`steps`), so that the run is elastic within the allocation: a lost node is its members lost. With `--requeue`, a run
whose time is over or whose nodes are taken leaves a checkpoint and waits in the queue again. Runs that no scheduler can
have (servers, meshes, torch's own groups) have a step for each member instead (`seats`).
"""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from paceline.core.directory import make_directory, new_name, write_private
from paceline.core.errors import ConfigError
from paceline.environment import hostlist
from paceline.environment.slurm import in_step
from paceline.launch import batch, held, jobs, listed, preflight, preview, ready, seats, typed
from paceline.launch import script as scripts
from paceline.launch.elastic import ElasticJob
from paceline.launch.engines import Option, Shown, Submitted
from paceline.launch.held import Held
from paceline.launch.local import Local, LocalJob
from paceline.launch.ready import Needs
from paceline.launch.spec import Away, Elastic, JobSpec, Room
from paceline.launch.steps import Steps
from paceline.launch.words import words
from paceline.transport.wires import own_address

_LATER = "the nodes of the job"  # instead of hosts, before there is one


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Runs in Slurm."""

    OPTIONS: ClassVar[tuple[Option, ...]] = (
        Option(field="partition", metavar="NAME", help="to submit to"),
        Option(field="account", metavar="NAME", help="that is charged"),
        Option(field="time", metavar="TIME", help="that the job may take, as in 2:00:00"),
        Option(field="nodes", metavar="N", help="over which the members are spread (default: as Slurm likes)"),
        Option(field="gpus", metavar="G", help="on each node, as in 4 or a100:4"),
        Option(
            field="sbatch",
            metavar="OPTIONS",
            parse=typed.words,
            help="more for sbatch, as in '--qos=high --mem=16G'",
        ),
        Option(field="requeue", help="when its time is over or its nodes are taken, wait in the queue and go on"),
        Option(field="python", metavar="PATH", help="of Python on the nodes (default: the same as here)"),
        Option(field="interface", metavar="NAME", help="of the launcher's node, by which others reach it"),
    )
    spreads: ClassVar[bool] = True
    elsewhere: ClassVar[bool] = False
    no_hosts: ClassVar[str] = ""
    stays: ClassVar[str] = ""

    partition: str = ""
    account: str = ""
    time: str = ""
    nodes: str = ""
    gpus: str = ""
    sbatch: str = ""
    requeue: bool = False
    python: str = ""
    interface: str = ""

    def prepare(self, spec: JobSpec) -> JobSpec:
        if spec.away:
            return self.seat(spec, spec.away)
        elastic = spec.elastic
        assert elastic
        self._check(elastic.hosts or elastic.start_on != Elastic.start_on)
        if not inside(os.environ):
            return replace(spec, elastic=replace(elastic, hosts=_LATER))
        own = elastic.slots or 0
        slots = _enough(elastic.least, own, rooms(os.environ, elastic.most - own))
        hosts = ",".join(f"{node}:{count}" for node, count in slots.items())
        listen = self._listen(elastic.listen, list(slots))
        return replace(spec, elastic=replace(elastic, hosts=hosts, way=self._way(spec), listen=listen))

    def seat(self, spec: JobSpec, away: Away) -> JobSpec:
        self._check(away.hosts)
        if not inside(os.environ):
            return replace(spec, away=replace(away, hosts=_LATER))
        slots = _enough(spec.num_members, 0, rooms(os.environ, spec.num_members))
        found = {node: Room(count) for node, count in slots.items()}
        listen = self._listen(away.listen, list(slots))
        return replace(spec, away=replace(away, rooms=found, way=self._way(spec), listen=listen))

    def preview(self, spec: JobSpec) -> str:
        asked, way, found = _of(spec)
        if way is None:
            scripts.command(spec.script, spec.args, module=spec.module, python=spec.python, cwd=_cwd(spec))
            name = spec.settings.name or new_name(spec.script, time.time())
            return self._script(spec, Path(spec.settings.root, name)).rstrip("\n")
        what = "scheduler" if spec.elastic else "rendezvous"
        parts = [f"# the {what} here, at {asked.listen}:{asked.port or '<port>'}"]
        if spec.elastic:
            parts += [shlex.join(way.command(name, *room)) for name, room in found.items()]
        else:
            parts += [*seats.listing(spec, found), f"# each by a step of its own, which starts {spec.script}:"]
            parts += [shlex.join(way.python_on(name, seats.FAR)[0]) for name in dict.fromkeys(seats.seats(spec, found))]
        own = preview.members(spec)  # also finds out whether the script can be started
        return "\n".join([*parts, *(own if spec.elastic else ()), preview.settings(spec)])

    def check(self, spec: JobSpec) -> None:
        program = "srun" if _of(spec)[1] else "sbatch"
        if shutil.which(program) is None:
            raise ConfigError(f"--on slurm needs {program}, which is not installed here: {jobs.INSTALL}")

    def start(self, spec: JobSpec, shown: Shown) -> ElasticJob | LocalJob | Submitted:
        _, way, found = _of(spec)
        if way is None:
            return self._submit(spec)
        given = [o.name for o in self.OPTIONS[:7] if getattr(self, o.field)]
        if given:
            job = os.environ["SLURM_JOB_ID"]
            shown.say(
                f"warning: {', '.join(given)}: of no effect inside Slurm job {job}, whose nodes there are already"
            )
        needs = Needs.of(spec, found, way.cwd)
        spec = ready.begun(
            spec, way, needs, lambda flight: ready.require(flight, spec, way.cwd, "share the disk"), shown.say
        )
        return Local(shown.show, on_lost=shown.on_lost, say=shown.say).start(spec)

    # ---- of a run that was submitted

    def state(self, held: Held) -> str:
        return jobs.told(held.id, held.at, held.log)

    def over(self, held: Held) -> bool:
        return jobs.ask(held.id).over

    def stop(self, held: Held) -> str:
        return jobs.cancel(held.id)

    # ----

    def _check(self, hosts: object) -> None:
        if hosts:
            raise ConfigError("--hosts and --start-on do not go with --on slurm: the hosts are the nodes of the job")
        if self.nodes and not re.fullmatch(r"[1-9]\d*", self.nodes):
            raise ConfigError(f"--nodes {self.nodes!r}: give a number of nodes, as in --nodes 2")

    def _way(self, spec: JobSpec) -> Steps:
        return Steps(python=self.python, cwd=str(_cwd(spec)))

    def _submit(self, spec: JobSpec) -> Submitted:
        named = Path(spec.settings.root, spec.settings.name) if spec.settings.name else None
        is_new = named is None or not named.exists()
        directory = make_directory(Path(spec.settings.root), spec.settings.name, spec.script)
        if (before := held.read(directory)) and before.engine == "slurm" and not jobs.ask(before.id).over:
            raise ConfigError(
                f"run {directory.name!r} is Slurm job {before.id} already: paceline stop {directory.name} first, or "
                "give another --name"
            )
        try:
            (directory / "logs").mkdir(exist_ok=True)
            write_private(directory / batch.FILE, self._script(spec, directory).encode())
            job = jobs.submit(directory / batch.FILE, os.environ | dict(spec.env))
        except BaseException:
            if is_new:
                shutil.rmtree(directory, ignore_errors=True)
            raise
        log = str(_log(directory)).replace("%j", job)
        held.write(directory, Held(engine="slurm", id=job, command=list(sys.argv), at=time.time(), log=log))
        name = directory.name if spec.settings.root == "runs" else str(directory)
        follow = f"paceline status {name}, paceline logs {name} --follow, paceline stop {name}"
        return Submitted(f"Slurm job {job} ({directory / batch.FILE}): {follow}", directory)

    def _script(self, spec: JobSpec, directory: Path) -> str:
        settings = spec.settings.with_(name=directory.name, fresh=False).pin("name")
        later = replace(spec, settings=settings)
        more = ["--python", self.python] if self.python else []
        more += ["--interface", self.interface] if self.interface else []
        start = [self.python or sys.executable, "-P", "-m", "paceline", "run", *more, *words(later, "slurm")]
        return batch.script(
            self._options(spec, directory), start, _cwd(spec), fresh=spec.settings.fresh, requeue=self.requeue
        )

    def _options(self, spec: JobSpec, directory: Path) -> list[str]:
        """Of sbatch. A lost node must not end the job: the run goes on without it."""
        count = spec.elastic.most - (spec.elastic.slots or 0) if spec.elastic else spec.num_members
        found = [f"--job-name={directory.name}", f"--output={_log(directory)}", f"--ntasks={count}", "--no-kill"]
        given = {"nodes": self.nodes, "cpus-per-task": spec.threads, "gpus-per-node": self.gpus}
        given |= {"partition": self.partition, "account": self.account, "time": self.time}
        found += [f"--{name}={value}" for name, value in given.items() if value]
        return [*found, *shlex.split(self.sbatch)]

    def _listen(self, listen: str, nodes: list[str]) -> str:
        if listen and self.interface:
            raise ConfigError("--interface and --listen say the same thing: give one of them")
        if self.interface:
            return preflight.interface_address(self.interface)
        if listen:
            return listen
        try:
            return preflight.towards(nodes, own_address)
        except ConfigError:  # names that only Slurm knows
            told = jobs.call("scontrol", "--oneliner", "show", "node", ",".join(nodes)).stdout
            return preflight.towards(re.findall(r"NodeAddr=(\S+)", told), own_address)


def inside(env: Mapping[str, str]) -> bool:
    """Whether this is in an allocation; ConfigError in one of several tasks of srun, all of which would start it."""
    if not env.get("SLURM_JOB_ID") or not env.get("SLURM_JOB_NODELIST"):
        return False
    if in_step(env) and (tasks := env.get("SLURM_STEP_NUM_TASKS", "1")) != "1":
        raise ConfigError(
            f"this is one of {tasks} tasks of srun, and each would start the run: leave srun out (it is called for "
            "each node), or the launcher (srun python train.py)"
        )
    return True


def rooms(env: Mapping[str, str], members: int) -> dict[str, int]:
    """How many members each node may have: its tasks, or where nobody asked for tasks, its share.

    >>> rooms({"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS": "3", "SLURM_TASKS_PER_NODE": "2,1"}, 3)
    {'n1': 2, 'n2': 1}
    >>> rooms({"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "8(x2)"}, 3)
    {'n1': 2, 'n2': 2}
    """
    nodes = hostlist.expand(env["SLURM_JOB_NODELIST"])
    counts = hostlist.tasks(env["SLURM_TASKS_PER_NODE"]) if env.get("SLURM_TASKS_PER_NODE") else []
    if not env.get("SLURM_NTASKS") or len(counts) != len(nodes):
        counts = [max(1, math.ceil(members / len(nodes)))] * len(nodes)
    return dict(zip(nodes, counts))


def _of(spec: JobSpec) -> tuple[Elastic | Away, Steps | None, Mapping[str, Room]]:
    """Of a spec that was prepared: where it listens, what leads to the nodes (None: they come later), and which."""
    asked = spec.elastic or spec.away
    assert asked
    if asked.way is None:
        return asked, None, {}
    assert isinstance(asked.way, Steps)
    return asked, asked.way, asked.rooms if isinstance(asked, Away) else listed.read(asked.hosts)


def _enough(least: int, own: int, slots: dict[str, int]) -> dict[str, int]:
    """The nodes' slots, if they suffice with those of this host."""
    total = sum(slots.values()) + own
    if total >= least:
        return slots
    shown = ", ".join(f"{node} ({count})" for node, count in slots.items())
    raise ConfigError(
        f"{least} members need as many slots, and Slurm job {os.environ['SLURM_JOB_ID']} has {total} tasks: {shown}; "
        f"ask for more (salloc --ntasks={least}), or start fewer (-n {total})"
    )


def _cwd(spec: JobSpec) -> Path:
    return Path(spec.cwd or Path.cwd()).absolute()


def _log(directory: Path) -> Path:
    return directory.absolute() / "logs" / "slurm-%j.out"
