"""Members on a Ray cluster: `--on ray`.

The launcher is a driver there. It has a placement group with one bundle for each host agent, an actor in each bundle
that is the agent, and the scheduler as an actor that Ray starts again; see `launch.on_ray`. All of it ends with the
launcher, be it in the background (`--detach`) or sent to the cluster as a job (`ray job submit`). Runs that no
scheduler can have (servers, meshes, torch's own groups) have actors that start each member where it has its seat.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from paceline.core.errors import ConfigError
from paceline.core.on_ray import NAMESPACE
from paceline.environment.paceline import VARIABLES
from paceline.launch import preflight, preview, probe
from paceline.launch.elastic import ElasticJob
from paceline.launch.engines import Option, Shown
from paceline.launch.interruptible import interruptible
from paceline.launch.local import Local, LocalJob
from paceline.launch.on_ray.cluster import PIP, Cluster, Share
from paceline.launch.on_ray.desk import Desk
from paceline.launch.on_ray.ground import RayGround
from paceline.launch.spec import Away, Elastic, JobSpec

_OTHERS = {"hosts": "", "slots": None, "start_on": Elastic.start_on}  # which Ray decides


def _amount(least: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value < math.inf or (value > 1 and value != int(value)):
            raise ConfigError(f"{text!r} is not an amount that Ray deals in: a whole number, or a part of one")
        return value

    return parse


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Runs on Ray."""

    OPTIONS: ClassVar[tuple[Option, ...]] = (
        Option(
            field="address",
            metavar="IP:PORT",
            help="of the cluster; local: a new one (default: RAY_ADDRESS, else one that runs here, else a new one)",
        ),
        Option(field="cpus", metavar="C", parse=_amount(0.01), help="for each member (default: 1)"),
        Option(field="gpus", metavar="G", parse=_amount(0.0), help="for each member (default: 0)"),
        Option(field="sync", help="let Ray copy the working directory to the hosts first"),
    )
    spreads: ClassVar[bool] = True
    elsewhere: ClassVar[bool] = False
    no_hosts: ClassVar[str] = ""
    stays: ClassVar[str] = ""

    address: str = ""
    cpus: float = 1.0
    gpus: float = 0.0
    sync: bool = False

    def prepare(self, spec: JobSpec) -> JobSpec:
        asked = spec.elastic or spec.away
        assert asked
        for name, default in _OTHERS.items():
            if getattr(asked, name, default) != default:
                raise ConfigError(
                    f"--{name.replace('_', '-')} does not go with --on ray: Ray knows its nodes; say how much each "
                    "member needs (--cpus, --gpus)"
                )
        threads = spec.threads or max(1, int(self.cpus))  # Ray would give each member all of its agent's
        own = {k: v for k, v in os.environ.items() if k.startswith("PACELINE_") and k not in VARIABLES}
        cwd = str(Path(spec.cwd or Path.cwd()).absolute())
        spec = replace(spec, threads=threads, env=own | dict(spec.env), cwd=cwd)
        if not spec.elastic:
            return spec
        ground = self._ground(spec, spec.elastic.least, spec.elastic.most, spec.labels)
        return replace(spec, elastic=replace(spec.elastic, slots=0, ground=ground), labels=())

    def seat(self, spec: JobSpec, away: Away) -> JobSpec:
        """Which hosts there are is found when it starts."""
        return self.prepare(spec)

    def preview(self, spec: JobSpec) -> str:
        share = f"CPU {self.cpus:g}" + (f", GPU {self.gpus:g}" if self.gpus else "")
        where = self.address or os.environ.get("RAY_ADDRESS") or "one that runs here, else a new one"
        elastic = spec.elastic
        least, most = (elastic.least, elastic.most) if elastic else (spec.num_members, spec.num_members)
        many = f"{most}" if least == most else f"{least} to {most}"
        parts = [
            f"# the Ray cluster: {where}" + (f"; {spec.cwd} is copied to it (--sync)" if self.sync else ""),
            "# actor paceline-scheduler, on the launcher's node, which Ray starts again",
            f"# placement group paceline: {many} times ({share}) in bundles, one for each host, as few as can be",
            "# actor paceline-agent-HOST in each bundle, which starts as many of these as its bundle has room for:",
        ]
        if not elastic:
            parts[1] = "# the rendezvous here"
        there = replace(spec, elastic=replace(elastic, slots=None, ground=None) if elastic else None)
        return "\n".join([*parts, *preview.members(there), preview.settings(spec)])

    def check(self, spec: JobSpec) -> None:
        if importlib.util.find_spec("ray") is None:
            raise ConfigError(f"--on ray needs Ray, which is not installed: {PIP}")

    def start(self, spec: JobSpec, shown: Shown) -> ElasticJob | LocalJob:
        elastic = spec.elastic
        if elastic is None:
            return self._start_seated(spec, shown)
        ground = elastic.ground
        assert isinstance(ground, RayGround), "prepare it first"
        try:
            found, slots = self._enter(ground, spec, shown)
            if slots < elastic.most:
                shown.say(f"there is room for {slots} of {elastic.most} members now; nodes that come are used")
            elastic = replace(elastic, listen=elastic.listen or found.host)
            spec = replace(spec, elastic=elastic, env=_told(found, spec))
            return ElasticJob(spec, elastic, shown.show, say=shown.say)
        except BaseException:
            ground.close()
            raise

    def _start_seated(self, spec: JobSpec, shown: Shown) -> ElasticJob | LocalJob:
        away = spec.away
        assert away
        ground, desk = self._ground(spec, spec.num_members, spec.num_members, stays=spec.cwd), Desk()

        def close() -> None:
            desk.close()
            ground.close()

        try:
            found, _ = self._enter(ground, spec, shown)
            desk.open(ground.actors)
            listen = away.listen or found.host
            away = replace(away, rooms=ground.hosts(), way=desk, listen=listen, on_end=close)
            spec = replace(spec, away=away, env=_told(found, spec))
            return Local(shown.show, on_lost=shown.on_lost, say=shown.say).start(spec)
        except BaseException:
            close()
            raise

    def _ground(
        self, spec: JobSpec, least: int, most: int, labels: tuple[str, ...] = (), stays: str | None = None
    ) -> RayGround:
        assert spec.cwd
        share = Share(cpus=self.cpus, gpus=self.gpus)
        working_dir = spec.cwd if self.sync else ""
        return RayGround(share, least, most, labels, address=self.address, working_dir=working_dir, stays=stays)

    def _enter(self, ground: RayGround, spec: JobSpec, shown: Shown) -> tuple[Cluster, int]:
        with interruptible():
            found, slots = ground.enter()
            hosts = self._meet(ground, spec)
        what = "a Ray cluster of our own" if found.own else f"the Ray cluster at {found.address}"
        shown.say(f"{what}: {slots} slot{'' if slots == 1 else 's'} on {', '.join(hosts)}")
        return found, slots

    def _meet(self, ground: RayGround, spec: JobSpec) -> list[str]:
        """The hosts, which have what the run needs."""
        assert spec.cwd
        facts = ground.meet({"cwd": spec.cwd})
        wrong = preflight.compare(probe.facts({}), facts, otherwise="")
        if not self.sync and (missing := [host for host, has in facts.items() if not has.cwd]):
            wrong.append(f"host {', '.join(missing)}: there is no {spec.cwd}; share the disk, or give --sync")
        elif not spec.module:
            script = spec.script if self.sync else str(Path(spec.cwd) / spec.script)
            if missing := ground.lacking(script):
                then = "is it left out by .gitignore?" if self.sync else "copy it there (--sync does)"
                wrong.append(f"host {', '.join(missing)}: there is no {script}; {then}")
        if wrong:
            raise ConfigError("\n  ".join(wrong if len(wrong) == 1 else ["the hosts are not ready:", *wrong]))
        return list(facts)


def _told(found: Cluster, spec: JobSpec) -> dict[str, str]:
    """What members have in their environment."""
    return {"RAY_ADDRESS": found.address, NAMESPACE: found.namespace, **spec.env}
