"""What one pass over a model takes of memory, found without taking any: the model is made and called with tensors that
have shapes and no values (FakeTensorMode), forward and backward, and every tensor is watched from its first operation
until it is freed.

    kept      what lies there between forward and backward: activations, copies of weights in half precision, and what
              the loss keeps
    moments   (activations and work space, gradients) at every point of the pass at which one of them is at its most

A model that returns a number has its loss inside; for others it is cross-entropy, which keeps a tensor of the size of
the output. Kernels are those of the CPU; other devices' differ in their work space. Not seen: what libraries take for
themselves, and what an allocator cannot use.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline.core.errors import ConfigError
from paceline.parallel.layers import layers, recompute_layers
from paceline.parallel.masters import _NORMS
from paceline.parallel.precision import Precision

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


@dataclass(frozen=True)
class Weight:
    """One parameter."""

    name: str
    shape: tuple[int, ...]
    nbytes: int
    trained: bool
    divides: bool  # where products are split: it is a factor of one
    norm: bool

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


@dataclass
class Layer:
    """What is put together, or lies on a stage, at once; the first and the last are what stands outside of all layers,
    and is used before them or after."""

    weights: list[Weight] = field(default_factory=list)
    kept: int = 0  # bytes of activations that it keeps
    passes: int = 0  # of these, in tensors as large as what comes in: where products are split they stay whole


@dataclass(frozen=True)
class Footprint:
    """What a model and one pass over it take, in bytes."""

    layers: list[Layer]
    buffers: int
    kept: int
    moments: list[tuple[int, int]]
    tied: list[Weight] = field(
        default_factory=list
    )  # used before the layers and after them: on both ends of a pipeline

    @property
    def weights(self) -> list[Weight]:
        return [weight for layer in self.layers for weight in layer.weights]

    def most(self, share: float) -> float:
        """The most that a pass takes at any time, beside parameters and state, where a gradient counts this share."""
        return max(activations + share * gradients for activations, gradients in self.moments)


def footprint(
    make: Callable[[], nn.Module], inputs: Callable[[], Any], precision: Precision, *, recompute: bool = False
) -> Footprint:
    """Make a model without memory and pass a batch through it.

    Args:
        inputs: makes the batch: a tensor, or a tuple or mapping of arguments of the model.
    """
    with _quiet(), FakeTensorMode(allow_non_fake_inputs=True):
        model = made(make)
        if recompute:
            recompute_layers(model)
        if precision.weights:
            for p in model.parameters():
                if p.dtype == torch.float32 and not _of_norm(model, p):
                    p.data = p.data.bfloat16()
        found = _outlined(model)
        watch = _Watch(model, found)
        batch = arguments(inputs())
        with watch:
            _pass(model, batch, precision, watch)
        buffers = sum(b.nbytes for b in model.buffers())
        found[-1] = Layer([w for w in found[0].weights if w.name in watch.late])
        found[0].weights = [w for w in found[0].weights if w.name not in watch.late]
        tied = [w for w in found[0].weights if w.name in watch.again]
    return Footprint(list(found.values()), buffers, watch.kept, watch.moments, tied)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Torch logs errors that are told here, and warns where a model copies its layers."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*data pointer of FakeTensor.*")
            yield
    finally:
        logger.disabled = before


def made(make: Callable[[], nn.Module]) -> nn.Module:
    try:
        model = make()
    except ConfigError:
        raise
    except Exception as error:
        _tell("the model cannot be made without memory", error)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{_name(make)}() returned a {type(model).__name__}, not an nn.Module")
    return model


def arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch as the model is called with it."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, tuple | list) else (batch,)), {}


def _outlined(model: nn.Module) -> dict[int, Layer]:
    """By id of the module; 0: what is outside of the layers. A parameter that several have belongs to the first."""
    found = {0: Layer()}
    split = (nn.Linear, nn.Embedding)
    divides = {id(m.weight) for m in model.modules() if isinstance(m, split)}
    names = {id(p): name for name, p in model.named_parameters()}
    seen: set[int] = set()

    def take(layer: Layer, parameters: Iterator[nn.Parameter]) -> None:
        for p in parameters:
            if id(p) not in seen:
                seen.add(id(p))
                kind = (names[id(p)], tuple(p.shape), p.nbytes, p.requires_grad, id(p) in divides, _of_norm(model, p))
                layer.weights.append(Weight(*kind))

    for module in layers(model):
        found[id(module)] = Layer()
        take(found[id(module)], module.parameters())
    take(found[0], model.parameters())
    return found


def _of_norm(model: nn.Module, parameter: nn.Parameter) -> bool:
    return any(parameter is p for m in model.modules() if isinstance(m, _NORMS) for p in m.parameters(recurse=False))


def _pass(model: nn.Module, batch: tuple[tuple[Any, ...], dict[str, Any]], precision: Precision, watch: _Watch) -> None:
    args, named = batch
    cast = contextlib.nullcontext() if precision.kind == "fp32" else torch.autocast("cpu", _HALF[precision.kind])
    model.train()
    try:
        with watch.saving():
            with cast:
                out = model(*args, **named)
            loss = _loss(out, precision)
            del out
    except Exception as error:
        _tell(f"the model does not take a batch of {said(batch)}", error)
    watch.kept, watch.forward = watch.now, False
    if loss is None:
        raise ConfigError("the model returns nothing that can be trained: no tensor that depends on its parameters")
    loss.backward()  # type: ignore[no-untyped-call]


def _loss(out: Any, precision: Precision) -> torch.Tensor | None:
    """A number that depends on all that the model returns, and keeps what cross-entropy would."""
    given = vars(out) if hasattr(out, "__dict__") and not isinstance(out, torch.Tensor | Mapping) else out
    found = [t for t in tree_leaves(given) if isinstance(t, torch.Tensor) and t.requires_grad]
    if len(found) > 1 and (alone := [t for t in found if not t.dim()]):
        found = alone[:1]  # a loss beside logits
    terms = [t.float() if precision.kind != "fp32" else t for t in found]
    terms = [_cross_entropy(t) if t.dim() > 1 else t.sum() for t in terms]
    return torch.stack(terms).sum() if len(terms) > 1 else terms[0] if terms else None


def _cross_entropy(logits: torch.Tensor) -> torch.Tensor:
    rows = logits.flatten(0, -2)
    return nn.functional.cross_entropy(rows, rows.new_zeros(len(rows), dtype=torch.int64))


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what is alive of what was made within it."""

    def __init__(self, model: nn.Module, found: dict[int, Layer]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.kept = self._gradients = 0
        self.moments: list[tuple[int, int]] = [(0, 0)]
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._found = found
        self._within = [0]
        self._last = 0  # the layer that was left last: what stands outside and comes after it lies on its stage
        self._sizes = [0]  # of what has come into these layers, in elements
        self._saved: dict[int, Any] = {}
        self.forward = True  # and not the way back, which uses all again
        self._early: set[str] = set()
        self.again: set[str] = set()  # parameters outside of layers that are used before and after some
        self.late: set[str] = set()  # parameters outside of layers that are used after some
        of_model = [*model.parameters(), *model.buffers()]
        self._own = {_memory(t) for t in of_model}
        self._names = {_memory(p): name for name, p in model.named_parameters()}
        for p in model.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self._gradient)  # type: ignore[no-untyped-call]
        for module in model.modules():
            if id(module) in found:
                module.register_forward_pre_hook(self._enter)
                module.register_forward_hook(self._leave)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.forward and not self._within[-1]:
            self._outside({self._names[k] for k in map(_memory, tree_leaves((args, kwargs))) if k in self._names})
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf)
        return out

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._alive or key in self._own:
            return

        def free(_: object) -> None:
            self.now -= nbytes
            del self._alive[key]

        self._alive[key] = weakref.ref(storage, free)
        self.now += nbytes
        self._note()

    def _note(self) -> None:
        self.moments = [m for m in self.moments if m[0] > self.now or m[1] > self._gradients]
        if not any(a >= self.now and g >= self._gradients for a, g in self.moments):
            self.moments.append((self.now, self._gradients))

    def _gradient(self, p: torch.Tensor) -> None:
        """It is counted, and let go: what becomes of it is the strategy's."""
        assert p.grad is not None
        self._gradients += p.grad.nbytes
        p.grad = None
        self._note()

    def _enter(self, module: nn.Module, given: Any) -> None:
        self._within.append(id(module))
        self._sizes.append(max((t.numel() for t in tree_leaves(given) if isinstance(t, torch.Tensor)), default=0))

    def _outside(self, used: set[str]) -> None:
        """Parameters are used outside of layers. A tied one is where it is used first."""
        if not self._last:
            self._early |= used
        else:
            self.again |= used & self._early
        self.late |= used - self._early

    def _leave(self, module: nn.Module, given: Any, out: Any) -> None:
        self._last = self._within.pop()
        self._sizes.pop()

    def saving(self) -> torch.autograd.graph.saved_tensors_hooks:
        return torch.autograd.graph.saved_tensors_hooks(self._save, lambda kept: kept)

    def _save(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._own or key in self._saved:
            return tensor

        def free(_: object) -> None:
            del self._saved[key]

        self._saved[key] = weakref.ref(storage, free)
        layer = self._found[self._within[-1] or self._last]
        layer.kept += storage.nbytes()
        if tensor.numel() <= self._sizes[-1]:
            layer.passes += storage.nbytes()
        return tensor


def _memory(value: Any) -> int | None:
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


# ---- what is said


def said(batch: tuple[tuple[Any, ...], dict[str, Any]]) -> str:
    """
    >>> said(((torch.zeros(8, 4), torch.zeros(8, dtype=torch.int64)), {}))
    '8x4, 8:int64'
    """
    return ", ".join(shape_of(t) for t in tree_leaves(batch) if isinstance(t, torch.Tensor))


def shape_of(tensor: torch.Tensor) -> str:
    kind = "" if tensor.dtype == torch.float32 else ":" + str(tensor.dtype).removeprefix("torch.")
    return "x".join(map(str, tensor.shape)) + kind


def _name(make: Callable[[], Any]) -> str:
    return getattr(make, "__name__", type(make).__name__)


def _tell(what: str, error: Exception) -> NoReturn:
    """The error of the user's own code, with the last line of it and the module that it is in."""
    frames = list(traceback.walk_tb(error.__traceback__))
    inside = [type(f.f_locals["self"]).__name__ for f, _ in frames if isinstance(f.f_locals.get("self"), nn.Module)]
    own = [(f.f_code.co_filename, line) for f, line in frames if not _foreign(f.f_code.co_filename)]
    where = f" ({own[-1][0]}, line {own[-1][1]}{f', in {inside[-1]}' if inside else ''})" if own else ""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    if "data-dependent" in str(error) or "DataDependent" in type(error).__name__:
        text = "it asks a tensor for its values, and here tensors have shapes only"
    raise ConfigError(f"{what}: {text}{where}") from error


def _foreign(file: str) -> bool:
    return any(part in file for part in ("site-packages", "/paceline/", "<frozen")) or file.startswith(sys.prefix)
