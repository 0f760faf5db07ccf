"""Started by torchrun, or by anything that sets the same variables for `env://`.

The members then meet in torch.distributed's store at MASTER_ADDR:MASTER_PORT, which torchrun keeps; or, where
`paceline run` has started torchrun, at the launcher's rendezvous, and only the ranks are torchrun's.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from paceline.environment.place import Place, below, given, labels_in, this_host, whole

_STARTER = "torchrun"
# MASTER_ADDR alone means nothing: some sites export it in every shell.
_TELLING = ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID")
_ALL = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def by_its_agent(env: Mapping[str, str]) -> bool:
    return bool(env.get("TORCHELASTIC_RUN_ID"))


def complete(env: Mapping[str, str]) -> bool:
    """Whether torchrun started this, or whoever did has set all that torchrun sets."""
    return by_its_agent(env) or all(env.get(v) for v in _ALL)


def detect(env: Mapping[str, str]) -> Place | None:
    if not any(env.get(v) for v in _TELLING):
        return None
    given(env, "MASTER_ADDR", _STARTER)
    whole(env, "MASTER_PORT", _STARTER)
    place = Place(
        kind="torchrun",
        rank=whole(env, "RANK", _STARTER),
        size=whole(env, "WORLD_SIZE", _STARTER, least=1),
        local_rank=whole(env, "LOCAL_RANK", _STARTER),
        local_size=whole(env, "LOCAL_WORLD_SIZE", _STARTER, least=1),
        host=this_host(),
        labels=labels_in(env),
    )
    if address := env.get("PACELINE_RENDEZVOUS"):
        servers = whole(env, "PACELINE_SERVERS", "paceline run") if env.get("PACELINE_SERVERS") else 0
        token = given(env, "PACELINE_TOKEN", "paceline run")
        place = msgspec.structs.replace(place, rendezvous=address, token=token, servers=servers)
    return below(place, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
