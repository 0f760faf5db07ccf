"""A graph in stages: what each computes, which values pass between them, and whose each tensor is.

A value that a later stage needs goes there at once, also past stages between them (skip connections). The inputs of the
model are at hand on every member. The model stays the object that it is; on each member only the layers of its own
stages are left in it, under their names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import fx, nn

from paceline.core.errors import ConfigError
from paceline.parallel.trace import attribute


class Stage(NamedTuple):
    """One stage, as all know it."""

    graph: fx.Graph  # inputs of the model, then values of other stages -> what others need, or what the model returns
    inputs: list[int]  # of the model, by place
    takes: dict[int, list[int]]  # by stage: which of what it gives out
    gives: dict[int, list[int]]  # by stage: the same from this side
    uses: set[int]  # ids of the tensors that it computes with


def in_stages(
    graph: fx.Graph, runs: Sequence[Sequence[fx.Node]], begins: Sequence[int], model: nn.Module
) -> list[Stage]:
    """Cut a graph where these runs of nodes begin."""
    home: dict[fx.Node, int] = {}
    for number, run in enumerate(runs):
        home |= dict.fromkeys(run, sum(begin <= number for begin in begins) - 1)
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    end = next(node for node in graph.nodes if node.op == "output")
    home[end] = len(begins) - 1
    out: list[list[fx.Node]] = [[] for _ in begins]  # what each gives out
    for node, at in home.items():
        if any(home[user] > at for user in node.users if user in home):
            out[at].append(node)
    return [_stage(number, home, inputs, end, out, model) for number in range(len(begins))]


def _stage(
    number: int,
    home: dict[fx.Node, int],
    inputs: list[fx.Node],
    end: fx.Node,
    out: list[list[fx.Node]],
    model: nn.Module,
) -> Stage:
    mine = [node for node, at in home.items() if at == number]
    needed = dict.fromkeys(given for node in mine for given in node.all_input_nodes)
    graph = fx.Graph()
    here: dict[fx.Node, fx.Node] = {}
    asked = [place for place, node in enumerate(inputs) if node in needed]
    for place in asked:
        here[inputs[place]] = graph.placeholder(f"input_{place}")
    takes: dict[int, list[int]] = {}
    for source in range(number):
        if places := [place for place, node in enumerate(out[source]) if node in needed]:
            takes[source] = places
            for place in places:
                here[out[source][place]] = graph.placeholder(f"from_{source}_{place}")
    for node in needed:
        if node.op == "get_attr":
            here[node] = graph.node_copy(node, lambda n: n)
    for node in mine:
        if node is not end:
            here[node] = graph.node_copy(node, lambda n: here[n])
    if number == len(out) - 1:
        graph.output(fx.node.map_arg(end.args[0], lambda n: here[n]))
    else:
        graph.output(tuple(here[node] for node in out[number]))
    gives: dict[int, list[int]] = {}
    for place, node in enumerate(out[number]):
        for user in sorted({home[user] for user in node.users if user in home} - {number}):
            gives.setdefault(user, []).append(place)
    return Stage(graph, asked, takes, gives, set(_used([*mine, *(n for n in needed if n.op == "get_attr")], model)))


def _used(nodes: Sequence[fx.Node], model: nn.Module) -> Iterator[int]:
    for node in nodes:
        if node.op == "call_module":
            module = model.get_submodule(str(node.target))
            yield from map(id, module.parameters())
            yield from map(id, module.buffers())
        elif node.op == "get_attr":
            yield id(attribute(model, str(node.target)))


class Layout:
    """Whose each tensor of the whole model is, by name."""

    def __init__(self, model: nn.Module, stages: Sequence[Stage], members: int) -> None:
        self.parameters = [name for name, _ in model.named_parameters()]  # in the order of the whole
        self.saved = list(model.state_dict())
        self.aliases: dict[str, list[str]] = {}  # by name: all names of a tensor
        self.tied: dict[str, list[int]] = {}  # parameters that several members compute with, and hold; by first name
        self._users: dict[str, list[int]] = {}  # members, by name of the tensor
        named = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
        names: dict[int, list[str]] = {}
        for name, tensor in named.items():
            self.aliases[name] = names.setdefault(id(tensor), [])
            self.aliases[name].append(name)
            users = [number % members for number, stage in enumerate(stages) if id(tensor) in stage.uses]
            self._users[name] = sorted(set(users)) or [0]
            if isinstance(tensor, nn.Parameter) and len(self._users[name]) > 1:
                self.tied[self.aliases[name][0]] = self._users[name]
                if tensor.is_meta:
                    self._refuse(self.aliases[name][0], named)

    def _refuse(self, name: str, named: dict[str, Any]) -> None:
        every = " and ".join(repr(n) for n, tensor in named.items() if tensor is named[name])
        raise ConfigError(
            f"run.model(function): {every} is used by members {self.tied[name]}, and modules that share a tensor "
            "cannot be made one by one: give run.model the model itself, or each use weights of its own"
        )

    def owner(self, name: str) -> int:
        """The member of the pipeline that saves it, and counts it in norms."""
        return self._users[name][0]

    def holds(self, member: int, name: str) -> bool:
        return member in self._users[name]


def prune(model: nn.Module, layout: Layout, member: int) -> None:
    """Leave in the model only what this member holds. Modules of which nothing is left become None."""
    _prune(model, layout, member, "")


def _prune(module: nn.Module, layout: Layout, member: int, prefix: str) -> bool:
    had, kept = False, False
    for tensors in (module._parameters, module._buffers):
        for name, tensor in tensors.items():
            if tensor is not None:
                had = True
                if layout.holds(member, prefix + name):
                    kept = True
                else:
                    tensors[name] = None
    for name, child in module._modules.items():
        if child is None:
            continue
        empty = next(child.parameters(), None) is None and next(child.buffers(), None) is None
        if not empty:
            had = True
            if _prune(child, layout, member, f"{prefix}{name}."):
                kept = True
            else:
                module._modules[name] = None
    return kept or not had
