"""A worker of Ray Train: ranks come from its context, the others are met by Ray's own means.

ray is never imported here: who is in a worker has it already. In any other actor Ray knows no ranks; there the place is
what its environment says.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from paceline.environment import engine
from paceline.environment.place import Place, below


def detect(env: Mapping[str, str]) -> Place | None:
    context = _context()
    if context is None:
        return None
    place = Place(
        kind="ray",
        job=f"Ray Train {context.get_experiment_name() or ''}".strip(),
        rank=context.get_world_rank(),
        size=context.get_world_size(),
        local_rank=context.get_local_rank(),
        local_size=context.get_local_world_size(),
    )
    below(place, "get_world_rank", "get_world_size", "get_local_rank", "get_local_world_size")
    if env.get("PACELINE_RENDEZVOUS"):
        return engine.meeting(place, env)
    # Member 0 writes on a board where it listens: see `membership.board`.
    return msgspec.structs.replace(engine.meeting(place, env, "0.0.0.0"), rendezvous="")


def _context() -> Any:
    """Of the worker that this process is; None where it is none."""
    ray, train = sys.modules.get("ray"), sys.modules.get("ray.train")
    if ray is None or train is None or not ray.is_initialized():
        return None
    try:
        context = train.get_context()
        return None if context.get_world_rank() is None else context
    except Exception:  # ray says in several ways, by version, that this is no worker
        return None
