"""Branches: parts of a model that do not need each other, each on one member, side by side.

    call       the member that has the branch computes it, the others go on at once; all get an output that is to come
    first use  of any such output: all outputs that are to come are given to all members, in the order of the calls
    backward   each member passes through its own branches; then the gradients of what they were given are summed

A sum of outputs, or one weighed by a factor, is to come as well, so `sum(weight * branch(x) ...)` lets branches run
side by side. A branch that is given the output of another has to wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from paceline.core.errors import ConfigError
from paceline.parallel.fellows import Fellows
from paceline.parallel.lay import Lay
from paceline.parallel.rules import own_stream
from paceline.parallel.spread import wholes

_LATER_WORDS = "add sub mul div true_divide __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ rsub"
_LATER = frozenset(_LATER_WORDS.split())
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)
_MOST_DIMS = 8


class Pending(torch.Tensor):
    """An output that is to come."""

    is_to_come = True
    _make: Callable[[], torch.Tensor] | None
    _value: torch.Tensor | None

    @staticmethod
    def __new__(cls, make: Callable[[], torch.Tensor]) -> Pending:
        new: Pending = torch.Tensor._make_wrapper_subclass(cls, (), dtype=torch.float32)
        new._make, new._value = make, None
        return new

    def __init__(self, make: Callable[[], torch.Tensor]) -> None:
        pass

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # without an exchange: one member alone may print it
        return "Pending()" if self._value is None else f"Pending({self._value!r})"

    def ready(self) -> torch.Tensor:
        if self._make is not None:
            self._value, self._make = self._make(), None
        assert self._value is not None
        return self._value

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in _LATER and not kwargs:
            given = [a for a in args if isinstance(a, torch.Tensor)]
            if any(isinstance(a, Pending) and a._make is not None for a in given):
                return Pending(_Later(func, args))
        return func(*ready(args), **ready(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise ConfigError(f"{func}: the output of a branch came where PyTorch looks at memory; add 0 to it before")


class _Later:
    """An operation that is done when its result is used."""

    def __init__(self, func: Callable[..., Any], args: Sequence[Any]) -> None:
        self._func, self._args = func, args
        self._versions = [a._version for a in args if type(a) is torch.Tensor]

    def __call__(self) -> torch.Tensor:
        if self._versions != [a._version for a in self._args if type(a) is torch.Tensor]:
            raise ConfigError(
                "a tensor that was added to the output of a branch, or multiplied by it, was changed in place before "
                "the result was used: change a copy"
            )
        return self._func(*ready(self._args))  # type: ignore[no-any-return]


def ready(value: Any) -> Any:
    """With outputs in the place of those to come."""
    return pytree.tree_map(lambda leaf: leaf.ready() if isinstance(leaf, Pending) else leaf, value)


class _Call:
    """One call of a branch."""

    def __init__(self, branch: Branch, inputs: list[torch.Tensor]) -> None:
        self.branch, self.inputs = branch, inputs
        self.leaves: list[torch.Tensor] = []  # the inputs, as the branch has seen them
        self.own: list[torch.Tensor] = []  # the parameters, as the branch has seen them
        self.out: torch.Tensor | None = None  # on the member that has it


class Branches:
    """Those of one model."""

    def __init__(self, fellows: Fellows) -> None:
        self.fellows = fellows
        self._open: list[tuple[_Call, Pending]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Branches:
        return self

    def add(self, call: _Call) -> Pending:
        def come() -> torch.Tensor:
            self.settle()
            value = pending._value
            assert value is not None
            return value

        pending = Pending(come)
        self._open.append((call, pending))
        return pending

    def settle(self) -> None:
        """Give all members all outputs that are to come."""
        waiting, self._open = self._open, []
        if not waiting:
            return
        calls = [call for call, _ in waiting]
        forms = self._forms(calls)
        inputs = list({id(t): t for call in calls for t in call.inputs}.values())
        held = [p for call in calls for p in call.branch.held()] if torch.is_grad_enabled() else []
        anchor = torch.zeros((), requires_grad=torch.is_grad_enabled() and any(form[1] for form in forms))
        outs = _Settled.apply(self.fellows, calls, forms, len(inputs), anchor, *inputs, *held)  # type: ignore[no-untyped-call]
        for (_, pending), out in zip(waiting, outs):
            pending._value, pending._make = out, None

    def drop(self) -> None:
        self._open.clear()

    def _forms(self, calls: Sequence[_Call]) -> list[tuple[torch.dtype, bool, list[int]]]:
        """Of each output its dtype, whether it has a gradient, and its shape: as those know who have it."""
        table = torch.zeros(len(calls), 3 + _MOST_DIMS, dtype=torch.int64)
        for row, call in zip(table, calls):
            if (out := call.out) is not None:
                row[:3] = torch.tensor([_DTYPES.index(out.dtype), int(out.requires_grad), out.ndim])
                row[3 : 3 + out.ndim] = torch.tensor(out.shape, dtype=torch.int64)
        rows = self.fellows.sum(table).tolist()
        return [(_DTYPES[kind], bool(grad), shape[:ndim]) for kind, grad, ndim, *shape in rows]


class _Settled(torch.autograd.Function):
    """Outputs of several branches at once, so that on the way back each member passes through its own first."""

    @staticmethod
    def forward(ctx: Any, fellows: Fellows, calls: Any, forms: Any, num: int, anchor: Any, *given: torch.Tensor) -> Any:
        ctx.fellows, ctx.calls, ctx.num = fellows, calls, num
        ctx.given = [(t.shape, t.dtype, t.device) for t in given]
        outs = []
        for call, (dtype, grad, shape) in zip(calls, forms):
            mine = call.out is not None
            device = call.branch.device
            out = call.out.detach().contiguous().clone() if mine else torch.empty(shape, dtype=dtype, device=device)
            fellows.same(out, call.branch.member)
            outs.append(out)
            if not grad:
                ctx.mark_non_differentiable(out)
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        inputs = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.given[: ctx.num]]
        places = {id(t): n for n, t in enumerate({id(t): t for call in ctx.calls for t in call.inputs}.values())}
        mine = [(call, g) for call, g in zip(ctx.calls, gradients) if call.out is not None and call.out.requires_grad]
        wanted = [t for call, _ in mine for t in [*call.leaves, *call.own]]
        found: Any = ()
        if wanted:
            found = torch.autograd.grad([c.out for c, _ in mine], wanted, [g for _, g in mine], allow_unused=True)
        gone = iter(found)
        own: dict[int, list[torch.Tensor | None]] = {}
        for call, _ in mine:
            for t in call.inputs:
                if (g := next(gone)) is not None:
                    inputs[places[id(t)]] += g
            own[id(call)] = [next(gone) for _ in call.own]
        held: list[torch.Tensor | None] = []
        rest = iter(ctx.given[ctx.num :])
        for call in ctx.calls:
            found_ = own.get(id(call), [])
            for number in range(call.branch.num_held):
                shape, dtype, device = next(rest)
                g = found_[number] if number < len(found_) else None
                held.append(torch.zeros(shape, dtype=dtype, device=device) if g is None else g)
            call.out = None
        _sum_all(inputs, ctx.fellows)
        return None, None, None, None, None, *inputs, *held


def _sum_all(tensors: list[torch.Tensor], fellows: Fellows) -> None:
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        some = [t for t in tensors if t.dtype == dtype]
        flat = fellows.sum(torch.cat([t.reshape(-1) for t in some]))
        for t, row in zip(some, torch.split(flat, [t.numel() for t in some])):
            t.copy_(row.view_as(t))


class Branch:
    """The forward of a module that lives on one member."""

    def __init__(self, branches: Branches, module: nn.Module, member: int, device: torch.device) -> None:
        self.member, self.device, self.num_held = member, device, 0
        self._all, self._module, self._forward = branches, module, module.forward

    def __deepcopy__(self, memo: dict[int, Any]) -> Branch:
        raise ConfigError("a model with branches cannot be copied: its parts are on other members")

    def held(self) -> list[torch.Tensor]:
        from paceline.parallel.split import Held

        found = [Held.apply(p) for _, _, p in self._places() if p.requires_grad]  # type: ignore[no-untyped-call]
        self.num_held = len(found)
        return found

    def _places(self) -> list[tuple[nn.Module, str, Any]]:
        return [
            (module, name, p)
            for module in self._module.modules()
            for name, p in module._parameters.items()
            if p is not None
        ]

    def __call__(self, *args: Any, **named: Any) -> Any:
        args, named = wholes(ready(args)), wholes(ready(named))
        grads = torch.is_grad_enabled()
        leaves = [t for t in pytree.tree_leaves((args, named)) if isinstance(t, torch.Tensor) and t.requires_grad]
        inputs = list({id(t): t for t in leaves}.values()) if grads else []
        call = _Call(self, inputs)
        if self._all.fellows.rank == self.member:
            with own_stream(self._all.fellows, self.device):
                self._compute(call, args, named)
        else:
            torch.randint(2**62, ())  # as there
        return self._all.add(call)

    def _compute(self, call: _Call, args: Any, named: Any) -> None:
        grads = torch.is_grad_enabled()
        call.leaves = [t.detach().requires_grad_() for t in call.inputs]
        seen = {id(t): leaf for t, leaf in zip(call.inputs, call.leaves)}
        args, named = pytree.tree_map(lambda t: seen.get(id(t), t) if isinstance(t, torch.Tensor) else t, (args, named))
        places = self._places()
        plain = {id(p): p._local_tensor.detach().requires_grad_(p.requires_grad and grads) for _, _, p in places}
        try:
            for module, name, p in places:
                module._parameters[name] = plain[id(p)]
            out = self._forward(*args, **named)
        finally:
            for module, name, p in places:
                module._parameters[name] = p
        call.own = [plain[id(p)] for _, _, p in places if p.requires_grad] if grads else []
        if not isinstance(out, torch.Tensor):
            raise ConfigError(f"a branch returned a {type(out).__name__}: let it return one tensor")
        if out.dtype not in _DTYPES or out.ndim > _MOST_DIMS:
            raise ConfigError(f"a branch returned {out.dtype} with {out.ndim} dimensions, which cannot be sent")
        call.out = out


def members_of(model: nn.Module, kinds: Mapping[str, str | int], members: int) -> dict[str, int]:
    """On which member each branch lives: where it was said, or balanced by their parameters.

    >>> model = nn.ModuleDict({"a": nn.Linear(9, 9), "b": nn.Linear(2, 2), "c": nn.Linear(3, 3)})
    >>> members_of(model, {"a": "branch", "b": "branch", "c": "branch"}, 2)
    {'a': 0, 'c': 1, 'b': 1}
    """
    modules = dict(model.named_modules())
    found: dict[str, int] = {}
    load = [0] * members
    weight = {name: 1 + sum(p.numel() for p in modules[name].parameters()) for name in kinds}
    for name, kind in kinds.items():
        if isinstance(kind, int):
            if not 0 <= kind < members:
                raise ConfigError(f"split={{{name!r}: {kind}}}: members of the split are 0 to {members - 1}")
            found[name] = kind
            load[kind] += weight[name]
    free = [name for name, kind in kinds.items() if kind == "branch"]
    for name in sorted(free, key=lambda name: -weight[name]):
        found[name] = load.index(min(load))
        load[found[name]] += weight[name]
    for name in found:
        for other, kind in kinds.items():
            if other.startswith(f"{name}."):
                raise ConfigError(f"split: {other!r} ({kind}) is within {name!r}, which is a branch: name one of them")
    return found


def lays_of(model: nn.Module, homes: Mapping[str, int], members: int) -> dict[int, Lay]:
    """All of a branch's parameters are on one member."""
    modules = dict(model.named_modules())
    found: dict[int, Lay] = {}
    inside = {id(module) for name in homes for module in modules[name].modules()}
    for name, member in homes.items():
        for key, p in modules[name].named_parameters():
            if p.ndim == 0:
                raise ConfigError(
                    f"split: {name}.{key} is a scalar, and a branch's parameters need a dimension: use (1,)"
                )
            lay = Lay(0, (tuple(p.shape[0] * (rank == member) for rank in range(members)),))
            if found.setdefault(id(p), lay) != lay:
                raise ConfigError(f"split: {name}.{key} is in branches of several members, and cannot be shared")
    for name, module in modules.items():
        for key, own in module._parameters.items():
            if own is not None and id(own) in found and id(module) not in inside:
                raise ConfigError(f"split: {name or 'the model'}.{key} is used by a branch too, and cannot be shared")
    return found
