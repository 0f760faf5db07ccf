"""Cutting a model into stages: follow it, choose where, keep this member's layers.

The first member measures and chooses; all others follow. Of a model that a function makes, each member gets memory and
weights for its own layers only; with shards, for its parts of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh

from paceline.core.errors import ConfigError
from paceline.core.mesh import Mesh
from paceline.parallel.along import along
from paceline.parallel.balance import balanced, by_name, costs_of, layers_of, nbytes_of
from paceline.parallel.history import History
from paceline.parallel.outline import initialise, to_memory
from paceline.parallel.pipeline import Pipeline, staged
from paceline.parallel.post import Post
from paceline.parallel.schedule import Staging, stages_each
from paceline.parallel.shard import shard_calls
from paceline.parallel.stages import Layout, in_stages, prune
from paceline.parallel.trace import Followed, follow
from paceline.transport.group import Group


def stage(
    model: nn.Module,
    how: Staging,
    mesh: Mesh,
    group: Group,
    device: torch.device,
    seed: int,
    sharded: DeviceMesh | None,
    *,
    offload: bool = False,
    history: History | None = None,
) -> None:
    """Leave in a model the stages of this member, in place; `history`: of a model that has no memory yet."""
    _check(how, mesh, offload)
    count = mesh.stage * stages_each(how.schedule)
    found = follow(model)
    runs = layers_of(found.graph, model)
    if len(runs) < count:  # lists with few elements
        found = follow(model, deep=True)
        runs = layers_of(found.graph, model)
    if len(runs) < count or not nbytes_of(runs[0], model):
        raise ConfigError(
            f"--mesh stage={mesh.stage}, schedule {how.schedule!r}: {count} stages need as many layers with weights, "
            f"and {len(runs)} were found: take fewer stages"
        )
    begins = _begins(how, runs, found, model, count, group, device)
    stages = in_stages(found.graph, runs, begins, model)
    layout = Layout(model, stages, mesh.stage)
    member = mesh.at(group.rank)["stage"]
    modules = {n: found.module(model, s.graph) for n, s in enumerate(stages) if n % mesh.stage == member}
    _take(model, modules, layout, member, device, sharded, offload=offload, outlined=history is not None)
    for module in modules.values() if history else ():  # which have lost what they had
        for name, constant in found.constants.items():
            if name in module._buffers:
                module._buffers[name] = constant.to(device)
    if history:
        initialise(model, history, torch.device("cpu") if offload else device, seed)
    prune(model, layout, member)
    mine, letters = (along(mesh, group, "stage") for _ in range(2))
    names = [str(node.target) for node in found.graph.nodes if node.op == "placeholder"]
    post = Post(letters, how.limit_s, device)
    staged(model, Pipeline(stages, modules, layout, mine, post, how=how, device=device, names=names))


def _check(how: Staging, mesh: Mesh, offload: bool) -> None:
    how.check()
    if offload and mesh.shard == 1:
        raise ConfigError("run.model(offload='parameters'): parts lie in host memory where there are: --mesh shard=2")
    if how.schedule == "zero-bubble" and mesh.shard > 1:
        raise ConfigError(
            f"--mesh {mesh.words} with schedule 'zero-bubble': it computes backward passes in halves, and shards send "
            "gradients at the end of each: take '1f1b' or 'interleaved'"
        )


def _begins(
    how: Staging,
    runs: Sequence[Sequence[fx.Node]],
    found: Followed,
    model: nn.Module,
    count: int,
    group: Group,
    device: torch.device,
) -> list[int]:
    """The runs of nodes with which stages begin, as the first member has chosen."""
    if how.cut:
        return by_name(runs, how.cut, count)
    mine: list[int] = []
    if group.rank == 0:
        like = () if how.like is None else how.like if isinstance(how.like, tuple | list) else (how.like,)
        mine = balanced(costs_of(runs, found, model, like, device), count)
    return msgspec.msgpack.decode(group.exchange(msgspec.msgpack.encode(mine))[0], type=list[int])


def _take(
    model: nn.Module,
    modules: dict[int, fx.GraphModule],
    layout: Layout,
    member: int,
    device: torch.device,
    sharded: DeviceMesh | None,
    *,
    offload: bool,
    outlined: bool,
) -> None:
    """Bring this member's layers to its device, sharded if there are shards, and link the model to what they became."""
    home = torch.device("cpu") if offload else device
    for module in modules.values():
        if sharded is not None:
            shard_calls(module, sharded, offload=offload)
        if outlined:
            to_memory(module, home)
        elif sharded is None:
            module.to(device)
        for name, p in module.named_parameters(remove_duplicate=False):
            for alias in layout.aliases[name]:
                owner, _, own = alias.rpartition(".")
                model.get_submodule(owner)._parameters[own] = p
        for name, b in module.named_buffers(remove_duplicate=False):
            for alias in layout.aliases.get(name, ()):  # none for constants of the graph
                owner, _, own = alias.rpartition(".")
                model.get_submodule(owner)._buffers[own] = b
    for path, part in model.named_modules(remove_duplicate=False):  # what no stage uses
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is None or not layout.holds(member, f"{path}.{name}" if path else name):
                    continue
                if tensor.is_meta:
                    made = torch.empty_like(tensor, device=home)
                    tensors[name] = nn.Parameter(made, tensor.requires_grad) if tensors is part._parameters else made
                elif tensor.device.type != home.type and not hasattr(tensor, "_local_tensor"):
                    tensors[name] = (
                        nn.Parameter(tensor.to(home), tensor.requires_grad)
                        if tensors is part._parameters
                        else tensor.to(home)
                    )
