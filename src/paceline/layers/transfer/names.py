"""Which modules and parameters of a model a pattern means.

A pattern is a glob over names as `named_modules` and `named_parameters` give them; `*` also goes over dots. One that
matches a module means everything in it: `"encoder"`, `"encoder.*"` and `"*.bias"` are all patterns.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from paceline.core.errors import ConfigError


class Meant(NamedTuple):
    """What patterns mean: parameters and modules by name, in the model's order."""

    parameters: dict[str, nn.Parameter]
    modules: dict[str, nn.Module]


def meant(model: nn.Module, patterns: Sequence[str]) -> Meant:
    """All that the patterns match.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    >>> list(meant(model, ["1"]).parameters), list(meant(model, ["*.bias"]).parameters)
    (['1.weight', '1.bias'], ['0.bias', '1.bias'])

    Raises:
        ConfigError: there is no pattern, or one that matches nothing.
    """
    listed(patterns)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    modules = {name: module for name, module in model.named_modules(remove_duplicate=False) if name and _holds(module)}
    for pattern in patterns:
        if not fnmatch.filter([*modules, *parameters], pattern):
            raise ConfigError(
                f"{pattern!r} matches no parameter of the model: {near(pattern, [*modules, *parameters])}"
            )

    def hit(name: str) -> bool:
        return any(fnmatch.fnmatchcase(n, pattern) for n in _and_above(name) for pattern in patterns)

    return Meant({n: p for n, p in parameters.items() if hit(n)}, {n: m for n, m in modules.items() if hit(n)})


def listed(patterns: Sequence[str]) -> None:
    if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
        raise ConfigError(f"patterns={patterns!r}: names or globs of names are wanted, such as 'encoder.*'")
    if not patterns:
        raise ConfigError("no pattern was given: name what is meant, such as 'encoder.*', or '*' for everything")


def near(word: str, known: Iterable[str]) -> str:
    """The end of a message about a name that is not there; a model may have too many to list.

    >>> near("encodr", ["encoder", "head"])
    "the nearest name is 'encoder'"
    """
    close = difflib.get_close_matches(word.strip("*."), list(known), n=1, cutoff=0.0)
    return f"the nearest name is {close[0]!r}" if close else "there are none"


def replace(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put another module at a name."""
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)


def owners(model: nn.Module, parameter: Tensor) -> list[str]:
    """Names of the modules that have this very parameter."""
    modules = model.named_modules(remove_duplicate=False)
    return [name for name, module in modules if any(p is parameter for p in module._parameters.values())]


def _holds(module: nn.Module) -> bool:
    return any(True for _ in module.parameters()) or any(True for _ in module.buffers())


def _and_above(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]
