"""How many servers a run gets, and why: the ratio that nobody knows how to pick."""

from __future__ import annotations

import re

from paceline.core.errors import ConfigError

_SERVED = ("sync", "bounded", "async")
_WORKERS_PER_SERVER = 4  # one server applies the pushes of so many workers while they compute the next


def choose(strategy: str, servers: str, workers: int) -> tuple[int, str]:
    """Server processes for so many workers, and the reason; 0 where shards live with the workers, or there are none.

    >>> choose("async", "auto", 6)
    (2, '2 servers for 6 workers: one for each 4; a lost worker takes no parameters with it')
    >>> choose("allreduce", "auto", 6)
    (0, '')
    """
    name = re.split(r"\W", strategy.strip(), maxsplit=1)[0]
    if name not in _SERVED:
        if servers != "auto":
            raise ConfigError(f"--servers {servers}: {name} has no servers; use --strategy {', '.join(_SERVED)}")
        return 0, ""
    if workers == 1 and servers in ("auto", "colocated"):
        return 0, ""
    if servers == "colocated":
        return 0, "a shard with every worker, as asked for"
    if servers != "auto":
        return int(servers), f"{servers} server{'s' if servers != '1' else ''}, as asked for"
    if name == "sync" and "backups" not in strategy:
        return 0, "a shard with every worker: sync spreads the load as evenly as a ring does"
    count = -(-workers // _WORKERS_PER_SERVER)
    each = f"one for each {_WORKERS_PER_SERVER}" if count > 1 else f"one is enough for up to {_WORKERS_PER_SERVER}"
    plural = "s" if count > 1 else ""
    return count, f"{count} server{plural} for {workers} workers: {each}; a lost worker takes no parameters with it"


def forgives(strategy: str, num_servers: int) -> bool:
    """Whether a run goes on when a worker is lost: where nobody waits for everybody, and no parameters go with it.

    >>> forgives("async", 1), forgives("sync", 1), forgives("async", 0)
    (True, False, False)
    """
    return num_servers > 0 and (strategy.strip().startswith(("async", "bounded")) or "backups" in strategy)


def parse(text: str) -> str:
    """`text`, if it is auto, colocated, or a number of servers."""
    if text in ("auto", "colocated") or (text.isdecimal() and int(text) >= 1):
        return text
    raise ConfigError(f"{text!r} is not auto, colocated, or a number of servers of at least 1")
