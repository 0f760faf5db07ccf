"""Sharding: every tensor lies in parts on the members of a shard, and is put together when it is needed (ZeRO-3), by
PyTorch's `fully_shard`.

Layers that come several times (the elements of a ModuleList or Sequential) are put together one at a time; what is left
of the model, all at once.
"""

from __future__ import annotations

from typing import Any

from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from paceline.parallel.layers import SMALL, layers


def shard(model: nn.Module, mesh: DeviceMesh, *, offload: bool = False) -> None:
    """Shard a model in place; `offload`: parts lie in host memory while they are not needed."""
    options = _options(mesh, offload)
    for layer in list(layers(model)):
        fully_shard(layer, **options)
    fully_shard(model, **options)


def shard_calls(stage: fx.GraphModule, mesh: DeviceMesh, *, offload: bool = False) -> None:
    """Shard one stage of a model: the modules that it calls one at a time, what is left of it all at once."""
    options = _options(mesh, offload)
    for name in dict.fromkeys(str(node.target) for node in stage.graph.nodes if node.op == "call_module"):
        layer = stage.get_submodule(name)
        if sum(p.numel() for p in layer.parameters()) >= SMALL:
            fully_shard(layer, **options)
    fully_shard(stage, **options)


def _options(mesh: DeviceMesh, offload: bool) -> dict[str, Any]:
    options: dict[str, Any] = {"mesh": mesh}
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    return options
