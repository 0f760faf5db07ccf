"""How deep a parameter lies: the layers of a model in a row, parameter groups by depth, thawing from the top.

The row is read off the tree of modules: the children of the model in their order, where a Sequential, a ModuleList, a
module that does nothing but wrap another one, or one with a stack of blocks somewhere in it is replaced by its own
children. A stack is a ModuleList, or a Sequential with several blocks of one class, such as the residual blocks of
torchvision and timm. Anything else is one layer, however much is in it, and so is a block, unless a Sequential of
blocks is in it. Parameters that a module has beside its children, such as a class token, count as a layer before them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import nn

from paceline.core.errors import ConfigError
from paceline.layers.transfer.freezing import unfreeze
from paceline.layers.transfer.names import listed, meant


class Layer(NamedTuple):
    name: str  # of a module; "" for the model
    parameters: tuple[nn.Parameter, ...]
    own: tuple[str, ...] = ()  # their names, where they are what the module has beside its children

    @property
    def patterns(self) -> tuple[str, ...]:
        """What means these parameters."""
        return self.own or (self.name,)


def layers(model: nn.Module) -> list[Layer]:
    """The layers with parameters, from the input on.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))
    >>> [layer.name for layer in layers(model)]
    ['0', '2.0', '2.1']
    """
    seen: set[int] = set()
    found = []
    for layer in _row("", model, _blocks(model), root=True):
        new = tuple(p for p in layer.parameters if id(p) not in seen)  # a tied one belongs to the first that has it
        seen |= {id(p) for p in new}
        if new:
            found.append(layer._replace(parameters=new))
    return found


def groups(
    model: nn.Module, *, lr: float, decay: float = 1.0, beside: torch.optim.Optimizer | None = None
) -> list[dict[str, Any]]:
    """Groups for an optimizer: `lr` for the last layer, `lr · decay` for the one before it, and so on.

    Only parameters that are trained are in them; frozen layers count as depth all the same, so that a layer's rate
    does not depend on what else is frozen.

    Args:
        beside: leaves out what this optimizer has already: `for g in groups(...): optimizer.add_param_group(g)`.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1))
    >>> [(group["name"], group["lr"]) for group in groups(model, lr=1.0, decay=0.5)]
    [('0', 0.25), ('1', 0.5), ('2', 1.0)]
    """
    if not lr > 0:
        raise ConfigError(f"lr={lr}: the last layer's learning rate is wanted, above 0")
    if not 0 < decay <= 1:
        raise ConfigError(
            f"decay={decay}: how much of its rate each layer leaves to the one before, above 0 and up to 1"
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError("no parameter of the model is trained: unfreeze some of them, such as the head")
    known = {id(p) for group in beside.param_groups for p in group["params"]} if beside else set()
    row = layers(model)
    found = []
    for height, layer in enumerate(row):
        trained = [p for p in layer.parameters if p.requires_grad and id(p) not in known]
        if trained:
            found.append({"params": trained, "lr": lr * decay ** (len(row) - 1 - height), "name": layer.name})
    return found


class Gradual(NamedTuple):
    """What to thaw at which epoch."""

    stages: tuple[tuple[int, tuple[str, ...]], ...]  # (epoch, patterns)

    def at(self, epoch: int) -> tuple[str, ...]:
        """The patterns whose epoch this is."""
        return tuple(pattern for due, patterns in self.stages if due == epoch for pattern in patterns)

    def thaw(self, model: nn.Module, epoch: int) -> list[str]:
        """Thaw all that is due by this epoch, which a run that was resumed may not have done; returns what is new."""
        due = [pattern for when, patterns in self.stages if when <= epoch for pattern in patterns]
        frozen = {n for n, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
        return [name for name in unfreeze(model, *due) if name in frozen] if due else []

    def __str__(self) -> str:
        return "\n".join(f"epoch {epoch}: {', '.join(patterns)}" for epoch, patterns in self.stages)


def gradual(model: nn.Module, *stages: str | Sequence[str], start: int = 1, every: int = 1) -> Gradual:
    """A plan that thaws one stage each `every` epochs from `start` on; nothing is thawed yet.

    Args:
        stages: patterns, in the order in which they are due; without them each layer that is frozen now, from the last
            one back to the first.

    >>> from paceline.layers.transfer.freezing import freeze
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1))
    >>> _ = freeze(model, "0", "1")
    >>> print(gradual(model, every=2))
    epoch 1: 1
    epoch 3: 0
    """
    if start < 0 or every < 1:
        raise ConfigError(f"start={start}, every={every}: epochs count from 0, and a stage takes at least one")
    given = [(stage,) if isinstance(stage, str) else tuple(stage) for stage in stages]
    if not given:
        given = [layer.patterns for layer in reversed(layers(model)) if _frozen(layer)]
    if not given:
        raise ConfigError("nothing is frozen, so there is nothing to thaw: freeze first, or name the stages")
    for patterns in given:
        listed(patterns)
        meant(model, patterns)
    return Gradual(tuple((start + every * i, patterns) for i, patterns in enumerate(given)))


def _frozen(layer: Layer) -> bool:
    return not all(p.requires_grad for p in layer.parameters)


_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def _row(
    name: str, module: nn.Module, blocks: Set[type], *, root: bool = False, listed: bool = False
) -> Iterator[Layer]:
    """`listed`: it is an element of a ModuleList, or lies in one, and is not looked into for other stacks."""
    own = {f"{name}.{n}" if name else n: p for n, p in module.named_parameters(recurse=False)}
    children = [(n, child) for n, child in module.named_children() if _has_parameters(child)]
    opened = root or isinstance(module, _LISTS)
    opened = opened or (len(children) == 1 and not own and type(module) not in blocks)
    opened = opened or (not listed and any(_is_stack(inner) for inner in module.modules()))
    if children and opened:
        if own:
            yield Layer(name, tuple(own.values()), tuple(own))
        for child_name, child in children:
            inside = listed or isinstance(module, nn.ModuleList)
            yield from _row(f"{name}.{child_name}" if name else child_name, child, blocks, listed=inside)
    else:
        yield Layer(name, tuple(module.parameters()))


def _is_stack(module: nn.Module) -> bool:
    if isinstance(module, nn.ModuleList):
        return len(module) > 1 and _has_parameters(module)
    return isinstance(module, nn.Sequential) and bool(_repeated(module))


def _blocks(model: nn.Module) -> Set[type]:
    """The classes of which several stand in one Sequential: such a one is a block, also where it stands alone."""
    return {kind for module in model.modules() if isinstance(module, nn.Sequential) for kind in _repeated(module)}


def _repeated(row: nn.Sequential) -> list[type]:
    return [
        kind for kind, count in Counter(type(child) for child in row if _is_made_of_others(child)).items() if count > 1
    ]


def _is_made_of_others(module: nn.Module) -> bool:
    """Not a layer, nor one with something of its own around it, as an adapter is."""
    parts = sum(map(_has_parameters, module.children()))
    own = any(True for _ in module.parameters(recurse=False))
    return not isinstance(module, _LISTS) and (parts > 1 or (parts == 1 and not own))


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())
