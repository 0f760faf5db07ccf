"""`run.model(model)`: this member's part of a model, by the mesh of the run."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from paceline.core.errors import ConfigError
from paceline.core.mesh import Mesh
from paceline.parallel.fellows import Fellows
from paceline.parallel.layers import recompute_layers
from paceline.parallel.outline import initialise, outline, to_memory
from paceline.parallel.pieces import is_cut
from paceline.parallel.pipeline import pipeline_of
from paceline.parallel.plan_of_split import Plan, chosen
from paceline.parallel.schedule import Staging
from paceline.parallel.shard import shard
from paceline.parallel.split import split_model
from paceline.parallel.staging import stage
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
    given: nn.Module | Callable[[], nn.Module],
    mesh: Mesh,
    group: Group,
    device: torch.device,
    seed: int,
    *,
    recompute: bool = False,
    offload: bool = False,
    staging: Staging | None = None,
    split: Plan | None = None,
    sequence: bool = False,
) -> nn.Module:
    """Cut a model, or what a function makes, in place; see `Run.model`."""
    history = None
    if isinstance(given, nn.Module):
        if pipeline_of(given) or any(is_cut(p) for p in given.parameters()):
            raise ConfigError("run.model(model): this model is cut already; cut a model once, and keep what it returns")
        model = given.to(device) if device.type == "cpu" else given
        make_equal(group, dict(model.named_parameters()), dict(model.named_buffers()))
    else:
        model, history = outline(given)
    if split and mesh.split == 1:
        chosen(model, split)  # what is wrong with it is told on any mesh
    if mesh.stage > 1:
        if recompute:
            recompute_layers(model)
        sharded = device_mesh(mesh, group, device)["shard"] if mesh.shard > 1 else None
        stage(model, staging or Staging(), mesh, group, device, seed, sharded, offload=offload, history=history)
        return model
    where = device_mesh(mesh, group, device)
    parts = None
    if mesh.split > 1:
        parts = split_model(model, where, split, sequence=sequence, apart=recompute or mesh.shard > 1)
    if recompute:
        recompute_layers(model)
    if mesh.shard > 1 or parts is None:
        shard(model, where["shard"], offload=offload)
    home = torch.device("cpu") if offload else device
    if history:
        to_memory(model, home)
    if parts:
        parts.finish(model, Fellows(where["shard"].get_group()) if mesh.shard > 1 else None)
    if history:
        initialise(model, history, home, seed)
    return model
