"""A group: some of the run's members, and the collectives between them.

On one host they go through shared memory, between hosts around a ring of channels; where several members share a host,
its first one speaks for it. The strategy uses `arena`; the rest is for users (`run.all_reduce(...)`) and for small talk
(`exchange`). All members of a group call the same collectives in the same order. Every wait is limited, and the end of
a member interrupts the others.

>>> import torch
>>> group = solo()
>>> group.all_reduce(torch.ones(2))
tensor([1., 1.])
>>> group.exchange(b"hello")
[b'hello']
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec
import torch

from paceline.core.errors import ConfigError, Interrupted, TimedOut
from paceline.transport.arena import Arena, CarriedArena, Scatters, StagedArena, Through
from paceline.transport.device_arena import DeviceArena
from paceline.transport.mesh import Fault
from paceline.transport.ring import Ring
from paceline.transport.shared import Shared
from paceline.transport.shared_arena import Background, SharedArena
from paceline.transport.traffic import Traffic
from paceline.transport.wires import Wires

OPERATIONS = ("sum", "mean", "max", "min", "product")


class Group:
    """Some members of a run. `rank` and every `root`, `to` and `source` count within the group."""

    def __init__(self, wires: Wires | None, ranks: Sequence[int], name: str = "run") -> None:
        self.ranks = tuple(ranks)
        self.name = name
        self.size = len(self.ranks)
        self._wires = wires
        self._children = 0
        self._arenas: list[Arena] = []
        self._beneath: dict[int, Ring | Shared] = {}  # what carries an arena, by its id
        self._past = (0, 0.0)  # bytes sent and seconds waited in arenas that were released
        self._subgroups: list[Group] = []
        self._rings: list[Ring] = []
        self._lanes: list[Shared] = []
        self._all: Ring | None = None
        self._local: Shared | None = None
        self._leaders: Ring | None = None
        self.rank = 0
        if wires is None or self.size == 1:
            return
        self.rank = self.ranks.index(wires.rank)
        self._hosts = [tuple(r for r in host if r in self.ranks) for host in wires.view.hosts()]
        self._hosts = [host for host in self._hosts if host]
        self._mine = next(host for host in self._hosts if wires.rank in host)
        if len(self._mine) > 1:
            self._local = self._shared(name)
        if len(self._hosts) > 1 and self._mine[0] == wires.rank:
            self._leaders = self._ring([host[0] for host in self._hosts], f"{name}/leaders")

    @property
    def speakers(self) -> list[int]:
        """Of each member, by rank, the one that exchanges gradients for it: the first of its host where there are
        several hosts, else itself."""
        own = list(range(self.size))
        if self.size > 1 and len(self._hosts) > 1:
            for host in self._hosts:
                for rank in host:
                    own[self.ranks.index(rank)] = self.ranks.index(host[0])
        return own

    @property
    def sent_bytes(self) -> int:
        """Bytes of this member's that others have read, over all collectives and arenas of this group."""
        every = (self._local, *self._beneath.values(), *self._lanes)
        shared = sum(s.sent_bytes for s in every if isinstance(s, Shared))
        return shared + self._past[0] + sum(a.sent_bytes for a in self._arenas) + sum(r.sent_bytes for r in self._rings)

    @property
    def waited_s(self) -> float:
        """Seconds that the training thread has waited for others in arenas and shared memory."""
        shared = self._local.waited_s if self._local else 0.0
        return shared + self._past[1] + sum(a.waited_s for a in self._arenas)

    def traffic(self) -> dict[int, Traffic]:
        """By rank: what this member has sent to those of other hosts with whom it exchanges gradients."""
        found: dict[int, Traffic] = {}
        for ring in [r for r in self._rings if r is not self._all]:
            for rank, sent in ring.traffic().items():
                at = self.ranks.index(rank)
                found[at] = found.get(at, Traffic()).plus(sent)
        return found

    def arena(
        self,
        nbytes: int,
        device: torch.device | None = None,
        through: Through | None = None,
        *,
        apart: bool = False,
    ) -> Arena:
        """Memory for buckets, opened by all members together; see `paceline.transport.arena`.

        Args:
            through: makes the reduction between hosts, from the collectives of their first members. Where all members
                share one host, it is made from the collectives of all of them.
            apart: with `through`, members of one host are not summed first: it is made from the collectives of all.
        """
        wires = self._need_wires()
        self._children += 1
        name = f"{self.name}/gradients-{self._children}"
        arena: Arena
        beneath: Ring | Shared | None = None
        if len(self._hosts) > 1 and apart:
            beneath = self._ring(self.ranks, name)
        elif len(self._hosts) > 1 and self._mine[0] == wires.rank:
            beneath = self._ring([host[0] for host in self._hosts], name)
        elif through and len(self._hosts) == 1:
            beneath = self._shared(name)
        outer = (through(beneath) if through else beneath.all_reduce) if beneath else None
        if outer and (apart or len(self._mine) == 1 or len(self._hosts) == 1):
            cuda = device if through and device is not None and device.type == "cuda" else None
            arena = DeviceArena(outer, name, nbytes, cuda) if cuda else CarriedArena(outer, name, nbytes)
        else:
            inner = SharedArena(
                wires.links,
                self._mine,
                name,
                nbytes,
                limit_s=wires.limit_s,
                status=wires.status,
                outer=outer,
                hierarchical=len(self._hosts) > 1,
            )
            arena = Background(inner, name) if self._core_to_spare(device) else inner
        if device is not None and arena.memory.device.type != device.type:
            arena = StagedArena(arena, device)
        self._arenas.append(arena)
        if beneath:
            self._beneath[id(arena)] = beneath
        return arena

    def release(self, arena: Arena) -> None:
        """Give up an arena and what carries it. Its memory goes when nobody holds a part of it any more."""
        arena.close()
        self._arenas.remove(arena)
        beneath = self._beneath.pop(id(arena), None)
        sent = arena.sent_bytes + (beneath.sent_bytes if beneath else 0)
        self._past = (self._past[0] + sent, self._past[1] + arena.waited_s)
        if isinstance(beneath, Ring):
            self._rings.remove(beneath)
            beneath.close()

    def lane(self) -> Scatters:
        """The collectives of all members over channels and memory of their own, opened by all together, for a thread
        beside those that use the group."""
        self._children += 1
        name = f"{self.name}/lane-{self._children}"
        if len(self._hosts) > 1:
            return self._ring(self.ranks, name)
        self._lanes.append(self._shared(name))
        return self._lanes[-1]

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Reduce over the members, in place: sum, mean, max, min or product."""
        if op not in OPERATIONS:
            raise ConfigError(f"unknown operation {op!r}: known are {', '.join(OPERATIONS)}")
        if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
            raise ConfigError(f"the mean of {tensor.dtype} is no {tensor.dtype}: convert it first, or take the sum")
        if self.size == 1:
            return tensor
        if op in ("max", "min", "product"):
            stacked = torch.stack(self.all_gather(tensor.detach()))
            result = stacked.prod(0) if op == "product" else stacked.amax(0) if op == "max" else stacked.amin(0)
            with torch.no_grad():
                return tensor.copy_(result)
        flat = flat_of(tensor)
        try:
            if self._local:
                self._local.all_reduce(flat)
            if self._leaders:
                self._leaders.all_reduce(flat)
            if self._local and len(self._hosts) > 1:
                self._local.broadcast(flat, 0)
        except Interrupted as error:
            self.abort(error)
            raise
        restore(tensor, flat)
        with torch.no_grad():
            return tensor.div_(self.size) if op == "mean" else tensor

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Everyone's tensor, in the order of ranks; all have the same shape."""
        if self.size == 1:
            return [tensor.clone()]
        flat = flat_of(tensor)
        out = torch.empty(self.size * flat.numel(), dtype=flat.dtype)
        (self._local if len(self._hosts) == 1 and self._local else self._everyone()).all_gather(flat, out)
        rows = out.view(self.size, *tensor.shape).to(tensor.device)
        return list(rows.unbind(0))

    def all_gather_into(self, flat: torch.Tensor, out: torch.Tensor) -> None:
        """Put everyone's flat tensor, all of one length, into `out`, in the order of ranks; it may be a part of it."""
        if self.size == 1:
            out.copy_(flat)
            return
        host = out if out.device.type == "cpu" else torch.empty(out.shape, dtype=out.dtype)
        (self._local if len(self._hosts) == 1 and self._local else self._everyone()).all_gather(flat_of(flat), host)
        if host is not out:
            out.copy_(host)

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        """My row of the sum of everyone's tensor, whose first dimension is the size of the group."""
        if tensor.shape[:1] != (self.size,):
            raise ConfigError(f"reduce_scatter wants a first dimension of {self.size}, got shape {tuple(tensor.shape)}")
        if self.size == 1:
            return tensor[0].clone()
        out = torch.empty(tensor.numel() // self.size, dtype=tensor.dtype)
        self.reduce_scatter_into(tensor, out)
        return out.view(tensor.shape[1:]).to(tensor.device)

    def reduce_scatter_into(self, tensor: torch.Tensor, out: torch.Tensor) -> None:
        """The same into `out`, flat and in host memory, which needs no more memory than that."""
        lane = self._local if len(self._hosts) == 1 and self._local else self._everyone()
        lane.reduce_scatter(flat_of(tensor), out)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
        """Everyone's tensor becomes the root's, in place."""
        self._check(root)
        if self.size == 1:
            return tensor
        flat = flat_of(tensor)
        if len(self._hosts) == 1 and self._local:
            self._local.broadcast(flat, root)
        else:
            self._everyone().broadcast(flat, self.ranks[root])
        return restore(tensor, flat)

    def gather(self, tensor: torch.Tensor, root: int = 0) -> list[torch.Tensor] | None:
        """Everyone's tensor on the root, None elsewhere; shapes may differ."""
        self._check(root)
        if self.rank != root:
            self.send(tensor, root)
            return None
        return [tensor.clone() if r == root else self.recv(r).to(tensor.device) for r in range(self.size)]

    def scatter(self, tensors: Sequence[torch.Tensor] | None, root: int = 0) -> torch.Tensor:
        """One of the root's tensors for each member; the others pass None."""
        self._check(root)
        if self.rank != root:
            return self.recv(root)
        if tensors is None or len(tensors) != self.size:
            raise ConfigError(f"scatter wants {self.size} tensors on the root")
        for r, tensor in enumerate(tensors):
            if r != root:
                self.send(tensor, r)
        return tensors[root].clone()

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send a tensor to one member, which must `recv` it."""
        wires = self._need_wires()
        self._check(to, other=True)
        flat = flat_of(tensor)
        head = msgspec.msgpack.encode((str(tensor.dtype).removeprefix("torch."), list(tensor.shape)))
        channel = wires.mesh.channel(self.ranks[to], f"{self.name}/direct")
        channel.send(head)
        channel.send(_bytes(flat))

    def recv(self, source: int) -> torch.Tensor:
        """The next tensor that a member sends to this one."""
        wires = self._need_wires()
        self._check(source, other=True)
        channel = wires.mesh.channel(self.ranks[source], f"{self.name}/direct")
        return _unpack(channel.recv(wires.limit_s), channel.recv(wires.limit_s))

    def barrier(self) -> None:
        """Return when all members have come here."""
        if self.size > 1:
            self.all_reduce(torch.zeros(1))

    def exchange(self, data: bytes) -> list[bytes]:
        """Everyone's bytes, in the order of ranks; lengths may differ."""
        if self.size == 1:
            return [data]
        lengths = [int(n) for n in self.all_gather(torch.tensor([len(data)]))]
        padded = torch.zeros(max(*lengths, 1), dtype=torch.uint8)
        if data:
            padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return [row[:n].numpy().tobytes() for row, n in zip(self.all_gather(padded), lengths)]

    def subgroup(self, ranks: Sequence[int], name: str = "") -> Group | None:
        """A group of some of these members; None where this one is not among them.

        All members call this, so that they agree on its name; with a name of its own, those who are in it do.
        """
        for rank in ranks:
            self._check(rank)
        self._children += not name
        if self.rank not in ranks:
            return None
        chosen = [self.ranks[r] for r in sorted(set(ranks))]
        group = Group(self._wires, chosen, f"{self.name}/{name or f'group-{self._children}'}")
        self._subgroups.append(group)
        return group

    def abort(self, error: Interrupted) -> None:
        """Tell the members of other hosts why an operation of this group broke here; they break off too."""
        if self._wires is None:
            return
        reason = "did not arrive" if isinstance(error, TimedOut) else "left the run"
        rank = self._wires.rank if error.rank is None else error.rank
        for ring in self._rings:
            self._wires.mesh.tell(ring.lane, Fault(rank, reason, isinstance(error, TimedOut)), ring.ranks)

    def close(self) -> None:
        """End what works for this group and its sub-groups."""
        for group in self._subgroups:
            group.close()
        for arena in self._arenas:
            arena.close()
        for ring in self._rings:
            ring.close()

    def _shared(self, name: str) -> Shared:
        wires = self._need_wires()
        pids = [wires.view.members[r].pid for r in self._mine]
        return Shared(wires.links, self._mine, pids, name, limit_s=wires.limit_s, status=wires.status)

    def _ring(self, ranks: Sequence[int], lane: str) -> Ring:
        ring = Ring(self._need_wires().mesh, ranks, lane)
        self._rings.append(ring)
        return ring

    def _core_to_spare(self, device: torch.device | None) -> bool:
        """Whether every member of this host can have a core for reductions besides those it computes on."""
        computing = 0 if device is not None and device.type == "cuda" else torch.get_num_threads()
        return len(os.sched_getaffinity(0)) >= len(self._mine) * (computing + 1)

    def _everyone(self) -> Ring:
        """A ring of all members, for what has no way through shared memory."""
        if self._all is None:
            self._all = self._ring(self.ranks, f"{self.name}/all")
        return self._all

    def _need_wires(self) -> Wires:
        if self._wires is None:
            raise ConfigError("this run has one member: there is nobody to send to or receive from")
        return self._wires

    def _check(self, rank: int, *, other: bool = False) -> None:
        if not 0 <= rank < self.size or (other and rank == self.rank):
            others = "another member, " if other else ""
            raise ConfigError(f"no such member: {rank}; allowed are {others}0 to {self.size - 1}")


def solo() -> Group:
    """The group of a run of one."""
    return Group(None, (0,))


def flat_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu").contiguous().view(-1)


def restore(tensor: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """Put the result where the caller expects it, unless it is there already."""
    if tensor.device.type == "cpu" and tensor.data_ptr() == flat.data_ptr() and tensor.is_contiguous():
        return tensor
    with torch.no_grad():
        return tensor.copy_(flat.view(tensor.shape))


def _bytes(flat: torch.Tensor) -> memoryview:
    return memoryview(flat.view(torch.uint8).numpy().data)


def _unpack(head: bytearray, body: bytearray) -> torch.Tensor:
    try:
        name, shape = msgspec.msgpack.decode(head, type=tuple[str, list[int]])
        dtype = getattr(torch, name)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"no such dtype: {name}")
        flat = torch.frombuffer(body, dtype=dtype) if body else torch.empty(0, dtype=dtype)
        return flat.view(shape)
    except (msgspec.DecodeError, AttributeError, ValueError, RuntimeError) as error:
        raise Interrupted(f"a member sent a tensor that cannot be read: {error}") from None
