"""What the parent and its replicas say to each other, and the line on which they say it.

A line is a pair of Unix sockets that the replica inherits: nobody else can reach it. Messages are msgpack with their
length in front; nothing is pickled. Connections that the parent has accepted travel on a second pair, as descriptors.
"""

from __future__ import annotations

import asyncio
import socket
from typing import TypeAlias

import msgspec

from paceline.serve.counts import Counts

_MOST_BYTES = 64 << 20


class Ready(msgspec.Struct, frozen=True, tag=True):
    """From a replica: it is warm and answers."""

    said: str  # how it computes, for the one who started it


class Failed(msgspec.Struct, frozen=True, tag=True):
    """From a replica: it cannot serve this model, and why."""

    why: str


class Closed(msgspec.Struct, frozen=True, tag=True):
    """From a replica: one of its connections has ended."""


class Told(msgspec.Struct, frozen=True, tag=True):
    """From a replica: its counts."""

    number: int
    counts: Counts


class Ask(msgspec.Struct, frozen=True, tag=True):
    """From a replica, for one who asked over HTTP: an order to the keeper, or what only the parent knows."""

    number: int
    what: str
    version: int | None = None


class Learn(msgspec.Struct, frozen=True, tag=True):
    """From a replica, for one who posted them: samples for the run, packed."""

    number: int
    samples: list[bytes]


class Tell(msgspec.Struct, frozen=True, tag=True):
    """From the parent: send your counts."""

    number: int


class Reply(msgspec.Struct, frozen=True, tag=True):
    """From the parent: the answer to Ask or Learn."""

    number: int
    status: int
    kind: str
    body: bytes


class Drain(msgspec.Struct, frozen=True, tag=True):
    """From the parent: finish what is under way, then end."""


Upward: TypeAlias = Ready | Failed | Closed | Told | Ask | Learn
Downward: TypeAlias = Tell | Reply | Drain
_encode = msgspec.msgpack.Encoder().encode
_UPWARD: msgspec.msgpack.Decoder[Upward] = msgspec.msgpack.Decoder(Upward)
_DOWNWARD: msgspec.msgpack.Decoder[Downward] = msgspec.msgpack.Decoder(Downward)


class Line:
    """One end; `receive` and the two forms of it return None when the other end is gone."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, end: socket.socket) -> Line:
        end.setblocking(False)
        return cls(*await asyncio.open_unix_connection(sock=end))

    def send(self, message: Upward | Downward) -> None:
        """Never waits: the other end reads all the time, or is gone."""
        data = _encode(message)
        if not self._writer.is_closing():
            self._writer.write(len(data).to_bytes(4, "little") + data)

    async def from_replica(self) -> Upward | None:
        data = await self._receive()
        return None if data is None else _UPWARD.decode(data)

    async def from_parent(self) -> Downward | None:
        data = await self._receive()
        return None if data is None else _DOWNWARD.decode(data)

    def close(self) -> None:
        self._writer.close()

    async def _receive(self) -> bytes | None:
        try:
            size = int.from_bytes(await self._reader.readexactly(4), "little")
            return await self._reader.readexactly(size) if size <= _MOST_BYTES else None
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
