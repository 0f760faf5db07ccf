"""Parts of tensors: what this member has of a parameter that is cut, and the whole of it.

What PyTorch cuts becomes a DTensor: a local tensor, and where it stands in the whole. Its package takes a second to
import, and is not imported for runs that cut nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def is_cut(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "_local_tensor")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This member's part, in the memory of the whole."""
    return getattr(tensor, "_local_tensor", tensor)


def whole(tensor: torch.Tensor, of: torch.Tensor | None = None) -> torch.Tensor:
    """All of it; by all who have parts together. `of`: the parameter whose gradient or state it is."""
    if not is_cut(tensor):
        return tensor
    how = getattr(tensor if of is None else of, "cut_as", None)  # of a parameter that is split
    return how.whole(local(tensor)) if how else tensor.full_tensor()  # type: ignore[attr-defined, no-any-return]


@torch.no_grad()
def fill(tensor: torch.Tensor, whole: torch.Tensor) -> None:
    """Take this member's part out of the whole."""
    local(tensor).copy_(_part(tensor, whole))


def like(tensor: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """A whole of the same shape, cut as `tensor` is."""
    if not is_cut(tensor):
        return whole.to(tensor.device)
    return around(tensor, _part(tensor, whole).to(tensor.device).clone())


def _part(tensor: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    if not is_cut(tensor):
        return whole
    if how := getattr(tensor, "cut_as", None):
        return how.part(whole)  # type: ignore[no-any-return]
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)  # type: ignore[attr-defined]
    return whole[tuple(slice(start, start + length) for start, length in zip(offset, shape))]


class Pieces(nn.Module):
    """This member's parts as a model of their own, with the names of the whole and in the same memory: what the
    strategy makes agree with the members that have the same parts."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.of = {name: (p, nn.Parameter(local(p.detach()), p.requires_grad)) for name, p in model.named_parameters()}
        for number, (_, part) in enumerate(self.of.values()):
            self.register_parameter(f"part_{number}", part)

    def named_parameters(self, *args: Any, **options: Any) -> Any:
        return ((name, part) for name, (_, part) in self.of.items())

    def pull(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Parts that have a gradient, with it. The gradients of the whole go to the parts' own."""
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        for p, part in self.of.values():
            part.requires_grad_(p.requires_grad)
            part.grad = None
            if p.grad is not None:
                found.append((part, local(p.grad)))
        return found

    def push(self) -> None:
        """Gradients of the parts are those of the whole."""
        for p, part in self.of.values():
            if part.grad is None:
                continue
            if p.grad is None:
                p.grad = around(p, part.grad)
            elif local(p.grad).data_ptr() != part.grad.data_ptr():
                local(p.grad).copy_(part.grad)
            part.grad = None


def around(tensor: Any, part: torch.Tensor) -> torch.Tensor:
    """A part that is cut as `tensor` is."""
    if not is_cut(tensor):
        return part
    from torch.distributed.tensor import DTensor

    mesh, placements = tensor.device_mesh, tensor.placements
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())
