"""How many servers a run gets, and why: the ratio that nobody knows how to pick."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from paceline.core.errors import ConfigError
from paceline.core.words import read

_SERVED = ("sync", "bounded", "async", "async_local")
_WORKERS_PER_SERVER = 4  # one server applies the pushes of so many workers while they compute the next


def served(strategy: str) -> bool:
    """Whether a strategy, in words, has servers."""
    return read(strategy, "strategy").name in _SERVED


def choose(strategy: str, servers: str, workers: int, *, replaces: bool = False) -> tuple[int, str]:
    """Server processes for so many workers, and the reason; 0 where shards live with the workers, or there are none.

    `replaces`: lost workers are started again, which takes servers that outlive them.

    >>> choose("async", "auto", 6)
    (2, '2 servers for 6 workers: one for each 4; a lost worker takes no parameters with it')
    >>> choose("allreduce", "auto", 6)
    (0, '')
    """
    name = read(strategy, "strategy").name
    if name not in _SERVED:
        if servers != "auto":
            raise ConfigError(f"--servers {servers}: {name} has no servers; use --strategy {', '.join(_SERVED)}")
        return 0, ""
    if replaces and servers == "colocated":
        raise ConfigError(
            "--servers colocated: a part of the parameters lives with every worker, so a lost one cannot be replaced; "
            "leave it out, or --replacements and MIN:MAX"
        )
    if workers == 1 and servers in ("auto", "colocated") and not replaces:
        return 0, ""
    if servers == "colocated":
        return 0, "a shard with every worker, as asked for"
    if servers != "auto":
        return int(servers), f"{servers} server{'s' if servers != '1' else ''}, as asked for"
    if not _lets_go(strategy) and not replaces:
        return 0, "a shard with every worker: sync spreads the load as evenly as a ring does"
    count = -(-workers // _WORKERS_PER_SERVER)
    each = f"one for each {_WORKERS_PER_SERVER}" if count > 1 else f"one is enough for up to {_WORKERS_PER_SERVER}"
    plural = "s" if count > 1 else ""
    return count, f"{count} server{plural} for {workers} workers: {each}; a lost worker takes no parameters with it"


def forgives(strategy: str, num_servers: int) -> bool:
    """Whether a run goes on when a worker is lost: where nobody waits for everybody, and no parameters go with it.

    >>> forgives("async", 1), forgives("sync", 1), forgives("async", 0)
    (True, False, False)
    >>> forgives("sync(backups=1)", 1), forgives("sync(backups=0)", 1)
    (True, False)
    """
    return num_servers > 0 and _lets_go(strategy)


def _lets_go(strategy: str) -> bool:
    """Whether nobody waits for everybody; read without torch, which takes long to import."""
    said = read(strategy, "strategy")
    backups = said.named.get("backups", said.positional[0] if said.positional else 0)
    return said.name in ("async", "bounded", "async_local") or (said.name == "sync" and backups != 0)


def turned(events: Path, since: float) -> str:
    """The gate to which the script has turned its servers (`run.turn`) since then, by its events; "": it has not."""
    gate = ""
    with contextlib.suppress(OSError), events.open("rb") as file:
        for line in file:
            if b'"turn"' in line:
                with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
                    event = msgspec.json.decode(line, type=_Turn)
                    gate = event.gate if event.kind == "turn" and event.time >= since else gate
    return gate


class _Turn(msgspec.Struct):
    kind: str = ""
    time: float = 0.0
    gate: str = ""


def parse(text: str) -> str:
    """`text`, if it is auto, colocated, or a number of servers."""
    if text in ("auto", "colocated") or (text.isdecimal() and int(text) >= 1):
        return text
    raise ConfigError(f"{text!r} is not auto, colocated, or a number of servers of at least 1")
