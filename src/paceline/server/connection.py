"""One worker's connection to one server: a channel for what is said, and on one host memory that both can read.

Each side gives memory that it alone writes: the worker its gradients, the server its weights. Through it no byte is
sent and none copied but by those who need it elsewhere.
"""

from __future__ import annotations

import os
import socket
import threading
from typing import Protocol

import torch

from paceline.core.errors import Interrupted, TimedOut
from paceline.transport.channel import Channel
from paceline.transport.local import Links
from paceline.transport.segment import Segment
from paceline.transport.wires import Wires


class Block:
    """Memory that this side writes, and that others of this host may be let read."""

    def __init__(self, nbytes: int) -> None:
        self._segment, self.descriptor = Segment.create(nbytes)
        self.data = self._segment.data

    def close(self) -> None:
        """Nobody else will be let read it; those who may go on."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class Memory(Protocol):
    """Memory between two sides, by name."""

    def give(self, name: str, block: Block) -> None:
        """Let the other side read a block."""

    def take(self, name: str, nbytes: int, limit_s: float) -> torch.Tensor:
        """The other side's, mine to read."""


class Connection:
    """One side's end. `rank` is the member at the other end; `life` tells it from the lost one that it replaces."""

    def __init__(self, rank: int, channel: Channel, memory: Memory | None, life: int = 0) -> None:
        self.rank = rank
        self.life = life
        self.channel = channel
        self.memory = memory

    def close(self) -> None:
        self.channel.close()


class LinkMemory:
    """Between two processes of one host."""

    def __init__(self, links: Links, rank: int, server: int) -> None:
        self._links = links
        self._rank = rank
        self._server = server

    def give(self, name: str, block: Block) -> None:
        self._links.give(self._rank, f"server-{self._server}/{name}", block.descriptor)

    def take(self, name: str, nbytes: int, limit_s: float) -> torch.Tensor:
        descriptor = self._links.take(self._rank, f"server-{self._server}/{name}", limit_s)
        return Segment(descriptor, nbytes, own=False).data


class SameProcess:
    """Between a worker and the shard that lives with it."""

    def __init__(self) -> None:
        self._given: dict[str, torch.Tensor] = {}
        self._changed = threading.Condition()

    def give(self, name: str, block: Block) -> None:
        with self._changed:
            self._given[name] = block.data
            self._changed.notify_all()

    def take(self, name: str, nbytes: int, limit_s: float) -> torch.Tensor:
        with self._changed:
            if not self._changed.wait_for(lambda: name in self._given, limit_s):
                raise TimedOut(f"no memory {name!r} within {limit_s:g} s")
            memory = self._given.pop(name)
        if memory.numel() != nbytes:
            raise Interrupted(f"memory {name!r} has {memory.numel()} bytes instead of {nbytes}")
        return memory


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor, where they lie."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy().data)


def connect(wires: Wires, rank: int, server: int, *, shared: bool = True) -> Connection:
    """This member's connection to another one, of which one is the server; both sides call this."""
    members = wires.view.members
    same = shared and members[rank].host == members[wires.rank].host
    memory = LinkMemory(wires.links, rank, server) if same else None
    return Connection(rank, wires.mesh.channel(rank, lane_of(server)), memory)


def lane_of(server: int) -> str:
    """The lane through which workers reach a server, by its rank."""
    return f"server-{server}"


def pair(rank: int, *, shared: bool = True) -> tuple[Connection, Connection]:
    """Both ends of a connection within one process."""
    memory = SameProcess() if shared else None
    ends = socket.socketpair()
    first, second = (Connection(rank, Channel(end, f"member {rank}"), memory) for end in ends)
    return first, second
