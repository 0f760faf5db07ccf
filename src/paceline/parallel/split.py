"""Splitting: products are computed in parts, each on the member that has that part of the weights.

A parameter that is split becomes a DTensor, so that optimizers, norms and checkpoints know what it is; one that is not
becomes one too, the same on all members. During a forward pass they are seen otherwise: those in parts as tensors that
stand for the whole (`spread`), the others as plain tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from paceline.core.errors import ConfigError
from paceline.parallel import rules_of_heads  # noqa: F401  # they are found by name
from paceline.parallel.alike import fingerprint, refuse_unlike
from paceline.parallel.branch import Branch, Branches, Pending, lays_of, members_of
from paceline.parallel.fellows import Fellows
from paceline.parallel.lay import Lay, even
from paceline.parallel.layers import layers
from paceline.parallel.nested import each
from paceline.parallel.pieces import local
from paceline.parallel.plan_of_split import Plan, by_itself, chosen, lays
from paceline.parallel.spread import Spread, pack, unpack
from paceline.strategies.cuts import elementwise, kind_of


def split_model(
    model: nn.Module, where: DeviceMesh, plan: Plan | None, *, sequence: bool = False, apart: bool = False
) -> Split:
    """Split a model in place, before it is sharded.

    Args:
        plan: kinds by patterns of names; None: found by itself.
        apart: layers will be called by those who shard them or compute them again.
    """
    mesh = where["split"]
    kinds = chosen(model, plan) if plan is not None else by_itself(model)
    found = lays(model, kinds, mesh.size())
    modules = dict(model.named_modules())
    logits = any(kind == "vocabulary" and isinstance(modules[name], nn.Linear) for name, kind in kinds.items())
    made = Split(model, mesh, sequence=sequence, logits=logits)
    homes = members_of(model, kinds, mesh.size())
    if homes and apart:
        raise ConfigError(
            f"split: {next(iter(homes))!r} is a branch, which one member computes alone: it goes with neither "
            "shard=N nor recompute=True, whose exchanges all members make"
        )
    made.cut(model, found | lays_of(model, homes, mesh.size()))
    made.watch(model, apart=apart)
    made.grow(model, homes)
    vars(model)["_paceline_split"] = made
    return made


class Split:
    """A model that is split, on this member."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh, *, sequence: bool, logits: bool) -> None:
        self.fellows = Fellows(mesh.get_group())
        self.fellows.sequence = sequence
        self.branches = Branches(self.fellows)
        self._mesh, self._logits = mesh, logits
        self._model = weakref.ref(model)
        self._lays: dict[str, Lay] = {}  # by name of the parameter
        self._at: dict[tuple[int, str], Lay] = {}  # by id of the module, and its name there
        self._inside: set[int] = set()  # ids of modules that are within branches
        self._homes: dict[str, int] = {}  # of the buffers of branches, by name
        self._alike = False  # torch's stream of random numbers, since this process has begun

    def cut(self, model: nn.Module, lays: Mapping[int, Lay]) -> None:
        """Leave this member its parts."""
        new: dict[int, nn.Parameter] = {}
        for name, p in model.named_parameters():
            if lay := lays.get(id(p)):
                self._lays[name] = lay
            new[id(p)] = nn.Parameter(self._cut(p, lay), requires_grad=p.requires_grad)
        for module in model.modules():
            for name, own in module._parameters.items():
                if own is None:
                    continue
                if lay := lays.get(id(own)):
                    self._at[id(module), name] = lay
                module._parameters[name] = new[id(own)]

    def _cut(self, p: nn.Parameter, lay: Lay | None) -> torch.Tensor:
        mine = lay.part(p.detach(), self.fellows.rank).clone() if lay else p.detach()
        placement = Shard(lay.dim) if lay else Replicate()
        stride = torch.empty(p.shape, device="meta").stride()
        made = DTensor.from_local(
            mine.contiguous(), self._mesh, [placement], run_check=False, shape=p.shape, stride=stride
        )
        return made.detach()

    def finish(self, model: nn.Module, shards: Fellows | None) -> None:
        """Parameters are as they stay: let them know how they are cut."""
        if shards:
            self._pack_inputs(model)
        for name, p in model.named_parameters():
            if lay := self._lays.get(name):
                p.cut_as = CutAs(p, lay, self.fellows, shards)  # type: ignore[attr-defined]
        for name, buffer in model.named_buffers():
            if name in self._homes:
                buffer.home = self._homes[name]  # type: ignore[attr-defined]

    def grow(self, model: nn.Module, homes: Mapping[str, int]) -> None:
        """Let branches be computed where they live."""
        device = next((local(p).device for p in model.parameters()), torch.device("cpu"))
        for name, member in homes.items():
            branch = model.get_submodule(name)
            branch.forward = Branch(self.branches, branch, member, device)
            self._inside |= {id(module) for module in branch.modules()}
            self._homes |= {f"{name}.{key}": member for key, _ in branch.named_buffers()}

    # ---- a pass

    def watch(self, model: nn.Module, *, apart: bool) -> None:
        """Have forward passes see parts; `apart`: layers are called by themselves, too, by those who put them together
        or compute them again."""
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        model.register_forward_hook(self._end, always_call=True)
        self._seen: list[_Seen] = []
        for layer in list(layers(model)) if apart else ():
            layer.forward = _Within(self, layer, layer.forward)

    def _pack_inputs(self, model: nn.Module) -> None:
        """Where `fully_shard` looks at what layers are given: in front of it."""
        for layer in layers(model):
            layer.register_forward_pre_hook(
                lambda module, args, named: (pack(args), pack(named)), prepend=True, with_kwargs=True
            )

    def _begin(self, model: nn.Module, args: Any, named: Any) -> None:
        if model.training and not self._alike:
            self._alike = True
            refuse_unlike(self.fellows.agree(fingerprint([args, named])))
            self.agree_on_random()
        self._seen.append(self.see(model))

    def _end(self, model: nn.Module, args: Any, out: Any) -> Any:
        self._seen.pop().undo()
        if out is None:  # it has failed, and others may not be here
            self.branches.drop()
            return out
        if not self._seen:
            self.branches.settle()
        return each(out, self._leaves)

    def _leaves(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, Pending):
            tensor = tensor.ready()
        if isinstance(tensor, Spread) and not (self._logits and tensor.lay.dim == tensor.ndim - 1):
            return tensor.whole()
        return tensor

    def see(self, module: nn.Module) -> _Seen:
        seen = _Seen()
        made: dict[int, torch.Tensor] = {}
        for inner in module.modules():
            if id(inner) in self._inside:
                continue
            for name, p in inner._parameters.items():
                if isinstance(p, DTensor) and p.device_mesh.ndim == 1 and p.device_mesh == self._mesh:
                    if id(p) not in made:
                        mine = Held.apply(p)
                        lay = self._at.get((id(inner), name))
                        made[id(p)] = Spread(mine, lay, self.fellows) if lay else mine
                    seen.put(inner, name, p, made[id(p)])
        return seen

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse optimizers that look at whole tensors."""
        if not elementwise(optimizer):
            raise ConfigError(
                f"{kind_of(optimizer).__name__} looks at whole tensors, of which members of a split have parts: use "
                "one that looks at each element by itself (SGD, AdamW, Adagrad, ...), or shard=N instead of split=N"
            )

    def agree_on_random(self) -> None:
        """Members of a split draw the same numbers for what is whole."""
        state = torch.get_rng_state()
        self.fellows.same(state)
        torch.set_rng_state(state)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            state = torch.cuda.get_rng_state()
            self.fellows.same(state)
            torch.cuda.set_rng_state(state)

    @torch.no_grad()
    def agree(self) -> None:
        """Gradients of what all members hold are those of the first: also where processors differ in the last bit."""
        model = self._model()
        assert model
        found = [
            local(p.grad)
            for name, p in model.named_parameters()
            if p.grad is not None and name not in self._lays and local(p.grad).numel()
        ]
        for dtype in dict.fromkeys(g.dtype for g in found):
            mine = [g for g in found if g.dtype == dtype]
            flat = torch.cat([g.reshape(-1) for g in mine])
            self.fellows.same(flat)
            for g, row in zip(mine, torch.split(flat, [g.numel() for g in mine])):
                g.copy_(row.view_as(g))


class CutAs:
    """How a parameter is cut: along the split, then along the shard."""

    def __init__(self, p: torch.Tensor, lay: Lay, fellows: Fellows, shards: Fellows | None) -> None:
        self._levels = [(lay, fellows)]
        if shards:
            rows = lay.own(fellows.rank) if lay.dim == 0 else p.shape[0]
            self._levels.append((Lay(0, (even(rows, shards.size),)), shards))

    def __deepcopy__(self, memo: dict[int, Any]) -> CutAs:
        return self

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        for lay, fellows in self._levels:
            whole = lay.part(whole, fellows.rank)
        return whole

    def whole(self, mine: torch.Tensor) -> torch.Tensor:
        for lay, fellows in reversed(self._levels):
            mine = fellows.gather(mine, lay)
        return mine


class Held(torch.autograd.Function):
    """What a member has of a parameter; its gradient is one of the same kind."""

    @staticmethod
    def forward(ctx: Any, p: Any) -> torch.Tensor:
        ctx.of = (p.device_mesh, p.placements, p.shape, p.stride())
        mine: torch.Tensor = p._local_tensor
        return mine.view_as(mine)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        mesh, placements, shape, stride = ctx.of
        return DTensor.from_local(gradient, mesh, placements, run_check=False, shape=shape, stride=stride)


class _Seen:
    """Parameters that are seen otherwise, and what they are."""

    def __init__(self) -> None:
        self._old: list[tuple[nn.Module, str, Any, torch.Tensor]] = []

    def put(self, module: nn.Module, name: str, old: Any, new: torch.Tensor) -> None:
        self._old.append((module, name, old, new))
        module._parameters[name] = new  # type: ignore[assignment]

    def undo(self) -> None:
        for module, name, old, new in self._old:
            if module._parameters[name] is new:  # else `fully_shard` has put it away
                module._parameters[name] = old


class _Within:
    """A layer's forward, with its parameters seen as those of the model are."""

    def __init__(self, split: Split, layer: nn.Module, forward: Callable[..., Any]) -> None:
        self._split, self._layer, self._forward = split, weakref.ref(layer), forward

    def __call__(self, *args: Any, **named: Any) -> Any:
        layer = self._layer()
        assert layer
        with self._seeing(layer):
            return self._forward(*unpack(args), **unpack(named))

    @contextmanager
    def _seeing(self, layer: nn.Module) -> Iterator[None]:
        seen = self._split.see(layer)
        try:
            yield
        finally:
            seen.undo()
