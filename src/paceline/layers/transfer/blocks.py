"""Files that the members of a run make in shares: who has which, and how those who lack some get them.

Sits under `features`. Knows of a run only what `Members` says, so that nothing here imports it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from paceline.core.errors import ConfigError

_PRINT = 32  # bytes of a fingerprint


class Members(Protocol):
    """What is asked of a run."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def all_gather(self, tensor: Tensor) -> list[Tensor]: ...
    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor: ...


class Alone:
    """A run of one."""

    rank = 0
    size = 1

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor]

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        return tensor


def gathered(
    members: Members, mine: Sequence[bool], print_of: bytes, failed: ConfigError | None
) -> list[tuple[bool, ...]]:
    """Which files each member has; an error on one is an error on all, so that nobody waits for it."""
    told = torch.tensor([failed is not None, *mine, *print_of], dtype=torch.uint8)
    everyone = [tuple(each.tolist()) for each in members.all_gather(told)]
    if failed is not None:
        raise failed
    for rank, other in enumerate(everyone):
        if other[0]:
            raise ConfigError(f"member {rank} could not take part in transfer.features: its own message says why")
        if other[-_PRINT:] != everyone[0][-_PRINT:]:
            raise ConfigError(
                f"transfer.features: members 0 and {rank} have other weights, another cut or other samples. Load the "
                "same file on every member before this call"
            )
    return [tuple(map(bool, each[1:-_PRINT])) for each in everyone]


def exchange(members: Members, paths: Sequence[Path], print_of: bytes, failed: ConfigError | None) -> None:
    """Every member has every file then: where a directory is not in common, over the wire."""
    gathered(members, [False] * len(paths), print_of, failed)  # all files are written
    have = gathered(members, [path.exists() for path in paths], print_of, None)
    for i, path in enumerate(paths):
        holders = [rank for rank, own in enumerate(have) if own[i]]
        if len(holders) == members.size:
            continue
        mine = have[members.rank][i]
        data = path.read_bytes() if mine else b""
        size = int(members.broadcast(torch.tensor([len(data)]), holders[0]))
        body = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(size, dtype=torch.uint8)
        body = members.broadcast(body, holders[0])
        if not mine:
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = path.with_name(f".{path.name}.{os.getpid()}")
            draft.write_bytes(body.numpy().tobytes())
            draft.replace(path)
