"""Where a graph is cut: so that stages take equally long and hold equally much, or at names.

A layer costs the share that it has in the time of all (forward and backward, measured on an example by one member), and
a quarter as much the share that it has in the bytes of all weights; without an example, its share of the bytes. Stages
are runs of layers, in the order of the graph, so that the most expensive one is as cheap as can be.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from paceline.core.errors import ConfigError, nearest
from paceline.parallel.nested import each
from paceline.parallel.trace import Followed, attribute

_OF_BYTES = 0.25  # against the time


def layers_of(graph: fx.Graph, model: nn.Module) -> list[list[fx.Node]]:
    """Runs of nodes that begin with a module that has weights; all but inputs, outputs and weights themselves."""
    runs: list[list[fx.Node]] = [[]]
    heavy = False
    for node in graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        has = nbytes_of([node], model) > 0
        if has and heavy:
            runs.append([])
        heavy = heavy or has
        runs[-1].append(node)
    return runs


def nbytes_of(nodes: Sequence[fx.Node], model: nn.Module) -> int:
    """Of the parameters that nodes call, or take by name."""
    found: dict[int, int] = {}
    for node in nodes:
        if node.op == "call_module":
            found |= {id(p): p.nbytes for p in model.get_submodule(str(node.target)).parameters()}
        for given in node.all_input_nodes:
            if given.op == "get_attr" and isinstance(p := attribute(model, str(given.target)), nn.Parameter):
                found[id(p)] = p.nbytes
    return sum(found.values())


def balanced(costs: Sequence[float], stages: int) -> list[int]:
    """Where each stage begins, so that the greatest sum is as small as can be.

    >>> balanced([1, 1, 1, 1, 4], 2)
    [0, 4]
    """
    count = len(costs)
    upto = [0.0]
    for cost in costs:
        upto.append(upto[-1] + cost)
    best = [upto[:]]  # best[s - 1][n]: of the first n in s stages
    begins: list[list[int]] = [[0] * (count + 1)]
    for stage in range(2, stages + 1):
        row, at = [float("inf")] * (count + 1), [0] * (count + 1)
        for n in range(stage, count + 1):
            for k in range(stage - 1, n):
                worst = max(best[-1][k], upto[n] - upto[k])
                if worst < row[n]:
                    row[n], at[n] = worst, k
        best.append(row)
        begins.append(at)
    cuts, n = [], count
    for at in reversed(begins):
        n = at[n]
        cuts.append(n)
    return cuts[::-1]


def by_name(runs: Sequence[Sequence[fx.Node]], names: Sequence[str], stages: int) -> list[int]:
    """The runs at which stages begin that are to begin with these modules."""
    if len(names) != stages - 1:
        raise ConfigError(
            f"run.model(cut={list(names)}): {stages} stages need {stages - 1} names, of the modules with which all but "
            f"the first begin; there are {len(names)}"
        )
    cuts = [0]
    known = {
        str(node.target): i for i, run in reversed(list(enumerate(runs))) for node in run if node.op == "call_module"
    }
    for name in names:
        under = [i for target, i in known.items() if target == name or target.startswith(f"{name}.")]
        if not under:
            raise ConfigError(f"run.model(cut={list(names)}): no layer {name!r}: {nearest(name, list(known))}")
        if min(under) <= cuts[-1]:
            raise ConfigError(
                f"run.model(cut={list(names)}): the stage that begins with {name!r} would come before, or be, an "
                "earlier one: give names in the order of forward"
            )
        cuts.append(min(under))
    return cuts


def costs_of(
    runs: Sequence[Sequence[fx.Node]], found: Followed, model: nn.Module, like: Sequence[Any], device: torch.device
) -> list[float]:
    """What each run of nodes costs, of 1 in all."""
    held = [float(nbytes_of(run, model)) for run in runs]
    sizes = [nbytes / max(sum(held), 1.0) for nbytes in held]
    if not like:
        return sizes
    with torch.random.fork_rng():
        timed = _Timed(found.module(model, found.graph), found.graph, device)
        try:
            timed.run(*[each(one, lambda t: t.to(device)) for one in like])
        except Exception as error:
            shapes = ", ".join(str(list(t.shape)) for t in _tensors(tuple(like)))
            raise ConfigError(
                f"run.model(like=...): the model cannot be called with this example, of shapes {shapes}: {error}"
            ) from error
    took = [sum(timed.seconds.get(node, 0.0) for node in run) for run in runs]
    return [(t / sum(took) + _OF_BYTES * size) / (1 + _OF_BYTES) for t, size in zip(took, sizes)]


class _Timed(fx.Interpreter):
    """Forward and backward, node by node; on copies of modules, one at a time, with any weights if there are none."""

    def __init__(self, module: fx.GraphModule, graph: fx.Graph, device: torch.device) -> None:
        super().__init__(module, graph=graph)
        self.seconds: dict[fx.Node, float] = {}
        self._device = device

    def run_node(self, n: fx.Node) -> Any:
        if n.op in ("placeholder", "output"):
            return super().run_node(n)
        if n.op == "get_attr":
            return _real(super().run_node(n), self._device)
        args, named = self.fetch_args_kwargs_from_env(n)
        call: Any = n.target
        if n.op == "call_module":
            module = self.fetch_attr(str(n.target))
            if any(t.is_meta for t in [*module.parameters(), *module.buffers()]):
                call = copy.deepcopy(module).to_empty(device=self._device)
            else:
                call = copy.deepcopy(module).to(self._device)
        elif n.op == "call_method":
            args, call = args[1:], getattr(args[0], str(n.target))
        out: Any = None
        took = []
        for _ in range(4):  # the first time much is made that is there later; other programs may delay any of them
            given = [each(one, _leaf) for one in args]
            began = self._now()
            out = call(*given, **named)
            into = [t for t in _tensors(out) if t.requires_grad and t.grad_fn is not None]
            if into:
                torch.autograd.backward(into, [torch.ones_like(t) for t in into])
            took.append(self._now() - began)
        self.seconds[n] = min(took)
        return each(out, lambda t: t.detach())

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _tensors(value: Any) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def _real(tensor: Any, device: torch.device) -> Any:
    return torch.zeros_like(tensor, device=device) if tensor.is_meta else tensor.detach().to(device)
