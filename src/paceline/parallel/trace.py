"""What a model computes, in order, as a graph: `torch.fx` follows one call of `forward` with placeholders for tensors.

The elements of lists (Sequential, ModuleList, ModuleDict) and torch's own modules are called as they are; other modules
are followed inside, unless that fails. Parameters and buffers that `forward` uses by itself become values of the graph.
What must not depend on the values of tensors, and what cannot be followed, is refused with the line of the script.
"""

from __future__ import annotations

import contextlib
import inspect
import linecache
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from paceline.core.errors import ConfigError

_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_RANDOM = ("rand", "randn", "randint", "randperm", "normal", "bernoulli")  # drawn in each pass, not once for all
_MAKERS = ("arange", "zeros", "ones", "full", "empty", "eye", "linspace", "tensor", *_RANDOM)
_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parent)


class Followed(NamedTuple):
    """What a model computes."""

    graph: fx.Graph
    constants: dict[str, torch.Tensor]  # tensors that forward makes without any input, by their names in the graph

    def module(self, model: nn.Module, graph: fx.Graph) -> fx.GraphModule:
        """Of a part of the graph, with the model's own modules and tensors."""
        used = [str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr")]
        return fx.GraphModule({n: self.constants.get(n, attribute(model, n)) for n in used}, graph)


def attribute(model: nn.Module, name: str) -> Any:
    """A module or tensor by its name in a graph; None where it is not the model's."""
    found: Any = model
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def follow(model: nn.Module, *, deep: bool = False) -> Followed:
    """The graph of a model; `deep`: elements of lists are followed inside too."""
    leaves = set() if deep else {id(m) for many in model.modules() if isinstance(many, _LISTS) for m in many.children()}
    leaves -= {id(m) for m in model.modules() if isinstance(m, _LISTS)}
    found = _follow(model, leaves)
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.train(not model.training)
        other = _follow(model, leaves)
    finally:
        for module, training in modes:
            module.training = training
    lines = [str(each.graph).splitlines() for each in (found, other)]
    if lines[0] != lines[1]:
        odd = next((a for a, b in zip(*lines) if a != b), lines[0][-1])
        raise ConfigError(
            f"--mesh stage=...: forward of {type(model).__name__} looks at self.training ({odd.strip()}), which is not "
            "known when the model is cut: use modules for it, nn.Dropout(p) in place of F.dropout(x, p, self.training)"
        )
    return found


def _follow(model: nn.Module, leaves: set[int]) -> Followed:
    while True:
        tracer = _Tracer(leaves)
        before = set(vars(model))
        try:
            with _makers(tracer):
                graph = tracer.trace(model)
            return Followed(graph, {name: vars(model)[name] for name in set(vars(model)) - before})
        except ConfigError:
            raise
        except Exception as error:
            if not tracer.inside:
                raise ConfigError(_cannot(model, error)) from None
            leaves = leaves | {id(tracer.inside[-1])}
        finally:
            for name in set(vars(model)) - before:  # fx leaves constants in the model
                delattr(model, name)


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True

    def __init__(self, leaves: set[int]) -> None:
        super().__init__()
        self._leaves = leaves
        self.inside: list[nn.Module] = []  # modules that are being followed

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return id(m) in self._leaves or (super().is_leaf_module(m, module_qualified_name) and not isinstance(m, _LISTS))

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.is_leaf_module(m, ""):
            return super().call_module(m, forward, args, kwargs)
        self.inside.append(m)
        out = super().call_module(m, forward, args, kwargs)
        self.inside.pop()  # not where it failed: who asks then wants to know
        return out

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        """Placeholders for what has no default; the rest is as it is by default."""
        asked = list(inspect.signature(root_fn).parameters.values())[1:]
        if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in asked) and type(self.root) is not nn.Sequential:
            asked = [p for p in asked if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        names = [p.name for p in asked if p.default is p.empty]
        if not names:
            raise ConfigError(
                f"--mesh stage=...: forward of {type(self.root).__name__} has no named inputs, so it is not known what "
                "comes in: write them out, as in def forward(self, x)"
            )
        return root_fn, [self.root, *(self.create_proxy("placeholder", name, (), {}) for name in names)]

    def to_bool(self, obj: fx.Proxy) -> bool:
        if linecache.getline(*_line(sys._getframe(1))).strip().startswith("assert "):
            return True  # what is asserted of shapes is taken to hold
        return super().to_bool(obj)


def _line(frame: Any) -> tuple[str, int]:
    """Where in the script's own code a frame stands."""
    while frame.f_back and frame.f_code.co_filename.startswith((_TORCH, _OURS)):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


@contextlib.contextmanager
def _makers(tracer: _Tracer) -> Iterator[None]:
    """Functions that make tensors by shape do not see by themselves that it is a placeholder; random ones are called
    in each pass."""

    def recorded(name: str, make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **named: Any) -> Any:
            found: list[fx.Proxy] = []
            fx.node.map_aggregate((args, named), lambda a: found.append(a) if isinstance(a, fx.Proxy) else None)
            if found or name in _RANDOM:
                return tracer.create_proxy("call_function", make, args, named)
            return make(*args, **named)

        return made

    before = {name: getattr(torch, name) for name in _MAKERS}
    for name, make in before.items():
        setattr(torch, name, recorded(name, make))
    try:
        yield
    finally:
        for name, make in before.items():
            setattr(torch, name, make)


def _cannot(model: nn.Module, error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith((_TORCH, _OURS))]
    where = f"{own[-1].filename}:{own[-1].lineno}: {own[-1].line}" if own else f"forward of {type(model).__name__}"
    return (
        f"--mesh stage=...: what the model computes cannot be followed beyond {where} ({_first(error)}). Let forward "
        "not depend on the values or the shapes of tensors, or put that part into a module of its own in an "
        "nn.Sequential or nn.ModuleList, which is called as it is; --mesh shard=N need not follow it"
    )


def _first(error: Exception) -> str:
    """The first sentence; torch.fx goes on about itself."""
    return str(error).strip().split(". ")[0].splitlines()[0] if str(error).strip() else type(error).__name__
