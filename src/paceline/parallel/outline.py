"""Models that a function makes: first without memory, then with weights, module by module.

What `reset_parameters` gives, from the run's seed and the number of the module, is the same on any mesh, and no member
has more of it at a time than one module.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from paceline.core.errors import ConfigError, nearest
from paceline.parallel.filled import Writes, check_filled
from paceline.parallel.layers import recompute_layers
from paceline.parallel.pieces import fill

OFFLOADS = ("none", "parameters")


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
        model = outline(given).to_empty(device=device)
        initialise(model, device, seed)
    if recompute:
        recompute_layers(model)
    return model


def outline(make: Callable[[], nn.Module]) -> nn.Module:
    """A model without memory."""
    if not callable(make):
        raise ConfigError(f"run.model: a model is wanted, or a function that makes one; not a {type(make).__name__}")
    with torch.device("meta"), Writes() as writes:
        model = make()
    if not isinstance(model, nn.Module):
        raise ConfigError(f"run.model(function): it returned a {type(model).__name__}, not an nn.Module")
    _check_initialisers(model)
    check_filled(model, writes)
    return model


def _check_initialisers(model: nn.Module) -> None:
    for name, module in model.named_modules():
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        if own and not callable(getattr(module, "reset_parameters", None)):
            raise ConfigError(
                f"run.model(function): {name or 'the model'!r} ({type(module).__name__}) has {own[0][0]!r} and no "
                "reset_parameters(), so it cannot be made part by part: give it one, or give run.model the model itself"
            )


@torch.no_grad()
def initialise(model: nn.Module, device: torch.device, seed: int) -> None:
    """Module by module: make all of it, take this member's part."""
    state = torch.random.get_rng_state()
    for number, module in enumerate(model.modules()):
        own = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
        if not own or all(tensor.is_meta for tensor in own.values()):  # another member's
            continue
        parts = (module._parameters.copy(), module._buffers.copy())
        try:
            for name, tensor in own.items():
                made = torch.empty(tensor.shape, dtype=tensor.dtype)
                if name in module._parameters:
                    module._parameters[name] = nn.Parameter(made, requires_grad=tensor.requires_grad)
                else:
                    module._buffers[name] = made
            torch.manual_seed(seed * 1_000_003 + number)
            module.reset_parameters()  # type: ignore[operator]
            whole = dict(module._parameters) | dict(module._buffers)
        finally:
            module._parameters.update(parts[0])
            module._buffers.update(parts[1])
        for name, tensor in own.items():
            made_ = whole[name]
            assert made_ is not None
            if not tensor.is_meta:
                fill(tensor, made_.detach().to(device))
    torch.random.set_rng_state(state)
