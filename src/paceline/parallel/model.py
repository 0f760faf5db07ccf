"""`run.model(model)`: this member's part of a model, by the mesh of the run.

A function in the place of a model is called under the meta device, so that a model can be larger than the memory of one
member: layer after layer is made for real, cut, and its other parts are dropped. Its weights are then those that
`reset_parameters` gives, from the run's seed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from paceline.core.errors import ConfigError, nearest
from paceline.core.mesh import Mesh
from paceline.parallel.pieces import fill
from paceline.parallel.shard import layers, shard
from paceline.strategies.replicas import make_equal
from paceline.transport.group import Group
from paceline.transport.torch_backend import with_torch
from paceline.transport.torch_group import TorchGroup

OFFLOADS = ("none", "parameters")


def device_mesh(mesh: Mesh, group: Group, device: torch.device) -> DeviceMesh:
    """The mesh as PyTorch knows it; all members call this."""
    if not isinstance(group, TorchGroup):
        with_torch(group)
    return init_device_mesh(device.type, tuple(mesh), mesh_dim_names=mesh._fields)


def cut_model(
    given: nn.Module | Callable[[], nn.Module],
    mesh: Mesh,
    group: Group,
    device: torch.device,
    seed: int,
    *,
    recompute: bool = False,
    offload: str = "none",
) -> nn.Module:
    """Cut a model, or what a function makes, in place; see `Run.model`."""
    if offload not in OFFLOADS:
        raise ConfigError(f"run.model(offload={offload!r}): {nearest(offload, OFFLOADS)}")
    if offload != "none" and mesh.shard == 1:
        raise ConfigError(
            f"run.model(offload={offload!r}): parts lie in host memory where there are parts: --mesh shard=2"
        )
    if isinstance(given, nn.Module):
        model = given.to(device) if device.type == "cpu" else given
        make_equal(group, dict(model.named_parameters()), dict(model.named_buffers()))
    else:
        model = _outline(given)
    where = device_mesh(mesh, group, device)
    if recompute:
        recompute_layers(model)
    if mesh.shard > 1:
        shard(model, where["shard"], offload=offload == "parameters")
    if not isinstance(given, nn.Module):
        model.to_empty(device=device)
        _initialise(model, device, seed)
    return model


def whole_model(make: Callable[[], nn.Module], device: torch.device, seed: int) -> nn.Module:
    """What a function makes, with the weights that it has on any mesh."""
    model = _outline(make).to_empty(device=device)
    _initialise(model, device, seed)
    return model


def _outline(make: Callable[[], nn.Module]) -> nn.Module:
    """A model without memory."""
    with torch.device("meta"):
        model = make()
    if not isinstance(model, nn.Module):
        raise ConfigError(f"run.model(function): it returned a {type(model).__name__}, not an nn.Module")
    _check_initialisers(model)
    return model


def recompute_layers(model: nn.Module) -> None:
    """Forget what layers compute on the way forward, and compute it again on the way back."""
    found = list(layers(model))
    if not found:
        raise ConfigError(
            "run.model(recompute=True): no layers were found: put them into an nn.Sequential or nn.ModuleList, or use "
            "torch.utils.checkpoint within the model"
        )
    for layer in found:
        forward = layer.forward

        def again(*args: Any, _forward: Callable[..., Any] = forward, **named: Any) -> Any:
            if not torch.is_grad_enabled():
                return _forward(*args, **named)
            return checkpoint(_forward, *args, use_reentrant=False, **named)

        layer.forward = again


def _check_initialisers(model: nn.Module) -> None:
    for name, module in model.named_modules():
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        if own and not callable(getattr(module, "reset_parameters", None)):
            raise ConfigError(
                f"run.model(function): {name or 'the model'!r} ({type(module).__name__}) has {own[0][0]!r} and no "
                "reset_parameters(), so it cannot be made part by part: give it one, or give run.model the model itself"
            )


@torch.no_grad()
def _initialise(model: nn.Module, device: torch.device, seed: int) -> None:
    """Module by module: make all of it, take this member's part."""
    state = torch.random.get_rng_state()
    for number, module in enumerate(model.modules()):
        own = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
        if not own:
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
            fill(tensor, made_.detach().to(device))
    torch.random.set_rng_state(state)
