"""What codecs have left unsaid, as a strategy tells of it, hands it on and loses it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from paceline.checkpoint.part import pack, unpack
from paceline.strategies.reducers import Coder
from paceline.strategies.strategy import World
from paceline.transport.group import Group


def readings_of(coders: Sequence[Coder]) -> dict[str, Any]:
    """What codecs took and gave, for the summary; empty where there are none."""
    if not coders:
        return {}
    totals = {name: sum(getattr(c.cost, name) for c in coders) for name in vars(coders[0].cost)}
    norms = []
    for coder in coders:
        rows = getattr(coder.method.codec, "rows", 1)  # the first is what is unsaid, others are momenta
        norms += [float(r[: r.numel() // rows].norm()) for r in coder.residuals.values()]
    chosen = " | ".join(dict.fromkeys(c.chosen.words for c in coders if c.chosen))
    words = coders[0].asked.words + (f": {chosen}" if chosen else "")
    return {"codec": words, **totals, "residual_norm": math.hypot(*norms)}


def handed_on(kept: list[Any], group: Group, speakers: Sequence[int] | None = None) -> list[Any]:
    """What this member and those for which it exchanges gradients have kept; nothing where another one does so.

    `speakers`: of each member, by rank, the one that does so for it; None: as the group has it.
    """
    speakers = group.speakers if speakers is None else speakers
    if speakers[group.rank] != group.rank:
        group.send(torch.frombuffer(bytearray(pack(kept)), dtype=torch.uint8), speakers[group.rank])
        return []
    for rank, speaker in enumerate(speakers):
        if speaker == group.rank != rank:
            kept = kept + unpack(group.recv(rank).numpy().data)
    return kept


def tell_lost(kept: Sequence[Sequence[dict[str, Any]]], world: World) -> None:
    """By all members together: what each of them was given of coders' states will not be said any more."""
    states = [state for each in kept for state in each]
    parts = [part for state in states for part in (*state["residuals"].values(), *state["returns"].values())]
    squares = torch.tensor([float(part.double().square().sum()) for part in parts], dtype=torch.float64).sum()
    norm = math.sqrt(float(world.group.all_reduce(squares.view(1))))
    if norm:
        why = "there is one member" if world.group.size == 1 else "gradients travel as they are"
        world.tell(
            f"what a codec had left unsaid before the checkpoint, of norm {norm:.3g}, is lost, since now {why}: "
            "resume with several members and a codec to keep it"
        )
