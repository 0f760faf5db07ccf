"""Sharding: every tensor lies in parts on the members of a shard, and is put together when it is needed (ZeRO-3), by
PyTorch's `fully_shard`.

Layers that come several times (the elements of a ModuleList or Sequential) are put together one at a time; what is left
of the model, all at once. So is a layer that shares a tensor with anything else, which `fully_shard` refuses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from paceline.parallel.layers import SMALL, layers


def shard(model: nn.Module, mesh: DeviceMesh, *, offload: bool = False) -> None:
    """Shard a model in place; `offload`: parts lie in host memory while they are not needed."""
    options = _options(mesh, offload)
    for layer in alone(model, layers(model)):
        fully_shard(layer, **options)
    fully_shard(model, **options)


def shard_calls(stage: fx.GraphModule, mesh: DeviceMesh, *, offload: bool = False) -> None:
    """Shard one stage of a model: the modules that it calls one at a time, what is left of it all at once."""
    options = _options(mesh, offload)
    called = [stage.get_submodule(str(node.target)) for node in stage.graph.nodes if node.op == "call_module"]
    for layer in alone(stage, (m for m in called if sum(p.numel() for p in m.parameters()) >= SMALL)):
        fully_shard(layer, **options)
    fully_shard(stage, **options)


def alone(model: nn.Module, found: Iterable[nn.Module]) -> list[nn.Module]:
    """Of these layers of a model, each once, those that share no tensor with another or with what stands around them.

    >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    >>> model[2].weight = model[0].weight
    >>> alone(model, model) == [model[1]]
    True
    """
    each = list(dict.fromkeys(found))
    inside = {module for layer in each for module in layer.modules()}
    around = [p for module in model.modules() if module not in inside for p in module.parameters(recurse=False)]
    homes = Counter({id(p) for p in around}) + Counter(id(p) for layer in each for p in layer.parameters())
    return [layer for layer in each if all(homes[id(p)] == 1 for p in layer.parameters())]


def _options(mesh: DeviceMesh, offload: bool) -> dict[str, Any]:
    options: dict[str, Any] = {"mesh": mesh}
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    return options
