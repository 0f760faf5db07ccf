"""What one server holds of a worker's table: its chunks, filled from gradients and emptied into parameters.

Part of the client: a `Part` says what goes to its server and takes in what comes back, in the threads of its `Port`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch

from paceline.codecs import PayloadError
from paceline.core.errors import Interrupted
from paceline.server import messages as m
from paceline.server.connection import Block
from paceline.server.packing import Packer, add, most
from paceline.server.placement import Chunk, Piece, dtype_of
from paceline.server.stock import offsets, room
from paceline.transport.group import flat_of

if TYPE_CHECKING:
    from paceline.server.client import Table
    from paceline.server.port import Port


class Slot:
    """A parameter, as flat memory on the CPU: its own where it is such, else a copy.

    `apart`: a copy in any case, into which nothing is written but what comes from servers.
    """

    def __init__(self, parameter: torch.Tensor, *, apart: bool = False) -> None:
        self.parameter = parameter
        p = parameter.detach()
        direct = not apart and p.device.type == "cpu" and p.is_contiguous()
        self.flat = p.view(-1) if direct else p.to("cpu", copy=True).contiguous().view(-1)
        self._direct = direct

    def refresh(self) -> None:
        if not self._direct:
            self.flat.copy_(self.parameter.detach().reshape(-1))

    def install(self) -> None:
        if not self._direct:
            self.parameter.detach().copy_(self.flat.view(self.parameter.shape))


class Part:
    """What one server holds of a table."""

    def __init__(self, table: Table, port: Port, chunks: list[Chunk], packer: Packer | None) -> None:
        self.port = port
        self.packer = packer
        self.dropped = False  # the push under way
        self.reason = ""  # why it was
        self.age = 0  # of the last push
        self.chunks = chunks
        self.version = 0
        self.clock = 0
        self.round = 0
        self.states: dict[tuple[int, int, int, str], Any] = {}
        self._table = table
        self._places = offsets(chunks)
        self._staging = torch.empty(max((c.nbytes for c in chunks), default=0), dtype=torch.uint8)
        self._arriving = torch.empty_like(self._staging)
        self.shared = port.memory is not None and bool(chunks)
        self._block: Block | None = None
        self._weights: torch.Tensor | None = None
        self._fresh: set[int] = set()  # chunks that are still to come
        self._done: Future[None] | None = None
        port.parts[table.number] = self

    def open(self, message: m.Open) -> Future[None]:
        def work() -> None:
            self.port.say(message)
            if self.shared:
                assert self.port.memory
                self._block = Block(room(self.chunks))
                self.port.memory.give(f"in-{message.table}", self._block)
                self._block.close()

        return self._begin(work)

    def opened(self, message: m.Opened) -> None:
        self.version, self.clock = message.version, message.step
        if self.shared:
            assert self.port.memory
            name = f"out-{message.table}"
            self._weights = self.port.memory.take(name, room(self.chunks), self.port.limit_s)
        self._finish()

    def store(self) -> Future[None]:
        def work() -> None:
            for index, chunk in enumerate(self.chunks):
                body = self._gather(chunk, [slot.flat for slot in self._table.slots], self._staging)
                self.port.say(m.Store(table=self._table.number, chunk=index, nbytes=chunk.nbytes), body)
            self.port.say(m.Pull(self._table.number))  # what comes back says that it is done

        return self._begin(work, chunks=True)

    def pull(self) -> Future[None]:
        return self._begin(lambda: self.port.say(m.Pull(self._table.number)), chunks=True)

    def settle(self) -> None:
        """A push is over, here too: what was dropped is unsaid."""
        if self.packer:
            self.packer.end(dropped=self.dropped)
        self.dropped = False

    def push(
        self,
        head: m.Push,
        gradients: Sequence[torch.Tensor | None],
        begun: threading.Event | None = None,
        there: int = 0,
    ) -> Future[None]:
        """Send gradients. `begun` is set when a chunk has gone to the first server; the others get theirs after it.

        The first chunks, so many as are `there`, have them already, by a worker that was lost: they get none.
        """

        def work() -> None:
            if begun and self.port.server:
                begun.wait(self.port.limit_s)
            self.port.say(head)
            for index, chunk in enumerate(self.chunks):
                pieces = enumerate(chunk.pieces)
                missing = tuple(i for i, piece in pieces if index < there or gradients[piece.tensor] is None)
                if self.shared:
                    assert self._block
                    place = self._places[index]
                    self._gather(chunk, gradients, self._block.data[place : place + chunk.nbytes])
                    self.port.say(m.Part(chunk=index, nbytes=0, missing=missing))
                    self.port.shown_bytes += chunk.nbytes
                elif self.packer:
                    body = self._gather(chunk, gradients, self._staging)
                    sizes, codes = self.packer.pack(chunk, body, missing, head.step)
                    self.port.say(m.Part(chunk=index, nbytes=codes.numel(), missing=missing, sizes=sizes), codes)
                elif len(chunk.pieces) == 1 and not missing:
                    piece = chunk.pieces[0]
                    gradient = gradients[piece.tensor]
                    assert gradient is not None
                    self.port.say(m.Part(chunk=index, nbytes=chunk.nbytes), gradient[piece.start : piece.stop])
                else:
                    body = self._gather(chunk, gradients, self._staging)
                    self.port.say(m.Part(chunk=index, nbytes=chunk.nbytes, missing=missing), body)
                if begun and not self.port.server:
                    begun.set()

        # A server that holds nothing of the table is not told of pushes: it would have nothing to answer.
        return self._begin(work if self.chunks else lambda: None, chunks=True)

    def pull_state(self) -> Future[None]:
        return self._begin(lambda: self.port.say(m.Pull(self._table.number, state=True)))

    def store_state(self, states: Sequence[dict[str, Any]]) -> Future[None]:
        def work() -> None:
            for index, chunk in enumerate(self.chunks):
                for number, piece in enumerate(chunk.pieces):
                    for key, value in states[piece.tensor].items():
                        self._store_value(index, number, key, value, piece)
            self.port.say(m.Pull(self._table.number))

        return self._begin(work, chunks=True)

    def _store_value(self, index: int, number: int, key: str, value: Any, piece: Piece) -> None:
        whole = isinstance(value, torch.Tensor) and value.dim() > 0
        dtype = str(value.dtype).removeprefix("torch.") if isinstance(value, torch.Tensor) else ""
        part = whole and value.numel() == self._table.slots[piece.tensor].flat.numel()
        body = (flat_of(value)[piece.start : piece.stop] if part else flat_of(value)) if whole else None
        head = m.Store(
            table=self._table.number,
            chunk=index,
            piece=number,
            key=key,
            scalar=None if whole or value is None else float(value),
            dtype=dtype,
            shape=tuple(value.shape) if whole and not part else (),
            nbytes=body.nbytes if body is not None else 0,
        )
        self.port.say(head, body)

    def _begin(self, work: Callable[[], None], *, chunks: bool = False) -> Future[None]:
        """Have the port work; done when all that is awaited has come."""
        self._done = done = Future[None]()
        self._fresh = set(range(len(self.chunks))) if chunks else set()
        self.port.send(work, done)
        if chunks and not self.chunks:
            self._finish()  # nothing will come
        return done

    def _finish(self) -> None:
        if self._done and not self._done.done():
            self._done.set_result(None)

    # ---- in the receiving thread

    def arrived(self, message: m.Weights) -> None:
        if message.chunk not in self._fresh:
            raise Interrupted(f"server {self.port.server} sent chunk {message.chunk}, which nobody has asked for")
        chunk = self.chunks[message.chunk]
        slots = self._table.slots
        if message.nbytes == 0 and self._weights is not None:
            place = self._places[message.chunk]
            self._spread(chunk, self._weights[place : place + chunk.nbytes])
        elif message.sizes:
            self._add(chunk, message)
        elif message.nbytes != chunk.nbytes:
            raise Interrupted(f"server {self.port.server} sent {message.nbytes} bytes for a chunk of {chunk.nbytes}")
        elif len(chunk.pieces) == 1:
            piece = chunk.pieces[0]
            self.port.read(slots[piece.tensor].flat[piece.start : piece.stop])
        else:
            self.port.read(self._arriving[: chunk.nbytes])
            self._spread(chunk, self._arriving[: chunk.nbytes])
        first = len(self._fresh) == len(self.chunks)
        self.version = message.version if first else min(self.version, message.version)
        self.round = message.round if first else min(self.round, message.round)
        self.age = message.age
        self._table.wishes = max(self._table.wishes, message.wishes)
        self._fresh.discard(message.chunk)
        if not self._fresh:
            self._finish()

    def _add(self, chunk: Chunk, message: m.Weights) -> None:
        """Weights that come as codes: the way from what came before."""
        back = self.packer.back if self.packer and not self.shared else None
        if back is None or not 0 <= message.nbytes <= most(back, chunk):
            raise Interrupted(
                f"server {self.port.server} sent {message.nbytes} bytes of codes for a chunk of {chunk.nbytes}, and "
                f"{most(back, chunk) if back else 'none'} at most are expected"
            )
        codes = torch.empty(message.nbytes, dtype=torch.uint8)
        self.port.read(codes)
        slots = self._table.slots
        try:
            add(back, chunk, message.sizes, codes, [slots[p.tensor].flat[p.start : p.stop] for p in chunk.pieces])
        except PayloadError as error:
            raise Interrupted(f"server {self.port.server} sent codes that cannot be read: {error}") from None

    def state_arrived(self, message: m.State) -> None:
        if message.chunk < 0:
            self._finish()
            return
        piece = self.chunks[message.chunk].pieces[message.piece]
        value: Any = message.scalar
        if message.nbytes:
            body = torch.empty(message.nbytes, dtype=torch.uint8)
            self.port.read(body)
            value = body.view(dtype_of(message.dtype))
            value = value.view(message.shape) if message.shape else value
        elif message.dtype and value is not None:
            value = torch.tensor(value, dtype=dtype_of(message.dtype))
        self.states[piece.tensor, piece.start, piece.stop, message.key] = value

    def _gather(self, chunk: Chunk, sources: Sequence[torch.Tensor | None], into: torch.Tensor) -> torch.Tensor:
        flat = into[: chunk.nbytes].view(dtype_of(chunk.dtype))
        for piece in chunk.pieces:
            source, view = sources[piece.tensor], flat[piece.at : piece.at + piece.numel]
            if source is None:
                view.zero_()
            else:
                view.copy_(source[piece.start : piece.stop])
        return flat

    def _spread(self, chunk: Chunk, raw: torch.Tensor) -> None:
        flat = raw.view(dtype_of(chunk.dtype))
        for piece in chunk.pieces:
            slot = self._table.slots[piece.tensor]
            slot.flat[piece.start : piece.stop].copy_(flat[piece.at : piece.at + piece.numel])
