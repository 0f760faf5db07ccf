"""`paceline.join()`: from an ordinary process to a member of a run.

Finds out where it stands (alone, under `paceline run`, under torchrun), meets the others, forms the group that fits,
and opens what a run writes. Alone it is a run of one, and nothing is exchanged or copied.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from paceline.core import dismissal, queue
from paceline.core.directory import make_directory
from paceline.core.errors import ConfigError, nearest
from paceline.core.events import Events, JsonLines
from paceline.core.mesh import parse as parse_mesh
from paceline.core.settings import Settings
from paceline.core.status import BEFORE, Status
from paceline.core.view import Member, View
from paceline.environment import Place, detect
from paceline.membership import Meeting, meet, settle
from paceline.membership.line import Line
from paceline.membership.orders import Arrive
from paceline.parallel.cut import Cut
from paceline.parallel.precision import make_precision
from paceline.server.dealing import Dealer
from paceline.server.outside.desk import Desk
from paceline.strategies import AllReduce, Local, Strategy, choose, make_strategy, words_of
from paceline.strategies.server import Served
from paceline.train import pacing, shield
from paceline.train.ending import Ending
from paceline.train.progress import MODES, make_progress
from paceline.train.rates import RULES, factor
from paceline.train.run import Run
from paceline.train.team import Team
from paceline.train.tensorboard import tensorboard_sink
from paceline.transport.address import is_loopback, split_address
from paceline.transport.group import Group, solo
from paceline.transport.hub import HubGroup
from paceline.transport.torch_backend import without_torch
from paceline.transport.torch_group import TorchGroup, own_gpu_each
from paceline.transport.wires import Wires, own_address

_current: Run | None = None
TRANSPORTS = ("auto", "own", "gloo", "nccl")


def join(*, strategy: Strategy | str | None = None, **settings: Any) -> Run:
    """Become a member of the run that this process was started for; a run of one without a launcher.

    Args:
        strategy: how the members agree, as an object or in words. `--strategy` on the command line goes before it where
            it says otherwise, and a warning says what of this is left out.
        settings: any of `paceline.core.settings.NAMES`; a flag of `paceline run` goes before it, and `name` and
            `root` are `paceline run`'s alone.

    >>> run = join(name="doctest", checkpoint_keep=0, root=getfixture("tmp_path").as_posix(), progress="off")
    >>> run.size, run.is_first
    (1, True)
    >>> run.close()
    """
    global _current
    place = detect()
    if _current is not None and place.size > 1:
        return _current
    if _current is not None:  # a notebook cell that is run again begins a new run
        _current.close()
    script = _script()
    if isinstance(strategy, str):
        settings["strategy"] = strategy
    asked = Settings().with_(**settings)
    _check_words(asked)  # before a directory is made
    if not place.launched and place.rank == 0:
        if not asked.name:
            asked = asked.with_(name=make_directory(Path(asked.root), "", script).name)
        for old in Path(asked.root, asked.name, "status").glob("rank-*"):  # of members that are gone
            old.unlink(missing_ok=True)
        queue.clear(Path(asked.root, asked.name))
    place = settle(place, asked)
    wires: list[Wires] = []

    def describe(token: str) -> Member:
        if place.size == 1:
            return Member(rank=0, host=place.host, pid=0)
        wires.append(Wires(token, _address(place)))
        return wires[0].describe(place.rank, place.host, place.labels)

    line: Line | None = None
    if place.scheduler:
        dismissal.tell_in_a_line()
        shield.leave_to_agent()
        wires.append(Wires(place.token, _address(place)))
        me = msgspec.structs.replace(wires[0].describe(place.rank, place.host, place.labels), id=place.rank)
        line = Line(place.scheduler, place.token, Arrive(id=place.rank, member=me), limit_s=asked.join_limit_s)
        meeting = Meeting(View(number=0, members=()), line.standing.settings, place.token)
    else:
        if place.servers:
            dismissal.tell_in_a_line(f"member {place.rank}")
        meeting = meet(place, describe, asked)
    agreed = _merge(meeting.settings, settings, place)
    _check_words(agreed)
    directory = Path(agreed.root) / agreed.name
    device = _device(agreed.device, place)
    chosen, said = _strategy(strategy, agreed)
    agreed = agreed.with_(strategy=words_of(chosen))
    make_precision(agreed.precision).check(agreed)  # with the strategy that it has come to
    status = Status(directory / "status" / f"rank-{place.rank}", place.host, place.labels)
    group, dealer, team = solo(), None, None
    rate = partial(factor, agreed.lr_rule if line else "keep", most=place.size)
    if line:
        _check_elastic(chosen, agreed, line.standing.least, place.size)
        status.set("waiting for the other members")
        team = Team(line, wires[0], place.rank, limit_s=agreed.wait_limit_s, status=status)
        team.meet()
        group = team.group
    elif isinstance(chosen, Local):
        chosen.plan.refuse_fixed()
    if wires and not line:
        status.epoch = BEFORE if meeting.late else 0
        status.set("connecting")
        late_to = range(place.workers, place.size) if meeting.late else ()
        wires[0].join(meeting.view, place.rank, limit_s=agreed.wait_limit_s, status=status, late_to=late_to)
        if place.servers and (chosen.forgives or meeting.replaces):
            workers = range(place.workers)
            group = HubGroup(wires[0], workers, place.workers, replaces=meeting.replaces, late=meeting.late)
            dealer = Dealer(wires[0], place.workers)
        else:
            group = _form(wires[0], place.workers, agreed.transport, device)
    status.set("preparing")
    mesh = parse_mesh(agreed.mesh, group.size, "-n MIN:MAX" if line else agreed.strategy if place.servers else "")
    if mesh.cuts or (agreed.mesh and group.size == 1):  # of one part too: it may be offloaded
        chosen = Cut(chosen, mesh)

    first = group.rank == 0 and not (team and team.outside)
    # A run's events are those of its first member, whoever that is; a replacement for it needs a file of its own.
    own = place.rank if not team else 0 if first else place.rank or place.size
    events, closers = _events(directory, agreed, place.rank, own, first=first)
    ending = Ending(
        directory=directory,
        script=script,
        events=events,
        status=status,
        first=first,
        host=place.host,
    )

    def lead(first: bool) -> None:
        """The first member is gone: this one tells of the run from now on; or it was away, and another one does."""
        for closer in closers:
            closer()
        taken, closers[:] = _events(
            directory, agreed, place.rank, 0 if first else place.rank or place.size, first=first
        )
        events.sinks[:] = taken.sinks
        if "epoch" in events.newest:  # how far the run has come, for what shows it
            for sink in taken.sinks[1:]:
                sink(events.newest["epoch"])
        ending.first = first
        while first and desks:
            desks.pop().close()
        if first:
            seat()

    desks: list[Desk] = []

    def seat() -> None:
        if wires and not (team and team.outside):
            desks.extend(_desk(place, wires[0], directory, meeting.token, chosen, agreed.strategy))

    run = Run(
        settings=agreed,
        directory=directory,
        device=device,
        group=group,
        strategy=chosen,
        events=events,
        status=status,
        ending=ending,
        wires=wires[0] if wires else None,
        servers=range(place.workers, place.size),
        dealer=dealer,
        team=team,
        labels=place.labels,
        host=place.host,
        replaces=meeting.replaces,
        late=meeting.late,
        rate=rate,
        lead=lead,
    )
    seat()

    end = team.close if team else group.close  # a team's first group may be long gone

    def close() -> None:
        for closer in [*(desk.close for desk in desks), without_torch, end]:
            closer()
        for closer in [*(w.close for w in wires), *closers]:
            closer()

    ending.watch(run._finish, [close])
    _say_where(run, place)
    if place.launched and place.rank == 0:
        for message in [*_without_effect(settings, agreed), *([said] if said else [])]:
            events.emit("warning", message=message)
        if chosen.forgives and place.size > 1 and not place.servers and "strategy" not in agreed.pinned:
            run._tell(_shards_live_here(agreed.strategy))
    _current = run
    return run


def _say_where(run: Run, place: Place) -> None:
    """Under our launcher it is known; alone it goes without saying, unless more was to be expected."""
    by = place.job or ("torchrun" if place.kind == "torchrun" else "")
    line = f"{run.size} members, started by {by}" if by and not place.launched else place.note
    if line and run.settings.progress != "off":
        run._tell(line)


def _check_elastic(strategy: Strategy, settings: Settings, least: int, most: int) -> None:
    """Refuse what cannot lose a member in place yet."""
    if isinstance(strategy, Local):
        strategy.refuse_elastic(least, most)
    elif not isinstance(strategy, AllReduce):
        raise ConfigError(
            f"-n MIN:MAX and a script whose strategy is {settings.strategy}: say so on the command line too, as in "
            "--strategy async, so that there are server processes, which outlive a lost worker"
        )
    if settings.transport not in ("auto", "own"):
        raise ConfigError(
            f"-n MIN:MAX goes with our own transport, not with {settings.transport}, whose groups cannot be formed "
            "again: leave --transport out"
        )


def _strategy(given: Strategy | str | None, agreed: Settings) -> tuple[Strategy, str]:
    """The run's strategy, and what to say where the script's is not the one that was typed."""
    if given is None or (isinstance(given, str) and "strategy" not in agreed.pinned):
        return make_strategy(agreed.strategy, agreed.codec), ""
    chosen, said = make_strategy(given), ""
    if "strategy" in agreed.pinned:
        chosen, said = choose(chosen, agreed.strategy)
    return make_strategy(chosen, agreed.codec), said


def _shards_live_here(words: str) -> str:
    name = words.partition("(")[0]
    return (
        f"{words} comes from the script, so a part of the parameters lives with every worker, batches are shared out "
        f"evenly, and a lost worker ends the run; --strategy {words if name == 'bounded' else name!s} on the command "
        "line gives server processes, with which it goes on"
    )


def _desk(place: Place, wires: Wires, directory: Path, token: str, strategy: Strategy, words: str) -> list[Desk]:
    """Where outsiders look in: beside each shard; without servers, with the first member."""
    served = strategy if isinstance(strategy, Served) else None
    ranks = range(place.workers) if served else range(1)
    if place.servers or wires.rank not in ranks:
        return []
    desk = Desk(
        wires,
        ranks,
        directory=directory,
        token=token,
        strategy=served.gate.words if served else words,
        service=lambda: served.service if served else None,
        servers=served is not None,
    )
    return [desk]


def _merge(launched: Settings, given: dict[str, Any], place: Place) -> Settings:
    """What the script gives, but for what the launcher was told; the launcher made the directory already."""
    if not place.launched:
        return launched
    fixed = {"name", "root", *launched.pinned}
    return launched.with_(**{name: value for name, value in given.items() if name not in fixed})


def _without_effect(given: dict[str, Any], agreed: Settings) -> list[str]:
    """What to say of a name and a root that the script gives although the launcher has decided."""
    wanted = {key: str(given[key]) for key in ("name", "root") if given.get(key)}
    if wanted.get("name") == agreed.name:
        del wanted["name"]
    if "root" in wanted and Path(wanted["root"]).absolute() == Path(agreed.root).absolute():
        del wanted["root"]
    return [
        f"join({key}={value!r}) has no effect under paceline run, which uses {getattr(agreed, key)!r}: "
        f"give --{key} {value} on the command line"
        for key, value in wanted.items()
    ]


def _check_words(settings: Settings) -> None:
    for kind, known in {
        "transport": TRANSPORTS,
        "progress": MODES,
        "lr_rule": RULES,
        "stragglers": pacing.RULES,
    }.items():
        if (word := getattr(settings, kind)) not in known:
            raise ConfigError(f"unknown {kind} {word!r}: {nearest(word, known)}")
    make_strategy(settings.strategy, settings.codec)
    make_precision(settings.precision).check(settings)


def _form(wires: Wires, workers: int, transport: str, device: torch.device) -> Group:
    ranks = range(workers)
    if transport in ("gloo", "nccl"):
        return TorchGroup(wires, ranks, transport, device if transport == "nccl" else torch.device("cpu"))
    group = Group(wires, ranks)
    if transport == "auto" and own_gpu_each(group, device):
        group.close()
        return TorchGroup(wires, ranks, "nccl", device)
    return group


def _device(wanted: str, place: Place) -> torch.device:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "auto":
        return torch.device(f"cuda:{place.local_rank % count}") if count else torch.device("cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise ConfigError(f"unknown device {wanted!r}: allowed are auto, cpu, cuda and cuda:N") from None
    if device.type == "cuda":
        if not count:
            raise ConfigError(
                f"device {wanted!r} was asked for, but this torch ({torch.__version__}) sees no CUDA device: "
                "use --device cpu, or install a CUDA build of torch and check nvidia-smi"
            )
        if device.index is not None and device.index >= count:
            raise ConfigError(f"device {wanted!r} does not exist: there are {count}, cuda:0 to cuda:{count - 1}")
        if device.index is None:
            device = torch.device(f"cuda:{place.local_rank % count}")
        torch.cuda.set_device(device)
    return device


def _address(place: Place) -> str:
    """The address on which the others reach this member: loopback where all share this host."""
    if place.scheduler:  # which listens on loopback where there are no other hosts
        return own_address(split_address(place.scheduler)[0])
    if place.local_size == place.size:
        return "127.0.0.1"
    if place.kind == "torchrun" and not place.rendezvous:
        return own_address(os.environ["MASTER_ADDR"].strip("[]"))
    address = own_address(split_address(place.rendezvous)[0])
    if is_loopback(address) and place.other_host:
        with contextlib.suppress(ConfigError):  # a name that only the engine knows
            address = own_address(place.other_host)
    return address


def _events(
    directory: Path, settings: Settings, rank: int, file: int, *, first: bool
) -> tuple[Events, list[Callable[[], None]]]:
    lines = JsonLines(directory / "events" / f"rank-{file}.jsonl")
    events = Events(rank, [lines])
    closers: list[Callable[[], None]] = [lines.close]
    if first:
        progress = make_progress(settings.progress)
        events.sinks.append(progress)
        closers.append(progress.close)
        if board := tensorboard_sink(directory / "tensorboard"):
            events.sinks.append(board)
            closers.append(board.close)
    return events, closers


def _script() -> str:
    main = sys.modules.get("__main__")
    path = str(getattr(main, "__file__", "") or "")
    return path if path.endswith(".py") else "notebook"
