"""Sharding: every tensor lies in parts on the members of a shard, and is put together when it is needed (ZeRO-3), by
PyTorch's `fully_shard`.

Layers that come several times (the elements of a ModuleList or Sequential) are put together one at a time; what is left
of the model, all at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from paceline.parallel.layers import layers


def shard(model: nn.Module, mesh: DeviceMesh, *, dtype: torch.dtype | None = None, offload: bool = False) -> None:
    """Shard a model in place.

    Args:
        dtype: what is computed in; parameters stay as they are.
        offload: parts lie in host memory, and are copied to the device when they are needed.
    """
    options: dict[str, Any] = {"mesh": mesh}
    if dtype:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    for layer in list(layers(model)):
        fully_shard(layer, **options)
    fully_shard(model, **options)
