"""A tensor in parts that stands for the whole: of its shape, while each member has only its part.

Code between two layers that are split (`view`, `transpose`, softmax, ...) is written for the whole, and stays so. What
has a rule (`rules`) is computed on the parts. For everything else the whole is put together first: slower, never wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from paceline.core.errors import ConfigError
from paceline.parallel.fellows import Fellows, gather
from paceline.parallel.lay import Lay

Rule = Callable[[Callable[..., Any], Sequence[Any], dict[str, Any]], Any]

RULES: dict[str, Rule] = {}  # by name of the function; NotImplemented: not in this case
GATHERED: Counter[str] = Counter()  # the functions for which wholes were put together

_ABOUT = (
    "size",
    "dim",
    "numel",
    "nelement",
    "ndimension",
    "is_floating_point",
    "is_complex",
    "element_size",
    "__len__",
)
_ALSO_ABOUT = ("get_device", "__hash__")  # what the shape and the dtype tell
_ABOUT_FIELDS = ("shape", "ndim", "dtype", "device", "layout", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_nested")
_OF_PART = ("register_hook", "retain_grad", "requires_grad_")
_OF_PART_FIELDS = ("requires_grad", "grad_fn", "is_leaf", "_base", "_version")


def _getters(names: Sequence[str]) -> set[Any]:
    return {getattr(torch.Tensor, name).__get__ for name in names if hasattr(torch.Tensor, name)}


_FIELDS, _PART_FIELDS = _getters(_ABOUT_FIELDS), _getters(_OF_PART_FIELDS)


class Spread(torch.Tensor):
    """A whole of which this member has `local`, at `lay`."""

    local: torch.Tensor
    lay: Lay
    fellows: Fellows
    taken: list[_Taken]  # out of it, or out of others in the same memory

    @staticmethod
    def __new__(cls, local: torch.Tensor, lay: Lay, fellows: Fellows) -> Spread:
        shape = list(local.shape)
        shape[lay.dim] = lay.whole
        new: Spread = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)
        new.local, new.lay, new.fellows, new.taken = local, lay, fellows, []
        return new

    def __init__(self, local: torch.Tensor, lay: Lay, fellows: Fellows) -> None:
        pass

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # without an exchange: one member alone may print it
        return f"Spread(shape={tuple(self.shape)}, dim={self.lay.dim}, local={tuple(self.local.shape)})"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.whole().detach().clone()

    def whole(self) -> torch.Tensor:
        """All of it; by all members together."""
        return gather(self.local, self.fellows, self.lay)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(getattr(kind, "is_to_come", False) for kind in types):
            return NotImplemented  # the output of a branch knows what to do
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            if func in _FIELDS:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args)
            if func in _PART_FIELDS:
                return func(args[0].local)
        elif name in _ABOUT or name in _ALSO_ABOUT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        elif name in _OF_PART:
            return func(args[0].local, *args[1:], **kwargs)
        if name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", "__get__")
        for given in (*args, *kwargs.values()) if name != "__setitem__" else ():  # which is refused for itself
            for one in given if isinstance(given, tuple | list) else (given,):
                if isinstance(one, Spread) and one.taken:
                    _refuse_changed(one.taken)
        if rule := RULES.get(name):
            out = rule(func, args, kwargs)
            if out is not NotImplemented:
                _pass_on(args, out)
                return out
        changes = name in ("__set__", "__setitem__") or (name.endswith("_") and not name.endswith("__"))
        if "out" in kwargs or (changes and isinstance(args[0], Spread)):
            raise ConfigError(
                f"{name} on a tensor that is split: it is in parts, and cannot be changed in place so; make another "
                "tensor (torch.where, masked_fill, no underscore), or leave the layer before it out of split="
            )
        GATHERED[name] += 1
        put_together = wholes(args)
        out = func(*put_together, **wholes(kwargs))
        if args and isinstance(args[0], Spread):
            args[0].taken.extend(_views(name, out, put_together[0]))
        return out

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise ConfigError(
            f"{func}: a tensor that is split came where PyTorch looks at memory, as in a compiled or custom autograd "
            "function; leave the layer before it out of split="
        )


def wholes(value: Any) -> Any:
    """With wholes in the place of parts."""
    return pytree.tree_map(lambda leaf: leaf.whole() if isinstance(leaf, Spread) else leaf, value)


class _Taken(NamedTuple):
    """A piece that code for the whole takes for a view, and is one of a copy."""

    piece: torch.Tensor  # held, since it may be changed and dropped in one line
    version: int
    name: str  # of the function that took it


def _views(name: str, out: Any, whole: torch.Tensor) -> list[_Taken]:
    """What of a function's result lies in the memory of the whole that was put together for it."""
    if whole.is_inference():  # such tensors count no changes
        return []
    found = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor) and t.layout == torch.strided]
    return [_Taken(t, t._version, name) for t in found if _same_memory(t, whole)]


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """By storage, not by address: those of parts that are empty have one address."""
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


def _refuse_changed(taken: Sequence[_Taken]) -> None:
    for piece, version, name in taken:
        if piece._version != version:
            raise ConfigError(
                f"what {name} took out of a tensor that is split, of shape {tuple(piece.shape)}, was changed in place, "
                "and the tensor is used again: the piece is a copy here, so the tensor would miss the change. Change a "
                "piece without an underscore and put it back with torch.cat or torch.where, or leave the layer before "
                "it out of split="
            )


def _pass_on(args: Sequence[Any], out: Any) -> None:
    """Views of one tensor in parts know of the same pieces."""
    first = args[0] if args and isinstance(args[0], Spread) else None
    for made in out if isinstance(out, tuple | list) else (out,):
        if first is not None and isinstance(made, Spread) and _same_memory(made.local, first.local):
            made.taken = first.taken


class Packed(NamedTuple):
    """A Spread for those who look at tensors' memory: checkpointing, `fully_shard`."""

    local: torch.Tensor
    lay: Lay
    fellows: Fellows


def pack(value: Any) -> Any:
    return pytree.tree_map(lambda t: Packed(t.local, t.lay, t.fellows) if isinstance(t, Spread) else t, value)


def unpack(value: Any) -> Any:
    def packed(node: Any) -> bool:
        return isinstance(node, Packed)

    return pytree.tree_map(lambda t: Spread(*t) if isinstance(t, Packed) else t, value, is_leaf=packed)
