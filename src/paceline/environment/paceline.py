"""Started by `paceline run`: the launcher says who we are and where the others are met.

That is the rendezvous of a run whose members stay the same, or the scheduler of an elastic one. Only what is needed to
meet travels this way; the settings of the run come with the answer.
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.core.errors import ConfigError
from paceline.environment.place import LABELS, Place, below, given, labels_in, this_host, whole

VARIABLES = (
    "PACELINE_RANK",
    "PACELINE_SIZE",
    "PACELINE_LOCAL_RANK",
    "PACELINE_LOCAL_SIZE",
    "PACELINE_SERVERS",
    "PACELINE_RENDEZVOUS",
    "PACELINE_SCHEDULER",
    "PACELINE_TOKEN",
    LABELS,
)
TOGETHER = "PACELINE_TOGETHER"  # set by an agent: SIGTERM that comes to all at once is the agent's affair
_STARTER = "paceline run"


# What members started by an engine may have of these: it gives them the rest.
_BESIDE_ENGINES = ("PACELINE_RENDEZVOUS", "PACELINE_TOKEN", "PACELINE_SERVERS", LABELS)


def given_a_place(env: Mapping[str, str]) -> bool:
    """Whether our launcher, and no engine, gave this process its rank."""
    return any(env.get(v) for v in VARIABLES if v not in _BESIDE_ENGINES)


def refuse_parts(env: Mapping[str, str]) -> None:
    """Where there is neither a rank of ours nor an engine: refuse what makes sense only with one of them."""
    if any(env.get(v) for v in VARIABLES if v != LABELS):
        given(env, "PACELINE_RANK", _STARTER)


def detect(env: Mapping[str, str]) -> Place:
    elastic = bool(env.get("PACELINE_SCHEDULER"))
    address = _address(env, "PACELINE_SCHEDULER" if elastic else "PACELINE_RENDEZVOUS")
    place = Place(
        kind="paceline",
        rank=whole(env, "PACELINE_RANK", _STARTER),
        size=whole(env, "PACELINE_SIZE", _STARTER, least=1),
        local_rank=whole(env, "PACELINE_LOCAL_RANK", _STARTER),
        local_size=whole(env, "PACELINE_LOCAL_SIZE", _STARTER, least=1),
        servers=whole(env, "PACELINE_SERVERS", _STARTER),
        host=this_host(),
        rendezvous="" if elastic else address,
        scheduler=address if elastic else "",
        token=given(env, "PACELINE_TOKEN", _STARTER),
        labels=labels_in(env),
    )
    if elastic and env.get("PACELINE_RENDEZVOUS"):
        raise ConfigError(
            f"PACELINE_RENDEZVOUS={env['PACELINE_RENDEZVOUS']!r} and PACELINE_SCHEDULER={place.scheduler!r} contradict "
            f"each other: members meet at one of them; {_STARTER} sets it, so do not set the other by hand"
        )
    if elastic and place.servers:
        raise ConfigError(
            f"PACELINE_SERVERS={place.servers} contradicts PACELINE_SCHEDULER={place.scheduler!r}: an elastic run has "
            f"no servers; {_STARTER} sets both, so do not set them by hand"
        )
    return below(place, "PACELINE_RANK", "PACELINE_SIZE", "PACELINE_LOCAL_RANK", "PACELINE_LOCAL_SIZE")


def variables(place: Place) -> dict[str, str]:
    """What `detect` reads, for the launcher to set.

    >>> place = Place(kind="paceline", rank=1, size=2, host=this_host(), rendezvous="127.0.0.1:9", token="t")
    >>> detect(variables(place)) == place
    True
    """
    numbers = (place.rank, place.size, place.local_rank, place.local_size, place.servers)
    texts = (*map(str, numbers), place.rendezvous, place.scheduler, place.token, ",".join(place.labels))
    return {name: text for name, text in zip(VARIABLES, texts, strict=True) if text}


def _address(env: Mapping[str, str], variable: str) -> str:
    address = given(env, variable, _STARTER)
    ip, _, port = address.rpartition(":")
    if not ip or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(
            f"{variable}={address!r} must be an address and a port, such as 127.0.0.1:29400; "
            f"{_STARTER} sets it, so do not set it by hand"
        )
    return address
