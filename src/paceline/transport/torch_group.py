"""Collectives by torch.distributed: NCCL for members with a GPU each, gloo where our own transport is not wanted.

The process group is formed beside the wires, through a store on the first member, and serves the tensors that its
backend can carry; everything else goes the ordinary way.
"""

from __future__ import annotations

import datetime
import socket
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from paceline.core.errors import ConfigError, Interrupted
from paceline.transport.arena import Arena, Kept, Through
from paceline.transport.group import Group
from paceline.transport.wires import Wires


class TorchGroup(Group):
    """All members of a run, with `backend` ("nccl" or "gloo") for the tensors of `device`."""

    def __init__(self, wires: Wires, ranks: Sequence[int], backend: str, device: torch.device) -> None:
        super().__init__(wires, ranks)
        if backend == "nccl" and not (dist.is_nccl_available() and device.type == "cuda"):
            raise ConfigError("transport 'nccl' needs CUDA and a torch build with NCCL; use --transport auto")
        if dist.is_initialized():
            raise ConfigError(
                "torch.distributed is initialised already: leave init_process_group out of the script, "
                "or choose another transport"
            )
        self.backend = backend
        self._kind = device.type
        limit = datetime.timedelta(seconds=wires.limit_s)
        host = wires.view.members[self.ranks[0]].address.rsplit(":", 1)[0].strip("[]")
        store = None
        if self.rank == 0:
            store = TCPStore(host, 0, self.size, is_master=True, wait_for_workers=False, timeout=limit)
        port = int(self.exchange(str(store.port).encode() if store else b"")[0])
        if store is None:
            store = TCPStore(host, port, self.size, is_master=False, timeout=limit)
        dist.init_process_group(
            backend,
            store=store,
            rank=self.rank,
            world_size=self.size,
            timeout=limit,
            device_id=device if backend == "nccl" else None,
        )

    def arena(
        self,
        nbytes: int,
        device: torch.device | None = None,
        through: Through | None = None,
        *,
        apart: bool = False,
    ) -> Arena:
        device = device or torch.device("cpu")
        if device.type != self._kind or through:
            return super().arena(nbytes, device, through, apart=apart)
        arena = _TorchArena(nbytes, device)
        self._arenas.append(arena)
        return arena

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        if tensor.device.type != self._kind or op not in ("sum", "mean"):
            return super().all_reduce(tensor, op)
        dist.all_reduce(tensor)
        return tensor.div_(self.size) if op == "mean" else tensor

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
        if tensor.device.type != self._kind:
            return super().broadcast(tensor, root)
        dist.broadcast(tensor, root)
        return tensor

    def all_gather_into(self, flat: torch.Tensor, out: torch.Tensor) -> None:
        if flat.device.type != self._kind:
            super().all_gather_into(flat, out)
        else:
            dist.all_gather_into_tensor(out, flat)

    def close(self) -> None:
        super().close()
        if dist.is_initialized():
            dist.destroy_process_group()


class _TorchArena:
    """Buckets reduced by torch.distributed, asynchronously, in the order posted."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self._works: list[dist.Work] = []
        self.waited_s = 0.0
        self.sent_bytes = 0

    def own(self, flat: torch.Tensor) -> slice:
        return slice(0, 0)

    def post(self, flat: torch.Tensor, kept: Sequence[Kept] = ()) -> None:
        work = dist.all_reduce(flat, async_op=True)
        if work is not None:
            self._works.append(work)
        size = dist.get_world_size()
        self.sent_bytes += flat.nbytes * 2 * (size - 1) // size

    def progress(self) -> None:
        pass

    def wait(self) -> None:
        began = time.monotonic()
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise Interrupted(f"torch.distributed: {error}") from None
        finally:
            self._works.clear()
            self.waited_s += time.monotonic() - began

    def close(self) -> None:
        pass


def own_gpu_each(group: Group, device: torch.device) -> bool:
    """Whether every member has a GPU of its own, as NCCL requires."""
    mine = ""
    if device.type == "cuda":
        mine = f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}"
    everyone = group.exchange(mine.encode())
    return b"" not in everyone and len(set(everyone)) == len(everyone)
