"""Dynamic loss scaling for fp16, without a scaler in the script.

Gradients of activations are too small for fp16 where a loss is not scaled. Here the model is a closed region in which
gradients are S times as large: they are multiplied by S where they come in, at its outputs, and divided by S in float32
where they leave it, at its inputs and its parameters:

    loss → ∂/∂outputs → ·S → [ the model, in fp16 ] → ·1/S → ∂/∂inputs, p.grad

So `loss`, `p.grad` and everything outside are what they always are: clipping, accumulation, penalties on weights,
models behind models and codecs that keep residuals need to know nothing of S, and members may have unlike ones.
Within a forward pass the model's parameters are views of themselves, whose gradients are divided; a use of a parameter
outside of the pass is not in the region, and is not scaled either. A model within a model is part of its region.

A gradient that is not finite is found before the optimizer's step: the step is skipped and S halved. After `every` good
steps in a row S is doubled.

Reference: Micikevicius et al., Mixed precision training, 2018.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.autograd import Variable

from paceline.core.errors import ConfigError
from paceline.parallel.nested import each

HALVES = (torch.float16, torch.bfloat16)
_UNDER_WAY = threading.local()
_SMALLEST = 2.0**-24
_LARGEST = 2.0**24
_PATIENCE = 20  # steps skipped in a row after which something else is wrong


class Scaling:
    """The scale of one model."""

    def __init__(self, scale: float, every: int) -> None:
        self.scale = scale
        self.every = every
        self.good = 0  # steps since the scale was changed last
        self.skipped = 0
        self.in_a_row = 0
        self.outer: Scaling | None = None  # of a model that has this one as a part, where that one scales
        self._judged = ""  # what came of the last passes: "", "good" or "bad"
        self._passes: set[int] = set()  # backward passes through this model that are under way
        self._watched: dict[int, weakref.ref[torch.Tensor]] = {}  # parameters, by id

    # ---- forward and backward

    @contextlib.contextmanager
    def within(self, model: torch.nn.Module, args: Any, kwargs: Any) -> Iterator[Within]:
        """A forward pass: what goes in and the parameters lead out of the region on the way back."""
        scale = self.scale  # of this pass, in its backward pass too
        enter = functools.partial(_enter, scale=scale)
        inside = Within(self, scale, each(args, enter), each(kwargs, enter))
        _UNDER_WAY.scaling = self
        try:
            with _swapped(model, functools.partial(self._view, scale)):
                yield inside
        finally:
            _UNDER_WAY.scaling = None

    def _view(self, scale: float, p: torch.nn.Parameter) -> torch.Tensor:
        if not p.requires_grad or not p.is_floating_point():
            return p
        watched = self._watched.get(id(p))
        if watched is None or watched() is not p:
            self._watched[id(p)] = weakref.ref(p)
            p.register_hook(self._check_within)  # type: ignore[no-untyped-call]
        view = p.view_as(p)
        view.register_hook(functools.partial(self._leaves, scale))  # type: ignore[no-untyped-call]
        return view

    def _leaves(self, scale: float, grad: torch.Tensor) -> torch.Tensor:
        if torch._C._current_graph_task_id() not in self._passes:
            raise ConfigError(
                "precision fp16: a backward pass came into the model, but through none of its outputs, so its "
                "gradients are not scaled: return what the loss is made of from forward, as tensors or within tuples, "
                "lists, mappings or dataclasses, or use bf16"
            )
        return grad * (1.0 / scale)

    def began(self) -> None:
        """A backward pass comes through the outputs."""
        if torch.is_grad_enabled():
            raise ConfigError(
                "precision fp16: gradients of gradients (create_graph=True) would be scaled twice: use bf16 or fp32"
            )
        self._judged = ""
        task = torch._C._current_graph_task_id()
        if task not in self._passes:
            self._passes.add(task)
            Variable._execution_engine.queue_callback(lambda: self._passes.discard(task))

    def _check_within(self, grad: torch.Tensor) -> None:
        """A checkpointed segment that is computed again within the pass knows nothing of the views."""
        if self._passes and torch._C._current_graph_task_id() not in self._passes:
            self._passes.clear()
            raise ConfigError(
                "precision fp16: a backward pass within a backward pass, as of "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=True), would leave gradients scaled: give "
                "use_reentrant=False"
            )

    # ---- steps

    def judge(self, good: bool) -> None:
        """A step was taken, or skipped: once for all optimizers that share a backward pass."""
        if self.outer is not None:
            self.outer.judge(good)
        if good:
            if not self._judged:
                self._judged, self.in_a_row = "good", 0
                self.good += 1
                if self.good >= self.every:
                    self.scale, self.good = min(self.scale * 2.0, _LARGEST), 0
            return
        if self._judged != "bad":
            self._judged, self.good = "bad", 0
            self.scale = max(self.scale / 2.0, _SMALLEST)
            self.skipped += 1
            self.in_a_row += 1

    @property
    def hopeless(self) -> bool:
        """Whether to say, once, that the scale is not what is wrong."""
        return self.in_a_row == _PATIENCE

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "good": self.good, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale, self.good, self.skipped = float(state["scale"]), int(state["good"]), int(state["skipped"])


class Within:
    """One forward pass."""

    def __init__(self, scaling: Scaling, scale: float, args: Any, kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs
        self._scaling, self._scale = scaling, scale

    def leave(self, out: Any) -> Any:
        return each(out, functools.partial(_leave, scale=self._scale, scaling=self._scaling))


def finite(gradients: Iterable[torch.Tensor | None]) -> bool:
    """Whether all numbers in these are."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in gradients:
        if gradient is not None and gradient.numel():
            values = gradient.coalesce().values() if gradient.is_sparse else gradient
            by_kind.setdefault((values.device, values.dtype), []).append(values.detach())
    largest = [torch.stack(list(torch._foreach_norm(some, math.inf))).max() for some in by_kind.values()]
    return all(bool(torch.isfinite(one)) for one in largest)


