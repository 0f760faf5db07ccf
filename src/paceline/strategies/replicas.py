"""Making replicas equal before the first step: the same names, shapes and dtypes, and the first member's values."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Set

import torch

from paceline.core.errors import ConfigError
from paceline.transport.group import Group

_BLOCK_BYTES = 8 << 20  # small tensors travel together
_LARGE_BYTES = 1 << 20


def names_of(model: torch.nn.Module) -> dict[int, str]:
    """Names by identity, without the prefix that torch.compile adds; a tied parameter goes by its first name."""
    return {id(p): name.replace("_orig_mod.", "") for name, p in model.named_parameters()}


def is_trained(p: torch.Tensor) -> bool:
    """Whether a parameter is; one that is frozen, and has no gradient that a script made by hand, is not."""
    return p.requires_grad or p.grad is not None


def has_thawed(optimizer: torch.optim.Optimizer, known: Set[int]) -> bool:
    """Whether something is trained now whose id is not among these: a strategy knows nothing of what is frozen."""
    return any(is_trained(p) and id(p) not in known for group in optimizer.param_groups for p in group["params"])


def make_equal(group: Group, parameters: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]) -> None:
    """Check that all members hold the same tensors, then give everyone the first member's values."""
    tensors = {**parameters, **{f"buffer {name}": b for name, b in buffers.items()}}
    _check_equal(group, tensors)
    with torch.no_grad():
        large = [t for t in tensors.values() if t.nbytes >= _LARGE_BYTES]
        for t in large:  # where it lies: gathering these would cost their size in memory once more
            group.broadcast(t.detach())
        for block in _blocks(t for t in tensors.values() if 0 < t.nbytes < _LARGE_BYTES):
            flat = torch.cat([t.detach().reshape(-1).view(torch.uint8).cpu() for t in block])
            group.broadcast(flat)
            if group.rank:
                pieces = torch.split(flat, [t.nbytes for t in block])
                for t, piece in zip(block, pieces):
                    t.copy_(piece.clone().view(t.dtype).view(t.shape))


def _blocks(tensors: Iterable[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    block: list[torch.Tensor] = []
    for t in tensors:
        if block and sum(b.nbytes for b in block) + t.nbytes > _BLOCK_BYTES:
            yield block
            block = []
        block.append(t)
    if block:
        yield block


def _check_equal(group: Group, tensors: Mapping[str, torch.Tensor]) -> None:
    mine = [(name, list(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()]
    told = json.dumps(mine).encode()
    digest = hashlib.sha256(told).digest()
    if all(other == digest for other in group.exchange(digest)):
        return
    lists = [json.loads(other) for other in group.exchange(told)]
    first = {name: (shape, dtype) for name, shape, dtype in lists[0]}
    for rank, entries in enumerate(lists):
        held = {name: (shape, dtype) for name, shape, dtype in entries}
        for name in [*first, *held]:
            if first.get(name) != held.get(name):
                raise ConfigError(
                    f"the model differs between members: parameter {name!r} is {_say(first.get(name))} on member 0 "
                    f"but {_say(held.get(name))} on member {rank}. Build the same model on every member: "
                    "its shape must not depend on the rank or on this member's share of the data"
                )
    raise ConfigError("the model differs between members: the parameters stand in another order")


def _say(entry: tuple[list[int], str] | None) -> str:
    return "missing" if entry is None else f"{entry[1]} of shape {tuple(entry[0])}"
