"""Freeze parts of a model, and thaw them.

What is frozen has `requires_grad=False`: no gradient, nothing to exchange, no state in the optimizer. A norm with
running statistics whose parameters are all frozen also stays in eval mode, through later calls of `model.train()`:
otherwise its statistics, and with them what the frozen part computes, would drift with the new data.
"""

from __future__ import annotations

import functools

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from paceline.layers.transfer.names import Meant, meant


def freeze(model: nn.Module, *patterns: str) -> list[str]:
    """Freeze what the patterns match; returns the names of these parameters.

    >>> model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    >>> freeze(model, "0", "1")
    ['0.weight', '0.bias', '1.weight', '1.bias']
    >>> [module.training for module in model.train()]
    [True, False, True]
    """
    found = meant(model, patterns)
    for parameter in found.parameters.values():
        parameter.requires_grad_(False)
    for norm in _norms(model, found):
        if not any(p.requires_grad for p in norm.parameters(recurse=False)):
            norm.train(False)
            norm.train = functools.partial(_stay, norm)  # type: ignore[method-assign]  # of this object; copies have their own
    return list(found.parameters)


def unfreeze(model: nn.Module, *patterns: str) -> list[str]:
    """Thaw what the patterns match; returns the names of these parameters."""
    found = meant(model, patterns)
    for parameter in found.parameters.values():
        parameter.requires_grad_(True)
    for norm in _norms(model, found):
        if is_held(norm):
            del vars(norm)["train"]
            norm.train(model.training)
    return list(found.parameters)


def is_held(module: nn.Module) -> bool:
    """Whether this is a norm that stays in eval mode."""
    return "train" in vars(module)


def _stay(norm: _NormBase, mode: bool = True) -> _NormBase:
    """What `train` of a frozen norm is."""
    norm.training = False
    return norm


def _norms(model: nn.Module, found: Meant) -> list[_NormBase]:
    """Norms of which something was meant; those without parameters only by their own name or a name above."""
    touched = {name.rpartition(".")[0] for name in found.parameters} | set(found.modules)
    modules = model.named_modules(remove_duplicate=False)
    return [module for name, module in modules if name in touched and isinstance(module, _NormBase)]