class _Enter(torch.autograd.Function):
    """Into the region; another tensor, so that either may be changed in place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * (1.0 / ctx.scale), None


class _Leave(torch.autograd.Function):
    """Out of the region, as float32."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float, scaling: Scaling) -> torch.Tensor:
        ctx.scale, ctx.scaling, ctx.dtype = scale, scaling, x.dtype
        return x.float() if x.dtype in HALVES else x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.scaling.began()
        return (grad * ctx.scale).to(ctx.dtype), None, None


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in HALVES else tensor


def _enter(tensor: torch.Tensor, *, scale: float) -> torch.Tensor:
    return _Enter.apply(tensor, scale) if tensor.requires_grad else tensor  # type: ignore[no-untyped-call]


def _leave(tensor: torch.Tensor, *, scale: float, scaling: Scaling) -> torch.Tensor:
    if not tensor.requires_grad:
        return full(tensor)
    return _Leave.apply(tensor, scale, scaling)  # type: ignore[no-any-return, no-untyped-call]


def under_way() -> Scaling | None:
    """Whose region this thread is in."""
    found: Scaling | None = getattr(_UNDER_WAY, "scaling", None)
    return found


@contextlib.contextmanager
def _swapped(model: torch.nn.Module, view: Any) -> Iterator[None]:
    """Within it the model has views in the place of its parameters; one that is shared has one view."""
    views: dict[int, torch.Tensor] = {}
    taken: list[tuple[dict[str, Any], str, torch.nn.Parameter]] = []
    flat: list[tuple[torch.nn.RNNBase, Any, Any]] = []
    try:
        for module in model.modules():
            for name, p in module._parameters.items():
                if p is not None:
                    if id(p) not in views:
                        views[id(p)] = view(p)
                    taken.append((module._parameters, name, p))
            if isinstance(module, torch.nn.RNNBase):  # it has a list of them
                flat.append((module, module._flat_weights, module._flat_weight_refs))
        for parameters, name, p in taken:
            parameters[name] = views[id(p)]
        for rnn, weights, _ in flat:
            rnn._flat_weights = [views.get(id(w), w) for w in weights]
            rnn._flat_weight_refs = [weakref.ref(w) if w is not None else None for w in rnn._flat_weights]
        yield
    finally:
        for parameters, name, p in taken:
            parameters[name] = p
        for rnn, weights, refs in flat:
            rnn._flat_weights, rnn._flat_weight_refs = weights, refs
