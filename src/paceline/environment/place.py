"""A place: where this process stands among the others, as its starter told it through the environment.

Made by one of the modules beside this one, read by `membership.meet` and by the run. It holds what is known
before anyone has been met; who the others are is a view, which comes later.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from paceline.core.errors import ConfigError
from paceline.core.labels import parse

LABELS = "PACELINE_LABELS"  # set by `paceline run`; under torchrun and alone, by the user


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Which member this process is, and where the members meet."""

    kind: str  # alone, paceline, torchrun, or an engine: slurm, mpi, ray, kubernetes
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    servers: int = 0  # the last so many of the ranks hold parameters and do not train
    host: str = ""  # the same for members that share memory and loopback; see `this_host`
    rendezvous: str = ""  # "ip:port"; not alone, nor under torchrun alone, whose members meet in its store
    keeps: bool = False  # member 0 keeps the rendezvous: an engine started the members, and no launcher of ours
    scheduler: str = ""  # "ip:port", in place of a rendezvous where members come and go; `rank` is then the id
    token: str = ""  # of the run; "": it is made when the members meet
    job: str = ""  # what an engine started, in words: "Slurm job 12, step 0"
    other_host: str = ""  # one that is not this, where the engine tells: the way there shows the right interface
    labels: tuple[str, ...] = ()  # what this member was told to have; see `core.labels`
    note: str = ""  # what the user should know of how this was found out

    @property
    def launched(self) -> bool:
        """Whether `paceline run` started this: then it keeps the rendezvous and has made the run's directory."""
        return bool(self.rendezvous or self.scheduler) and not self.keeps

    @property
    def workers(self) -> int:
        """How many train."""
        return self.size - self.servers


@functools.cache
def this_host() -> str:
    """A name for what this process can reach through shared memory and loopback.

    Two network namespaces of one machine count as two hosts, and so do two machines that share a host name.
    """
    parts = [os.uname().nodename]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8])
        parts.append(str(os.stat("/proc/self/ns/net").st_ino))
    except OSError:  # no /proc: the host name must do
        pass
    return "-".join(parts)


def labels_in(env: Mapping[str, str]) -> tuple[str, ...]:
    """
    >>> labels_in({"PACELINE_LABELS": "gpu,site-a"})
    ('gpu', 'site-a')
    """
    return parse(env.get(LABELS, ""), LABELS)


def whole(env: Mapping[str, str], variable: str, starter: str, least: int = 0) -> int:
    """The whole number in `variable`, which `starter` must have set.

    >>> whole({"RANK": "3"}, "RANK", "torchrun")
    3
    """
    text = given(env, variable, starter)
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise ConfigError(
            f"{variable}={text!r} must be a whole number of at least {least}; "
            f"{starter} sets it, so do not set it by hand"
        )
    return value


def given(env: Mapping[str, str], variable: str, starter: str) -> str:
    """The text in `variable`, which `starter` must have set."""
    text = env.get(variable, "")
    if not text:
        raise ConfigError(
            f"{variable} is not set although other variables of {starter} are: "
            f"start the script with {starter}, or unset them all to run it alone"
        )
    return text


def below(place: Place, rank: str, size: str, local_rank: str, local_size: str) -> Place:
    """The place, if its ranks lie below its sizes; the others are what the message calls them."""
    for mine, bound, name, limit in (
        (place.rank, place.size, rank, size),
        (place.local_rank, place.local_size, local_rank, local_size),
    ):
        if mine >= bound:
            raise ConfigError(f"{name}={mine} must be below {limit}={bound}: check what started this process")
    if place.local_size > place.size:
        raise ConfigError(
            f"{local_size}={place.local_size} exceeds {size}={place.size}: check what started this process"
        )
    return place
