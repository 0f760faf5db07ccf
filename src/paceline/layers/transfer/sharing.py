"""Parts that two models have in common: the same modules and parameters, not copies of them.

What is shared is trained once: an optimizer gets it once, it is sent once, and a checkpoint has it once.
"""

from __future__ import annotations

from torch import nn

from paceline.core.errors import ConfigError
from paceline.layers.transfer.names import meant, near, replace


def share(source: nn.Module, target: nn.Module, *patterns: str) -> list[str]:
    """Let the target have the source's own modules and parameters where the patterns match; returns their names.

    Names must be the same in both; where they are not, give the parts: `share(source.encoder, target.trunk, "*")`.
    Make the optimizer afterwards.

    >>> source = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 5))
    >>> target = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 7))
    >>> share(source, target, "0"), target[0] is source[0]
    (['0'], True)

    Raises:
        ConfigError: a part is not in both, or not alike in both; the target is as it was.
    """
    if source is target:
        raise ConfigError("source and target are one model: it shares everything with itself")
    found = meant(source, patterns)
    whole = [name for name in found.modules if name.rpartition(".")[0] not in found.modules]
    inside = tuple(f"{name}." for name in whole)
    single = [name for name in found.parameters if not name.startswith(inside)]
    modules = dict(target.named_modules(remove_duplicate=False))
    parameters = dict(target.named_parameters(remove_duplicate=False))
    for name in whole:
        if name not in modules:
            raise ConfigError(f"the target has no module {name!r}: {near(name, [n for n in modules if n])}")
        if odd := _difference(found.modules[name], modules[name]):
            raise ConfigError(f"{name!r} is not alike in source and target, so they cannot share it: {odd}")
    for name in single:
        if name not in parameters:
            raise ConfigError(f"the target has no parameter {name!r}: {near(name, parameters)}")
        mine, other = found.parameters[name], parameters[name]
        if (mine.shape, mine.dtype) != (other.shape, other.dtype):
            raise ConfigError(f"{name!r} is {_size(mine)} in the source and {_size(other)} in the target")
    for name in whole:
        replace(target, name, found.modules[name])
    for name in single:
        parent, _, last = name.rpartition(".")
        setattr(target.get_submodule(parent), last, found.parameters[name])
    return [*whole, *single]


def _difference(mine: nn.Module, other: nn.Module) -> str:
    if type(mine) is not type(other):
        return f"{type(mine).__name__} and {type(other).__name__}"
    ours, theirs = mine.state_dict(), other.state_dict()
    for name in [*ours, *theirs]:
        if name not in ours or name not in theirs:
            return f"{name} is in one only"
        if getattr(ours[name], "shape", None) != getattr(theirs[name], "shape", None):
            return f"{name} is {_size(ours[name])} in the source and {_size(theirs[name])} in the target"
        kinds = [getattr(each[name], "dtype", None) for each in (ours, theirs)]
        if kinds[0] != kinds[1]:
            return f"{name} is {kinds[0]} in the source and {kinds[1]} in the target"
    if repr(mine) != repr(other):
        first = next((a, b) for a, b in zip(repr(mine).splitlines(), repr(other).splitlines()) if a != b)
        return f"{first[0].strip()} and {first[1].strip()}"
    return ""


def _size(value: object) -> str:
    return "x".join(map(str, getattr(value, "shape", ()))) or "one number"
