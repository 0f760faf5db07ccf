"""A gradient of which each member holds only its own part: what `p.grad` is with ZeRO-2.

It has the shape of the parameter and none of its memory. What acts on each element by itself (scaling, clamping) acts
on the part that is here; norms and `GradScaler`'s look for infinities are over all members, in one exchange, and give
everyone the same number. So `torch.nn.utils.clip_grad_norm_`, `clip_grad_value_` and `scaler.unscale_` do what they
always do, on all members together. Whatever would need the other parts is refused in words.

A later backward pass adds to it: what autograd brings is kept as it is until the members have exchanged it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from paceline.core.errors import ConfigError
from paceline.strategies.strategy import World

_aten = torch.ops.aten
_EACH = {  # of one gradient, element by element
    _aten.mul.Tensor, _aten.mul.Scalar, _aten.mul_.Tensor, _aten.mul_.Scalar,
    _aten.div.Tensor, _aten.div.Scalar, _aten.div_.Tensor, _aten.div_.Scalar,
    _aten.neg.default, _aten.neg_.default, _aten.zero_.default, _aten.clone.default,
    _aten.clamp.default, _aten.clamp_.default, _aten.clamp_min_.default, _aten.clamp_max_.default,
    _aten.abs.default, _aten.abs_.default, _aten.sign.default, _aten.sign_.default, _aten.sqrt.default,
    _aten.pow.Tensor_Scalar, _aten.nan_to_num.default, _aten.nan_to_num_.default,
}  # fmt: skip
_EACH_OF_MANY = {
    _aten._foreach_mul_.Scalar, _aten._foreach_mul_.Tensor, _aten._foreach_div_.Scalar, _aten._foreach_div_.Tensor,
    _aten._foreach_zero_.default, _aten._foreach_neg_.default,
    _aten._foreach_clamp_min_.Scalar, _aten._foreach_clamp_max_.Scalar,
}  # fmt: skip


class Parts:
    """The gradients of one model, for what is asked of all of them."""

    def __init__(self, world: World, parameters: Mapping[int, torch.nn.Parameter]) -> None:
        self._world = world
        self._parameters = parameters
        self._changes = 0

    def changed(self) -> None:
        """Norms that were known are no more."""
        self._changes += 1

    def norms(self, wanted: Sequence[OwnPart], order: float) -> list[float]:
        """Of each of these, over all members. Those of the model's other gradients are made with them, in one
        exchange, since they are likely to be asked for next."""
        now = (self._changes, order)
        if any(part.known[:2] != now for part in wanted):
            others = [p.grad for p in self._parameters.values() if isinstance(p.grad, OwnPart)]
            every = [*wanted, *(other for other in others if not any(other is part for part in wanted))]
            mine = torch.tensor([_power(part.pieces, order) for part in every], dtype=torch.float64)
            self._world.group.all_reduce(mine, "max" if math.isinf(order) else "sum")
            for part, value in zip(every, mine.tolist()):
                part.known = (*now, value if math.isinf(order) else value ** (1 / order))
        return [part.known[2] for part in wanted]

    def found(self, here: torch.Tensor) -> torch.Tensor:
        """Whether any member has found something, as GradScaler counts it: 1 or 0."""
        return self._world.group.all_reduce(here.detach().cpu().clone(), "max")


class OwnPart(torch.Tensor):
    """The gradient of one parameter; `pieces` are this member's, flat, one after another."""

    pieces: list[torch.Tensor]
    parts: Parts
    pending: torch.Tensor | None  # of later passes, not exchanged yet
    known: tuple[int, float, float]  # its norm: after how many changes, of which order, and what it is

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, like: torch.Tensor, pieces: list[torch.Tensor], parts: Parts) -> OwnPart:
        made = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        made.pieces, made.parts, made.pending, made.known = pieces, parts, None, (-1, 0.0, 0.0)
        return made

    def __init__(self, like: torch.Tensor, pieces: list[torch.Tensor], parts: Parts) -> None:
        pass

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"OwnPart({sum(p.numel() for p in self.pieces)} of {self.numel()} elements, shape={tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0][0] if isinstance(args[0], list | tuple) and args[0] else args[0]
        if not isinstance(first, OwnPart):
            raise _refused(func)
        if func is _aten.detach.default:
            return first
        if func is _aten.add_.Tensor and not isinstance(args[1], OwnPart) and args[1].shape == first.shape:
            first.pending = args[1].detach() if first.pending is None else first.pending.add_(args[1])
            return first
        if func in _EACH:
            return _each(func, first, args[1:], kwargs)
        if func in _EACH_OF_MANY:
            pieces = [piece for part in args[0] for piece in part.pieces]
            if pieces:
                func(pieces, *_here(args[1:], pieces[0].device), **kwargs)
            for part in args[0]:
                part.parts.changed()
            return None
        if func is _aten.linalg_vector_norm.default:
            if len(args) > 2 or set(kwargs) - {"ord", "dtype"}:
                raise _refused(func)
            order = float(args[1] if len(args) > 1 else kwargs.get("ord", 2))
            return _norms([first], order, kwargs.get("dtype"))[0]
        if func is _aten._foreach_norm.Scalar:
            order = float(args[1] if len(args) > 1 else kwargs.get("ord", 2))
            return _norms(args[0], order, kwargs.get("dtype"))
        if func is _aten._amp_foreach_non_finite_check_and_unscale_.default:
            _unscale(func, *args)
            return None
        raise _refused(func)


