"""Members on hosts that ssh leads to: `--on ssh --hosts a:4,b:4`, or only `--hosts`.

The launcher stays here with the scheduler, and starts an agent on each host over the user's own ssh (`secure_shell`);
the agents end with it, or with `--detach` when the run does. A host that is lost is its members lost: the scheduler
starts them elsewhere, if there is a slot, and the launcher its agent again. Runs that no scheduler can have (servers,
meshes, torch's own groups) have a connection for each member instead (`seats`).
"""

from __future__ import annotations

import math
import os
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from paceline.core.errors import ConfigError
from paceline.environment.paceline import VARIABLES
from paceline.launch import listed, preflight, preview, ready, seats, sync, typed
from paceline.launch.elastic import ElasticJob
from paceline.launch.engines import Option, Shown
from paceline.launch.local import Local, LocalJob
from paceline.launch.preflight import Preflight
from paceline.launch.ready import Needs
from paceline.launch.secure_shell import SecureShell
from paceline.launch.spec import Away, Elastic, JobSpec, Room
from paceline.transport.wires import own_address


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Runs over ssh."""

    OPTIONS: ClassVar[tuple[Option, ...]] = (
        Option(
            field="ssh",
            metavar="COMMAND",
            parse=typed.command,
            help="what is called, as in 'ssh -F FILE' (default: ssh)",
        ),
        Option(field="python", metavar="PATH", help="of Python on the hosts (default: the same as here)"),
        Option(
            field="interface", metavar="NAME", help="of this host, by which the others reach it (default: by route)"
        ),
        Option(field="sync", help="copy the working directory to the hosts first"),
    )
    spreads: ClassVar[bool] = True
    elsewhere: ClassVar[bool] = False
    no_hosts: ClassVar[str] = ""
    stays: ClassVar[str] = ""

    ssh: str = "ssh"
    python: str = ""
    interface: str = ""
    sync: bool = False

    def prepare(self, spec: JobSpec) -> JobSpec:
        if spec.away:
            return self.seat(spec, spec.away)
        elastic = spec.elastic
        assert elastic
        if elastic.start_on != Elastic.start_on:
            raise ConfigError("--start-on does not go with --on ssh: say what is called with --ssh, or leave --on out")
        rooms = _rooms(elastic.hosts, elastic.most - (elastic.slots or 0))
        if listed.is_list(elastic.hosts):
            elastic = replace(elastic, hosts=listed.text(rooms))
        _check_slots(elastic.least, elastic.own_slots, rooms)
        way = self._way(spec)
        return replace(spec, elastic=replace(elastic, way=way, listen=self._listen(elastic.listen, way, rooms)))

    def seat(self, spec: JobSpec, away: Away) -> JobSpec:
        rooms = _rooms(away.hosts, spec.num_members)
        _check_slots(spec.num_members, 0, rooms)
        way = self._way(spec)
        listen = self._listen(away.listen, way, rooms)
        return replace(spec, away=replace(away, rooms=rooms, way=way, listen=listen))

    def preview(self, spec: JobSpec) -> str:
        asked, way, rooms = _of(spec)
        names = ", ".join(sorted(way.env)) or "nothing"
        parts = [f"# first: copy {way.cwd} to each host (--sync)"] if self.sync else []
        if spec.away:
            parts += [*seats.listing(spec, rooms), f"# each in {way.cwd}, with {names} from here, as {spec.script}"]
        for name, room in rooms.items():
            if spec.elastic:
                agent = shlex.join([self.python or "python", *way.agent(name, *room)])
                parts.append(f"# host {name}, in {way.cwd}, with {names} from here: {agent}")
            parts.append(shlex.join(way.command(name, *room)))
        what = "scheduler" if spec.elastic else "rendezvous"
        parts.insert(0, f"# the {what} here, at {asked.listen}:{asked.port or '<port>'}")
        own = preview.members(spec)  # also finds out whether the script can be started
        return "\n".join([*parts, *(own if spec.elastic else ()), preview.settings(spec)])

    def check(self, spec: JobSpec) -> None:
        first = (shlex.split(self.ssh) or ["ssh"])[0]
        if shutil.which(first) is None:
            raise ConfigError(f"--on ssh needs {first}, which is not installed: apt-get install openssh-client")

    def start(self, spec: JobSpec, shown: Shown) -> ElasticJob | LocalJob:
        _, way, rooms = _of(spec)
        needs = Needs.of(spec, rooms, way.cwd)
        spec = ready.begun(spec, way, needs, lambda flight: self._bring_files(flight, spec, way, shown), shown.say)
        return Local(shown.show, on_lost=shown.on_lost, say=shown.say).start(spec)

    def _way(self, spec: JobSpec) -> SecureShell:
        cwd = str(Path(spec.cwd or Path.cwd()).absolute())
        env = _carried(os.environ) | dict(spec.env)
        return SecureShell(ssh=self.ssh, python=self.python, cwd=cwd, env=env, stays=spec.detached)

    def _listen(self, listen: str, way: SecureShell, rooms: Mapping[str, Room]) -> str:
        if listen and self.interface:
            raise ConfigError("--interface and --listen say the same thing: give one of them")
        if self.interface:
            return preflight.interface_address(self.interface)
        return listen or preflight.towards(map(way.target, rooms), own_address)

    def _bring_files(self, flight: Preflight, spec: JobSpec, way: SecureShell, shown: Shown) -> None:
        apart = {host: facts for host, facts in flight.report.facts.items() if not facts.shared}
        if self.sync and not apart:
            shown.say(f"--sync: nothing to copy, the hosts see this very {way.cwd}")
        elif self.sync:
            names = sync.files(Path(way.cwd), Path(spec.settings.root))
            for host, facts in apart.items():
                sync.send(way.words, host, Path(way.cwd), names, rsync=facts.rsync)
            shown.say(f"copied {len(names)} files to {', '.join(apart)}")
        ready.require(flight, spec, way.cwd, "copy it there (--sync does), or share the disk")


def _of(spec: JobSpec) -> tuple[Elastic | Away, SecureShell, Mapping[str, Room]]:
    """Of a spec that was prepared: where it listens, what leads to the hosts, and what they have."""
    asked = spec.elastic or spec.away
    assert asked
    assert isinstance(asked.way, SecureShell), "prepare it first"
    return asked, asked.way, asked.rooms if isinstance(asked, Away) else listed.read(asked.hosts)


def _rooms(hosts: str, members: int) -> dict[str, Room]:
    """What the hosts have; those that are named without a number, as many slots each as are needed."""
    if not hosts:
        raise ConfigError("which hosts? --on ssh --hosts a:4,b:4, or a file with a name and its slots in each line")
    rooms = listed.some(hosts)
    if listed.numbered(hosts):
        return rooms
    each = max(1, math.ceil(members / len(rooms)))
    return {name: Room(each, room.labels) for name, room in rooms.items()}


def _check_slots(least: int, own: int, rooms: Mapping[str, Room]) -> None:
    total = sum(room.slots for room in rooms.values()) + own
    if total < least:
        shown = ", ".join(f"{name} ({room.slots})" for name, room in rooms.items())
        raise ConfigError(
            f"{least} members need as many slots, and there are {total}: {shown}; name more hosts, give them more "
            f"(--hosts a:4), or start fewer (-n {total})"
        )


def _carried(environ: Mapping[str, str]) -> dict[str, str]:
    """What members on other hosts get without being asked for: our own variables, but not those of a member."""
    return {name: value for name, value in environ.items() if name.startswith("PACELINE_") and name not in VARIABLES}
