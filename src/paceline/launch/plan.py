"""What is started for a run: each member's command, its environment, and the settings that it will be told."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.core.labels import labels_of
from paceline.core.settings import Settings
from paceline.environment.paceline import VARIABLES, variables
from paceline.environment.place import Place
from paceline.launch import cores, record, script
from paceline.launch.spec import JobSpec
from paceline.membership.process import Start

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
# Large blocks in huge pages: a step asks for its gradients anew, and clearing them 4 KB at a time takes up to a third
# of it (docs/decisions/0009).
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def plan(spec: JobSpec, address: str, token: str, *, slots: int | None = None) -> list[Start]:
    """Exactly what is started, one per member.

    Args:
        address: of the rendezvous, or of an elastic run's scheduler.
        slots: how many of an elastic run's members this host may have; None: all.
    """
    cwd = Path(spec.cwd or Path.cwd())
    command = script.command(spec.script, spec.args, module=spec.module, python=spec.python, cwd=cwd)
    common = environment(spec, slots)
    local = spec.size if slots is None else min(slots, spec.size)
    starts = []
    for rank in range(spec.size):
        place = Place(
            kind="paceline",
            rank=rank,
            size=spec.size,
            local_rank=min(rank, local - 1),
            local_size=local,
            servers=spec.num_servers,
            rendezvous="" if spec.elastic else address,
            scheduler=address if spec.elastic else "",
            token=token,
            labels=labels_of(spec.labels, rank) if spec.elastic or rank < spec.num_members else (),
        )
        env = common | variables(place)
        terminal = spec.terminal and rank == 0
        own = command if spec.elastic or rank < spec.num_members else (spec.python, "-m", "paceline.server")
        starts.append(Start(rank=rank, command=own, env=env, cwd=spec.cwd, terminal=terminal))
    return starts


def environment(spec: JobSpec, slots: int | None = None) -> dict[str, str]:
    """What all members have in their environment; `slots` as for `plan`."""
    inherited = {k: v for k, v in os.environ.items() if k not in VARIABLES} | dict(spec.env)
    common = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    if not any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in inherited):
        common |= HUGE_PAGES
    if spec.threads is not None:
        common |= dict.fromkeys(_THREADS, str(spec.threads))
    elif not any(inherited.get(name) for name in _THREADS):
        num_members = spec.elastic.most if spec.elastic else spec.num_members  # servers work while workers wait
        threads, _ = cores.share(min(slots or num_members, num_members), cores.cores().usable)
        common |= dict.fromkeys(_THREADS, str(threads))
    return inherited | common


def told(spec: JobSpec, kept: record.Record) -> Settings:
    """The settings as members are told them."""
    # Absolute: a script may change its directory before it joins.
    root = str(kept.dir.parent.absolute())
    settings = spec.settings.pin(*spec.settings.changed())  # a program that starts a run types nothing
    if spec.settings.fresh and not kept.fresh:
        settings = settings.with_(fresh=False).pin("fresh")
    return settings.with_(name=kept.run.name, root=root)
