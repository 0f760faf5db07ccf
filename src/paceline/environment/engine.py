"""Members that an engine started: where they meet, which it does not say in so many words.

Either `paceline run` keeps the rendezvous and tells its address, and the engine only gives ranks; or nobody does, and
member 0 keeps it: on loopback where all share a host, else on its host, at a port that follows from the job.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import msgspec

from paceline.core.errors import ConfigError
from paceline.environment.place import Place, labels_in, this_host, whole

_PORTS = range(20_000, 30_000)  # below those that systems lend to connections


def meeting(place: Place, env: Mapping[str, str], first_host: str = "", *, port: int = 0) -> Place:
    """The place with its meeting point and its token.

    Args:
        place: with its kind, job, ranks and sizes.
        first_host: where member 0 runs, if that is known. MASTER_ADDR and MASTER_PORT together go before it.
        port: if member 0 has the host's ports to itself.

    >>> place = meeting(Place(kind="slurm", job="Slurm job 7, step 0", size=2), {}, "n1")
    >>> place.rendezvous.startswith("n1:2"), place.keeps
    (True, True)
    """
    place = msgspec.structs.replace(place, host=this_host(), token=env.get("PACELINE_TOKEN", ""), labels=labels_in(env))
    if address := env.get("PACELINE_RENDEZVOUS"):
        servers = whole(env, "PACELINE_SERVERS", "paceline run") if env.get("PACELINE_SERVERS") else 0
        return msgspec.structs.replace(place, rendezvous=address, servers=servers)
    if env.get("MASTER_PORT"):
        port = whole(env, "MASTER_PORT", "whoever gives an address", least=1)
    port = port or _PORTS[zlib.crc32(place.job.encode()) % len(_PORTS)]
    # MASTER_ADDR alone means nothing where there is another way to know: some sites export it in every shell.
    master = first_host if first_host and not env.get("MASTER_PORT") else env.get("MASTER_ADDR") or first_host
    if place.local_size == place.size:
        master = "127.0.0.1"
    if not master:
        raise ConfigError(
            f"{place.job} has members on several hosts and does not say on which is the first: set MASTER_ADDR to the "
            f"address of the host of rank 0, for all of them, or start them with paceline run --on {place.kind}"
        )
    return msgspec.structs.replace(
        place, rendezvous=f"[{master}]:{port}" if ":" in master else f"{master}:{port}", keeps=True
    )
