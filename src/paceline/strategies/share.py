"""This member's share of an optimizer: it steps the elements that it owns, and all get the weights.

    step    an optimizer of the user's class and with the options of the moment works on this member's pieces, which are
            views of the parameters (or copies in host memory: `hosted`); then each block's parts are gathered
    fetch   for a checkpoint: the first member gets everyone's state, block by block, into the user's own optimizer,
            where a checkpoint finds it as without ZeRO
    take    the way back: every member takes its pieces of what is in the user's optimizer

The user's optimizer keeps its parameter groups, which schedulers change; its state is empty but for a checkpoint.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from paceline.checkpoint import pack, unpack
from paceline.core.errors import ConfigError
from paceline.strategies.cuts import Block, Span, elementwise, flat, flat_like, kind_of
from paceline.strategies.hosted import Hosted, fused_on_cpu
from paceline.strategies.own_part import OwnPart
from paceline.strategies.strategy import World

_COPY = "paceline.copy"  # beside an optimizer's state: weights that are kept more exactly than the parameter has them
_RUNS = ("_paceline", "_paceline_restored", "step")  # of the user's optimizer alone


class Own:
    """Some elements of a parameter that this member steps."""

    def __init__(self, span: Span, hosted: Hosted | None) -> None:
        self.span = span
        self._hosted = hosted
        self.tensor = hosted.copy(self.view) if hosted else self.view
        self._version = span.parameter._version  # of the weights that the copy is of

    @property
    def finer(self) -> bool:
        """Whether it is more exact than the parameter."""
        return self.tensor.dtype != self.span.parameter.dtype

    def restore(self, weights: torch.Tensor) -> None:
        """Take a finer copy of the whole parameter, if it is of the weights that the parameter has now."""
        mine = weights if self.span.whole else flat_like(weights, self.span.parameter)[self.span.start : self.span.stop]
        if torch.equal(mine.to(self.view), self.view):
            self.tensor.copy_(mine)

    def settled(self) -> None:
        """The parameter holds what was stepped."""
        self._version = self.span.parameter._version

    @property
    def view(self) -> torch.Tensor:
        """Them in the parameter, in its shape where it is whole."""
        p = self.span.parameter
        return p.detach() if self.span.whole else flat(p)[self.span.start : self.span.stop]

    def refresh(self) -> None:
        """The parameter may have got other memory; and a copy other weights, otherwise than by a step."""
        view = self.view
        if self._hosted:
            if self.span.parameter._version != self._version:
                self.tensor.copy_(view)
        elif view.data_ptr() != self.tensor.data_ptr():
            if view.dtype != self.tensor.dtype or view.device != self.tensor.device:
                raise ConfigError(
                    f"zero: a parameter was {self.tensor.dtype} on {self.tensor.device} when run.optimizer was called, "
                    f"and is {view.dtype} on {view.device} now: convert the model before"
                )
            self.tensor.data = view

    def grad(self, at: int) -> torch.Tensor | None:
        """Its gradient; it is the `at`-th of the pieces that this member has of the parameter."""
        p = self.span.parameter
        grad = p.grad
        if grad is None:
            return None
        if isinstance(grad, OwnPart):
            if grad.pending is not None:
                raise ConfigError(_KEPT)
            piece = grad.pieces[at]
            return piece.as_strided(p.shape, p.stride()) if self.span.whole else piece
        return grad.detach() if self.span.whole else flat_like(grad, p)[self.span.start : self.span.stop]


class Share:
    """That of one optimizer."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, world: World, hosted: Hosted | None, *, scattered: bool
    ) -> None:
        self._optimizer = optimizer
        self._world = world
        self._hosted = hosted
        self._scattered = scattered  # gradients come as parts
        self._blocks: list[Block] = []
        self._own: dict[int, list[Own]] = {}  # by id of the parameter
        self._by_start: dict[tuple[int, int], Own] = {}  # the same, by id of the parameter and where they begin
        self._fetched = False
        self.copies: dict[int, torch.Tensor] = {}  # by number of the parameter: fetched, or loaded and not taken yet
        self._raw: dict[int, dict[str, Any]] = {}  # a state that is being loaded, before torch casts it
        if hosted:
            optimizer.register_load_state_dict_pre_hook(self._loading)
        kind = kind_of(optimizer)
        self._inner = object.__new__(kind)
        vars(self._inner).update({k: v for k, v in vars(optimizer).items() if k not in _RUNS})
        self._inner.state = defaultdict(dict)

    @property
    def nbytes(self) -> int:
        """Of the state that is here."""
        tensors = [v for state in self._inner.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
        return sum(t.nbytes for t in tensors)

    def grow(self, blocks: Iterable[Block]) -> None:
        """These blocks are its own too."""
        for block in blocks:
            self._blocks.append(block)
            for span in block.of(self._world.group.rank):
                own = self._by_start[id(span.parameter), span.start] = Own(span, self._hosted)
                self._own.setdefault(id(span.parameter), []).append(own)
        self.take()

    # ---- a step

    def step(self) -> None:
        self.forget()
        if any(self._optimizer.state.values()):
            self.take()  # the script has loaded something
        stepped = self._check()
        for name in ("grad_scale", "found_inf"):  # set for the step by a GradScaler, where the optimizer is fused
            vars(self._inner).pop(name, None)
            if hasattr(self._optimizer, name):
                setattr(self._inner, name, getattr(self._optimizer, name))
        pairs = [
            (own, grad, number)
            for number, group in enumerate(self._optimizer.param_groups)
            for p in group["params"]
            for at, own in enumerate(self._own.get(id(p), ()))
            if (grad := own.grad(at)) is not None
        ]
        for own, _, _ in pairs:
            own.refresh()
        if self._hosted:
            self._hosted.step(pairs, self._step, elementwise(self._optimizer))
        else:
            self._step([(own.tensor, grad, number) for own, grad, number in pairs])
        if self._world.group.size > 1:
            for block in self._blocks:
                if any(id(span.parameter) in stepped for span in block.spans):
                    _gather(block, self._world)
        for own in self._by_start.values():
            own.settled()

    def _check(self) -> set[int]:
        """The ids of the parameters that are stepped, the same on all members."""
        stepped = set()
        for group in self._optimizer.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if self._scattered and not isinstance(p.grad, OwnPart):
                    raise ConfigError(_KEPT)
                stepped.add(id(p))
        return stepped

    def _step(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor, int]]) -> None:
        """Of these tensors, with their gradients and the numbers of their groups."""
        groups = self._optimizer.param_groups
        mine: dict[int, dict[str, Any]] = {}
        for tensor, grad, number in pairs:
            if number not in mine:
                mine[number] = {**groups[number], "params": [], **self._instead(groups[number])}
            mine[number]["params"].append(tensor)
            tensor.grad = grad
        self._inner.param_groups = list(mine.values())
        if mine:
            self._inner.step()
        for tensor, _, _ in pairs:
            tensor.grad = None
        for number, group in mine.items():  # some optimizers keep numbers of their own there
            kept = {"params", *self._instead(groups[number])}
            groups[number].update({k: v for k, v in group.items() if k not in kept and groups[number].get(k) is not v})
        self._inner.param_groups = []

    def _instead(self, group: dict[str, Any]) -> dict[str, Any]:
        """Options that are better for what is stepped here."""
        return {"fused": True, "foreach": None} if self._hosted and fused_on_cpu(self._optimizer, group) else {}

    # ---- state

    def take(self, *, anew: bool = False) -> None:
        """Every member: take this member's pieces of the state that the user's optimizer has, which is then empty.

        `anew`: a run was resumed; what is not there is forgotten, and copies of weights are made again.
        """
        self._fetched = False
        if anew:
            self._inner.state.clear()
        for number, p in enumerate(self._parameters()):
            state = self._raw.get(number) or self._optimizer.state.get(p)
            for own in self._own.get(id(p), ()):
                if anew:
                    own.refresh()
                    own.settled()
                if number in self.copies:
                    own.restore(self.copies[number])
                if state:
                    self._inner.state[own.tensor] = {key: _piece(v, own, self._hosted) for key, v in state.items()}
        self._optimizer.state.clear()
        self._raw, self.copies = {}, {}

    def _loading(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Torch makes the state of a half-precision parameter half precision too; here it is more exact."""
        self._raw = dict(state["state"])

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def fetch(self) -> None:
        """All members: the first one gets all of the state."""
        group = self._world.group
        self.forget()
        if any(self._optimizer.state.values()):
            self.take()  # the script has loaded something
        self._optimizer.state.clear()
        numbers = {id(p): i for i, p in enumerate(self._parameters())}
        for block in self._blocks:
            owners = range(group.size) if block.owner is None else (block.owner,)
            if group.rank in owners and group.rank:
                told = pack(self._states(block))
                group.send(torch.frombuffer(bytearray(told), dtype=torch.uint8), 0)
            if group.rank:
                continue
            for rank in owners:
                states = unpack(group.recv(rank).numpy().data) if rank else self._states(block)
                for span, state in zip(block.of(rank), states):
                    self._put(span, state, numbers[id(span.parameter)])
        if group.rank == 0:
            self._fetched = True
            known = self._optimizer.state
            whole: dict[torch.Tensor, Any] = {p: known[p] for p in self._parameters() if p in known}
            self._optimizer.state.clear()
            self._optimizer.state.update(whole)

    def forget(self) -> None:
        """What was fetched is not needed any more."""
        if self._fetched:
            self._optimizer.state.clear()
            self._fetched, self.copies = False, {}

    def _states(self, block: Block) -> list[dict[str, Any]]:
        owns = [self._by_start[id(s.parameter), s.start] for s in block.of(self._world.group.rank)]
        copies: list[dict[str, Any]] = [{_COPY: own.tensor} if own.finer else {} for own in owns]
        return [self._inner.state.get(own.tensor, {}) | copy for own, copy in zip(owns, copies)]

    def _put(self, span: Span, state: dict[str, Any], number: int) -> None:
        """A piece of what is kept of a parameter, which has this number."""
        p = span.parameter
        for key, value in state.items():
            kept: dict[Any, Any] = self.copies if key == _COPY else self._optimizer.state[p]
            name = number if key == _COPY else key
            if isinstance(value, torch.Tensor) and not span.whole and value.shape == (span.stop - span.start,):
                if name not in kept:
                    kept[name] = torch.empty_like(p, dtype=value.dtype, device="cpu", requires_grad=False)
                flat(kept[name])[span.start : span.stop] = value
            elif name not in kept:
                kept[name] = value


def _piece(value: Any, own: Own, hosted: Hosted | None) -> Any:
    """This member's piece of something in an optimizer's state of a parameter."""
    if not isinstance(value, torch.Tensor):
        return value
    span, p = own.span, own.span.parameter
    if not span.whole:  # each piece has its own, also of what is one number
        value = (flat_like(value, p)[span.start : span.stop] if value.shape == p.shape else value).clone()
    return hosted.state(value) if hosted else value


def _gather(block: Block, world: World) -> None:
    """Everyone gets the weights of a block from their owners."""
    group = world.group
    first = block.spans[0]
    if len(block.spans) == 1 and first.stop - first.start == block.numel:  # it fills the block: no copy is needed
        values = flat(first.parameter)[first.start : first.stop]
        if block.owner is None:
            group.all_gather_into(values[block.part(group.rank)], values)
        else:
            group.broadcast(values, block.owner)
        return
    whole = torch.empty(block.numel, dtype=block.dtype, device=block.device)
    for span in block.of(group.rank):
        whole[span.place] = flat(span.parameter)[span.start : span.stop]
    if block.owner is None:
        group.all_gather_into(whole[block.part(group.rank)], whole)
    else:
        group.broadcast(whole, block.owner)
    for span in block.spans:
        flat(span.parameter)[span.start : span.stop] = whole[span.place]


_KEPT = (
    "zero(stage=2): step() with gradients that the members have not exchanged. Let the last backward pass before a "
    "step be outside run.accumulate(), and do not put gradients of your own into p.grad; zero(stage=1) allows that"
)
