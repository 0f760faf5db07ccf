"""`run.model(model)`: this member's part of a model, by the mesh of the run.

A function in the place of a model is called under the meta device, so that a model can be larger than the memory of one
member: layer after layer is made for real, cut, and its other parts are dropped. Its weights are then those that
`reset_parameters` gives, from the run's seed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from paceline.core.errors import ConfigError
from paceline.core.mesh import Mesh
from paceline.parallel.pieces import fill
from paceline.parallel.shard import shard
from paceline.strategies.replicas import make_equal
from paceline.transport.group import Group
from paceline.transport.torch_backend import with_torch
from paceline.transport.torch_group import TorchGroup


def device_mesh(mesh: Mesh, group: Group, device: torch.device) -> DeviceMesh:
    """The mesh as PyTorch knows it; all members call this."""
    if not isinstance(group, TorchGroup):
        with_torch(group)
    return init_device_mesh(device.type, tuple(mesh), mesh_dim_names=mesh._fields)


def cut_model(
    given: nn.Module | Callable[[], nn.Module], mesh: Mesh, group: Group, device: torch.device, seed: int
) -> nn.Module:
    """Cut a model, or what a function makes, in place."""
    if isinstance(given, nn.Module):
        model = given.to(device) if device.type == "cpu" else given
        make_equal(group, dict(model.named_parameters()), dict(model.named_buffers()))
    else:
        with torch.device("meta"):
            model = given()
        if not isinstance(model, nn.Module):
            raise ConfigError(f"run.model(function): it returned a {type(model).__name__}, not an nn.Module")
        _check_initialisers(model)
    where = device_mesh(mesh, group, device)
    if mesh.shard > 1:
        shard(model, where["shard"])
    if not isinstance(given, nn.Module):
        model.to_empty(device=device)
        _initialise(model, device, seed)
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
