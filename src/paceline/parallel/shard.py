"""Sharding: every tensor lies in parts on the members of a shard, and is put together when it is needed (ZeRO-3), by
PyTorch's `fully_shard`.

Layers that come several times (the elements of a ModuleList or Sequential) are put together one at a time; what is left
of the model, all at once.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from paceline.parallel.layers import layers


def shard(model: nn.Module, mesh: DeviceMesh, *, offload: bool = False) -> None:
    """Shard a model in place; `offload`: parts lie in host memory while they are not needed."""
    options: dict[str, Any] = {"mesh": mesh}
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    for layer in list(layers(model)):
        fully_shard(layer, **options)
    fully_shard(model, **options)