def _each(func: Any, part: OwnPart, others: Sequence[Any], kwargs: Mapping[str, Any]) -> OwnPart:
    if any(isinstance(other, torch.Tensor) and other.dim() for other in others):
        raise _refused(func)
    done = [func(piece, *_here(others, piece.device), **kwargs) for piece in part.pieces]
    if func.__name__.partition(".")[0].endswith("_"):
        part.parts.changed()
        return part
    return OwnPart(part, done, part.parts)


def _here(values: Sequence[Any], device: torch.device) -> list[Any]:
    return [v.to(device) if isinstance(v, torch.Tensor) else v for v in values]


def _norms(parts: Sequence[OwnPart], order: float, dtype: torch.dtype | None) -> list[torch.Tensor]:
    if not (order >= 1 or math.isinf(order)) or order < 0:
        raise ConfigError(
            f"zero(stage=2): a norm of order {order:g} over the members' parts is not known; use 1, 2 or inf"
        )
    values = parts[0].parts.norms(parts, order)
    return [torch.tensor(v, dtype=dtype or p.dtype.to_real(), device=p.device) for v, p in zip(values, parts)]


def _power(pieces: Sequence[torch.Tensor], order: float) -> float:
    """What members add up (of the maximum norm: compare) to get the norm."""
    norms = [float(torch.linalg.vector_norm(p, order, dtype=_wide(p.dtype))) for p in pieces if p.numel()]
    return max(norms, default=0.0) if math.isinf(order) else sum(n**order for n in norms)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.itemsize >= 4 else torch.float32


def _unscale(func: Callable[..., Any], parts: Sequence[OwnPart], found: torch.Tensor, scale: torch.Tensor) -> None:
    if any(not isinstance(part, OwnPart) for part in parts):
        raise _refused(func)
    pieces = [piece for part in parts for piece in part.pieces]
    for device in dict.fromkeys(piece.device for piece in pieces):
        here = found.to(device)
        func([piece for piece in pieces if piece.device == device], here, scale.to(device))
        found.copy_(here)
    found.copy_(parts[0].parts.found(found))
    for part in parts:
        part.parts.changed()


def _refused(func: Any) -> ConfigError:
    return ConfigError(
        f"zero(stage=2) keeps of each gradient only this member's part, so `{func}` cannot be done with `p.grad`. "
        "Scaling, clamping, norms, clip_grad_norm_ and GradScaler work; for others use zero(stage=1), whose gradients "
        "are whole"
    )
