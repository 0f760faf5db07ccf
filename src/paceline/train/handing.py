"""Bytes from one member to others, and what else a team needs to hand a state or a result on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline.checkpoint import pack
from paceline.core.errors import PacelineError
from paceline.transport.group import Group


def let_go(error: BaseException) -> None:
    """Forget where an error came from: its frames hold the group that broke, with all of its shared memory, and are
    held by each other until Python looks for cycles."""
    seen: BaseException | None = error
    while seen is not None:
        seen.__traceback__ = None
        seen = seen.__context__


def given(group: Group, source: int, to: list[int], make: Callable[[], bytes]) -> bytes | None:
    """Bytes from one member to some; None where there is nothing to get."""
    if len(to) == group.size - 1 and to:  # all others
        mine = make() if group.rank == source else b""
        length = torch.tensor([len(mine)])
        group.broadcast(length, source)
        flat = _flat(mine) if mine else torch.zeros(int(length), dtype=torch.uint8)
        group.broadcast(flat, source)
        return None if group.rank == source else flat.numpy().tobytes()
    if group.rank == source and to:
        flat = _flat(make())
        for rank in to:
            group.send(flat, rank)
    return group.recv(source).numpy().tobytes() if group.rank in to else None


def _flat(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def plain(result: Any) -> Any:
    """A result that can be handed on; what is of one member alone cannot."""
    try:
        pack(result)
    except PacelineError:
        return None
    return result
