"""Members that stay, on other hosts: who sits where, and what is started here for each.

For runs with servers, with a mesh, or with torch's own groups, which no scheduler can have. What is started here for a
member is the way to its host; `far` is at the other end. So the agent of this host watches them as if they were its
own: a connection that ends is a member that has.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import msgspec

from paceline.core.labels import labels_of
from paceline.core.lost import of_shell
from paceline.environment.paceline import variables
from paceline.environment.place import Place
from paceline.launch.spec import JobSpec, Room
from paceline.membership.process import Start

FAR = ("-P", "-m", "paceline.launch.far")  # of Python, on the hosts


class Errand(msgspec.Struct, frozen=True, kw_only=True):
    """What to start."""

    command: list[str]  # behind the interpreter
    env: dict[str, str]  # who this member is, and what it was to be given besides
    threads: int | None  # None: its share of this host's cores
    members: int  # of the run, on this host


def starts(spec: JobSpec, address: str, token: str) -> list[Start]:
    """What is started here for each member: as `plan.plan`, but on the hosts of `spec.away`."""
    away = spec.away
    assert away
    assert away.way
    on = seats(spec, away.rooms)
    ends = [spec.script, *spec.args]
    found = []
    for rank, host in enumerate(on):
        beside = [other for other, its in enumerate(on) if its == host]
        worker = rank < spec.num_members
        place = Place(
            kind="paceline",
            rank=rank,
            size=spec.size,
            local_rank=beside.index(rank),
            local_size=len(beside),
            servers=spec.num_servers,
            rendezvous=address,
            token=token,
            labels=labels_of((*spec.labels, *away.rooms[host].labels), rank) if worker else (),
        )
        errand = Errand(
            command=(["-m", *ends] if spec.module else ends) if worker else ["-m", "paceline.server"],
            env={**spec.env, **variables(place)},
            threads=spec.threads,
            members=sum(other < spec.num_members for other in beside),
        )
        command, first = away.way.python_on(host, FAR)
        given = first + msgspec.json.encode(errand) + b"\n"
        found.append(Start(rank=rank, command=tuple(command), env=dict(os.environ), given=given, meant=of_shell))
    return found


def seats(spec: JobSpec, rooms: Mapping[str, Room]) -> list[str]:
    """The host of each rank: one host is filled after the other; servers are dealt out, and take no slot."""
    hosts = [name for name, room in rooms.items() for _ in range(room.slots)][: spec.num_members]
    used = list(dict.fromkeys(hosts))
    return [*hosts, *(used[i % len(used)] for i in range(spec.num_servers))]


def listing(spec: JobSpec, rooms: Mapping[str, Room]) -> list[str]:
    """Who is started where, a line for each host."""
    on = seats(spec, rooms)
    lines = []
    for host in dict.fromkeys(on):
        workers = [str(rank) for rank, its in enumerate(on) if its == host and rank < spec.num_members]
        servers = [str(rank) for rank, its in enumerate(on) if its == host and rank >= spec.num_members]
        lines.append(
            f"# host {host}: rank {', '.join(workers)}" + (f"; server {', '.join(servers)}" if servers else "")
        )
    return lines
