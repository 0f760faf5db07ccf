"""Models that a function makes: first without memory, then with weights, tensor by tensor.

What the constructor gives them, from the run's seed, is the same on any mesh, and no member has more of it at a time
than one tensor, and what that is made of (`history`).
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable

import torch
from torch import nn

from paceline.core.errors import ConfigError, nearest
from paceline.parallel.history import History, named
from paceline.parallel.layers import recompute_layers
from paceline.parallel.pieces import fill

OFFLOADS = ("none", "parameters")
_INSIDE = os.path.dirname(torch.__file__), os.path.dirname(__file__)


def check_offload(offload: str, device: torch.device, size: int, *, cuts: bool) -> None:
    if offload == "optimizer":
        raise ConfigError(
            "run.model(offload='optimizer'): the optimizer's state alone is offloaded by --strategy "
            "'zero(offload=\"optimizer\")'; here known: 'none', 'parameters'"
        )
    if offload not in OFFLOADS:
        raise ConfigError(f"run.model(offload={offload!r}): {nearest(offload, OFFLOADS)}")
    if offload != "none" and size == 1 and device.type == "cpu":
        raise ConfigError(
            f"run.model(offload={offload!r}): on one member without a GPU the model is in host memory; leave it out"
        )
    if offload != "none" and not cuts:
        which = "shard=1, which cuts into one part" if size == 1 else f"shard={size}"
        raise ConfigError(f"run.model(offload={offload!r}): parts lie in host memory where there are: --mesh {which}")


def whole_model(
    given: nn.Module | Callable[[], nn.Module], device: torch.device, seed: int, *, recompute: bool = False
) -> nn.Module:
    """A model, or what a function makes, with the weights that it has on any mesh."""
    if isinstance(given, nn.Module):
        model = given.to(device)
    else:
        model, history = outline(given)
        to_memory(model, device)
        initialise(model, history, device, seed)
    if recompute:
        recompute_layers(model)
    return model


def outline(make: Callable[[], nn.Module]) -> tuple[nn.Module, History]:
    """A model without memory, and how its weights come to be."""
    if not callable(make):
        raise ConfigError(f"run.model: a model is wanted, or a function that makes one; not a {type(make).__name__}")
    try:
        with torch.device("meta"), History() as history:
            model = make()
    except (RuntimeError, NotImplementedError) as error:
        if "meta" not in str(error):
            raise
        last = traceback.extract_tb(error.__traceback__)
        asks = next((f for f in reversed(last) if not f.filename.startswith(_INSIDE)), last[-1])
        raise ConfigError(
            f"run.model(function): the model is made before its weights have values, and {asks.filename}:{asks.lineno} "
            f"({asks.line}) asks for some: take another way there, or give run.model the model itself"
        ) from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"run.model(function): it returned a {type(model).__name__}, not an nn.Module")
    history.keep(model)
    return model, history


def to_memory(model: nn.Module, device: torch.device) -> None:
    """As `Module.to_empty`; a tensor that several modules have stays one."""
    tied: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        tied.setdefault(id(p), []).append(name)
    model.to_empty(device=device)
    for first, *others in tied.values():
        for name in others:
            path, _, last = name.rpartition(".")
            setattr(model.get_submodule(path), last, model.get_parameter(first))


@torch.no_grad()
def initialise(model: nn.Module, history: History, device: torch.device, seed: int) -> None:
    """Tensor by tensor: make all of it, take this member's part."""
    done: set[int] = set()
    for name, tensor in named(model):
        if not tensor.is_meta and id(tensor) not in done:  # else another member's, or done under another name
            done.add(id(tensor))
            fill(tensor, history.whole(name, seed).to(device))
