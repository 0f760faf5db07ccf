"""Our collectives as a backend of torch.distributed, so that PyTorch's own parts (`fully_shard`, DTensor, pipelining)
run on the wires that the run has: shared memory on a host, authenticated and encrypted channels between hosts, every
wait limited.

    with_torch(group)            torch.distributed is initialised, and its default group is this one
    dist.all_reduce(tensor)      goes through it; groups that PyTorch makes are sub-groups of it

Collectives are done when they return, in the calling thread; what is sent from one member to another travels behind,
in the order in which it was asked for. Tensors on a GPU pass through host memory: where each member has one of its own,
NCCL is what the run takes instead.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from paceline.core.errors import ConfigError
from paceline.transport.group import Group

NAME = "paceline"
_OPERATIONS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "mean",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.PRODUCT: "product",
}
_run: Group | None = None  # the group of which PyTorch's are parts


def with_torch(group: Group) -> None:
    """Initialise torch.distributed on this group, unless it is so already; all members call this."""
    global _run
    if _run is group:
        return
    if dist.is_initialized():
        raise ConfigError(
            "torch.distributed is initialised already: leave init_process_group out of the script, the run does it"
        )
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _make, extended_api=True, devices=["cpu", "cuda"])
    _run = group
    dist.init_process_group(NAME, store=HashStore(), rank=group.rank, world_size=group.size)


def without_torch() -> None:
    """Undo it."""
    global _run
    if _run is not None and dist.is_initialized():
        dist.destroy_process_group()
    _run = None


def _make(wanted: Any, options: Any) -> OwnGroup:
    assert _run is not None
    ranks = list(wanted.global_ranks_in_group) or list(range(_run.size))
    whole = ranks == list(range(_run.size))
    group = _run if whole and wanted.group_id in ("", "0") else _run.subgroup(ranks, name=f"torch-{wanted.group_id}")
    assert group is not None
    return OwnGroup(group, wanted.timeout)


class _Done(dist.Work):
    """Something that is over: what it is about stands in `result`."""

    def __init__(self, result: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self._result = list(result)
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._future.set_result(self._result)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def result(self) -> list[torch.Tensor]:
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future


class _Behind(dist.Work):
    """Something that another thread does."""

    def __init__(self, task: Callable[[], object], limit_s: float) -> None:
        super().__init__()
        self._task, self._limit_s = task, limit_s
        self._over = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._task()
        except BaseException as error:
            self._error = error
        self._over.set()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        limit = timeout.total_seconds() or self._limit_s
        if not self._over.wait(limit):
            raise RuntimeError(f"what was to be sent or received did not come within {limit:g} s")
        if self._error:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._over.is_set()


_Base: Any = dist.ProcessGroup  # whose overloads differ between versions


class OwnGroup(_Base):  # type: ignore[misc]
    """A group of ours, as torch.distributed knows groups."""

    def __init__(self, group: Group, timeout: timedelta) -> None:
        super().__init__(group.rank, group.size)
        self._group = group
        self._name = ""
        self._limit_s = timeout.total_seconds()
        self._lanes: dict[tuple[str, int], queue.SimpleQueue[_Behind | None]] = {}  # by direction and peer

    # PyTorch 2.13 has other names for some of them.
    all_gather_single = lambda self, *given: self._allgather_base(*given)  # noqa: E731
    all_gather_single_coalesced = lambda self, *given: self.allgather_into_tensor_coalesced(*given)  # noqa: E731
    reduce_scatter_single = lambda self, *given: self._reduce_scatter_base(*given)  # noqa: E731
    reduce_scatter_single_coalesced = lambda self, *given: self.reduce_scatter_tensor_coalesced(*given)  # noqa: E731
    all_to_all_single = lambda self, *given: self.alltoall_base(*given)  # noqa: E731

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    # ---- what all do together

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> _Done:
        for tensor in tensors if self._group.size > 1 else ():
            self._group.all_reduce(tensor, _operation(opts))
        return _Done(tensors)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> _Done:
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> _Done:
        for tensor in tensors:
            self._group.broadcast(tensor, opts.rootRank)
        return _Done(tensors)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> _Done:
        for out, mine in zip(outputs, inputs):
            for place, row in zip(out, self._group.all_gather(mine)):
                place.copy_(row)
        return _Done([t for out in outputs for t in out])

    def _allgather_base(self, out: torch.Tensor, mine: torch.Tensor, opts: Any = None) -> _Done:
        if self._group.size == 1:  # where it lies: a device need not be waited for
            out.view(-1).copy_(mine.reshape(-1))
            return _Done([out])
        self._group.all_gather_into(mine, out.view(-1))
        return _Done([out])

    def allgather_into_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> _Done:
        for out, mine in zip(outputs, inputs):
            self._allgather_base(out, mine)
        return _Done(outputs)

    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None) -> _Done:
        for out, rows in zip(outputs, inputs):
            self._scatter_sum(out, torch.stack(rows), opts)
        return _Done(outputs)

    def _reduce_scatter_base(self, out: torch.Tensor, mine: torch.Tensor, opts: Any = None) -> _Done:
        self._scatter_sum(out, mine.view(self._group.size, *out.shape), opts)
        return _Done([out])

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> _Done:
        for out, mine in zip(outputs, inputs):
            self._reduce_scatter_base(out, mine, opts)
        return _Done(outputs)

    def _scatter_sum(self, out: torch.Tensor, rows: torch.Tensor, opts: Any) -> None:
        if self._group.size == 1:
            out.copy_(rows[0])
            return
        operation = _operation(opts)
        if operation not in ("sum", "mean"):
            whole = self._group.all_reduce(rows.clone(), operation)
            out.copy_(whole[self._group.rank])
            return
        apart = out.untyped_storage().data_ptr() != rows.untyped_storage().data_ptr()
        if apart and out.device.type == "cpu" and out.is_contiguous():
            self._group.reduce_scatter_into(rows, out.view(-1))
        else:
            out.copy_(self._group.reduce_scatter(rows.contiguous()))
        if operation == "mean":
            out.div_(self._group.size)

    def alltoall_base(
        self, out: torch.Tensor, mine: torch.Tensor, out_sizes: list[int], sizes: list[int], opts: Any = None
    ) -> _Done:
        count = self._group.size
        given = list(torch.split(mine, sizes or [len(mine) // count] * count))
        taken = list(torch.split(out, out_sizes or [len(out) // count] * count))
        return self.alltoall(taken, given, opts)

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> _Done:
        rank, size = self._group.rank, self._group.size
        outputs[rank].copy_(inputs[rank])
        sends = [self.send([inputs[other]], other, 0) for other in range(size) if other != rank]
        receives = [self.recv([outputs[other]], other, 0) for other in range(size) if other != rank]
        for work in [*sends, *receives]:
            work.wait()
        return _Done(outputs)

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> _Done:
        rows = self._group.gather(inputs[0], opts.rootRank)
        for place, row in zip(outputs[0] if rows else (), rows or ()):
            place.copy_(row)
        return _Done(inputs)

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> _Done:
        mine = self._group.scatter(inputs[0] if self._group.rank == opts.rootRank else None, opts.rootRank)
        outputs[0].copy_(mine)
        return _Done(outputs)

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> _Done:
        for tensor in tensors:
            whole = self._group.all_reduce(tensor.clone(), _operation(opts))
            if self._group.rank == opts.rootRank:
                tensor.copy_(whole)
        return _Done(tensors)

    def barrier(self, opts: Any = None) -> _Done:
        self._group.barrier()
        return _Done()

    # ---- from one to another

    def send(self, tensors: list[torch.Tensor], to: int, tag: int = 0) -> _Behind:
        mine = [tensor.detach() for tensor in tensors]
        return self._behind("to", to, lambda: _each(partial(self._group.send, to=to), mine))

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int = 0) -> _Behind:
        return self._behind("from", source, lambda: _each(lambda t: _fill(t, self._group.recv(source)), tensors))

    def _behind(self, direction: str, peer: int, task: Callable[[], object]) -> _Behind:
        lane = self._lanes.get((direction, peer))
        if lane is None:
            lane = self._lanes[direction, peer] = queue.SimpleQueue()
            threading.Thread(target=_work, args=(lane,), name=f"paceline-{direction}-{peer}", daemon=True).start()
        work = _Behind(task, self._limit_s)
        lane.put(work)
        return work

    def shutdown(self) -> None:
        for lane in self._lanes.values():
            lane.put(None)
        self._lanes.clear()

    def abort(self) -> None:
        self.shutdown()


def _work(lane: queue.SimpleQueue[_Behind | None]) -> None:
    while work := lane.get():
        work.run()


def _each(do: Callable[[torch.Tensor], None], tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        do(tensor)


def _fill(tensor: torch.Tensor, came: torch.Tensor) -> None:
    if came.shape != tensor.shape or came.dtype != tensor.dtype:
        raise RuntimeError(
            f"{came.dtype} of shape {tuple(came.shape)} came where {tensor.dtype} of {tuple(tensor.shape)} was due"
        )
    with torch.no_grad():
        tensor.copy_(came)


def _operation(opts: Any) -> str:
    wanted = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
    for operation, name in _OPERATIONS.items():
        if wanted == operation:
            return name
    raise ConfigError(f"{wanted}: allowed are {', '.join(_OPERATIONS.values())}")
