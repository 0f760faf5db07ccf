"""One worker's connection, on the server's side.

One thread receives a chunk of its push, applies it under the lock of the shards, and sends the weights back; while it
does, the network carries the chunks before and after. What others' pushes set free, such as the sums of a round, goes
out through a second thread, and so does everything to another host. What a worker may have in flight is bounded: as
many chunks as its buffers hold; then the server reads no more from it, and the network holds it back.
"""

from __future__ import annotations

import functools
import math
import queue
import threading
import traceback
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import torch

from paceline.codecs import PayloadError
from paceline.core.errors import ConfigError, Interrupted, PacelineError
from paceline.server import messages as m
from paceline.server.connection import Connection, bytes_of
from paceline.server.packing import Trace, most, unpack
from paceline.server.placement import dtype_of

if TYPE_CHECKING:
    from paceline.server.service import Service, Table

_BUFFERS = 4  # chunks of one worker that are received ahead of being applied
_LOOK_S = 1.0
_GOODBYE_S = 10.0  # for the last word to be read


class Buffers:
    """Memory for the chunks that one worker sends, and no more of it than allowed."""

    def __init__(self) -> None:
        self._made = 0
        self._free: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()

    def take(self, nbytes: int, allowed: int, wanted: Callable[[], bool]) -> torch.Tensor:
        """Wait for room as long as it is wanted: others may take their time before these chunks can be used."""
        if self._free.empty() and self._made < allowed:
            self._made += 1
            return torch.empty(nbytes, dtype=torch.uint8)
        buffer: torch.Tensor | None = None
        while buffer is None:
            try:
                buffer = self._free.get(timeout=_LOOK_S)
            except queue.Empty:
                if not wanted():
                    raise Interrupted("the connection is over") from None
        return buffer if buffer.numel() >= nbytes else torch.empty(nbytes, dtype=torch.uint8)

    def give(self, buffer: torch.Tensor) -> None:
        self._free.put(buffer)


class Session:
    """One worker's connection, on the server's side."""

    def __init__(self, service: Service, connection: Connection) -> None:
        self.rank = connection.rank
        self.life = connection.life
        self._service = service
        self._connection = connection
        self._channel = connection.channel
        self._tables: dict[int, Table] = {}
        self._inbox: dict[int, torch.Tensor] = {}  # by table: the worker's gradients in shared memory
        self._buffers = Buffers()
        self._held: dict[tuple[int, int], torch.Tensor] = {}  # by table and chunk: what a shard keeps
        self._traces: dict[int, Trace] = {}  # by table: what the worker has, where weights come back as codes
        self._out: deque[tuple[m.ToWorker, torch.Tensor | None, bool]] = deque()  # True: weights as they are
        self._sending = threading.Lock()
        self._more = threading.Event()  # there is something to send that this worker's own words have not set free
        self._room = threading.Event()  # something has been sent
        self._over = False  # nothing more is said to this worker
        self._threads = [
            threading.Thread(target=work, name=f"paceline-serve-{self.rank}", daemon=True)
            for work in (self._receive, self._send_others)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._channel.close()

    # ---- with the lock of the shards held

    def _join(self, table: Table) -> None:
        clock = table.shard.join(self.rank)
        self._tables[table.number] = table
        self._say(m.Opened(table.number, table.shard.version, clock))

    def send_weights(self, table: Table, index: int, *, exact: bool = False) -> None:
        """These weights may go out now; what the worker has sent for them is not needed any more."""
        if (buffer := self._held.pop((table.number, index), None)) is not None:
            self._buffers.give(buffer)
        weights = table.shard.weights(self.rank, index)
        home = table.block.data.data_ptr()
        lies_there = home <= weights.data_ptr() < home + max(table.nbytes, 1)
        shared = table.number in self._inbox and lies_there
        message = m.Weights(
            table=table.number,
            chunk=index,
            nbytes=0 if shared else weights.nbytes,
            version=table.shard.named_version(self.rank),
            wishes=table.shard.wishes,
            round=table.shard.round,
            age=table.shard.age(self.rank),
        )
        self._say(message, None if shared else weights, exact=exact)

    def send_all_weights(self, table: Table) -> None:
        table.shard.pulls(self.rank)
        for index in range(len(table.chunks)):
            self.send_weights(table, index, exact=True)

    def send_state(self, table: Table) -> None:
        """All of the optimizer's state."""
        for index, piece, state in table.shard.states():
            for key, value in state.items():
                tensor = isinstance(value, torch.Tensor) and value.dim() > 0
                numel = table.chunks[index].pieces[piece].numel
                head = m.State(
                    table=table.number,
                    chunk=index,
                    piece=piece,
                    key=key,
                    scalar=None if tensor or value is None else float(value),
                    dtype=str(value.dtype).removeprefix("torch.") if isinstance(value, torch.Tensor) else "",
                    shape=tuple(value.shape) if tensor and value.numel() != numel else (),
                    nbytes=value.nbytes if tensor else 0,
                )
                self._say(head, value.clone() if tensor else None)
        self._say(m.State(table=table.number, chunk=-1))

    def refuse(self, error: PacelineError) -> None:
        """End the connection with a word about why, and about what was applied of a push that ends here."""
        if not self._over:
            kind = "left" if isinstance(error, Interrupted) else "config"
            halves = [half for table in self._tables.values() if (half := table.shard.half(self.rank))]
            self._say(m.Refused(kind, "; ".join([str(error), *halves])))
            self._over = True

    def _say(self, message: m.ToWorker, body: torch.Tensor | None = None, *, exact: bool = False) -> None:
        if not self._over:
            self._out.append((message, body, exact))
            if threading.current_thread() is not self._threads[0]:
                self._more.set()

    def _part(
        self, table: Table, index: int, gradient: torch.Tensor, missing: frozenset[int], buffer: torch.Tensor | None
    ) -> None:
        if buffer is not None:
            self._held[table.number, index] = buffer
        table.shard.part(self.rank, index, gradient, missing)
        if not table.shard.keeps(self.rank, index) and self._held.pop((table.number, index), None) is not None:
            assert buffer is not None
            self._buffers.give(buffer)

    def _begin(self, table: Table, push: m.Push) -> None:
        if reason := table.shard.begin(self.rank, push):
            self.say_dropped(table, push.step, reason)

    def say_dropped(self, table: Table, step: int, reason: str) -> None:
        self._say(m.Dropped(table.number, step, reason))

    # ---- the receiving thread

    def _receive(self) -> None:
        said = False
        try:
            while not said and not self._over:
                said = self._take(self._next())
        except Interrupted:
            pass
        except ConfigError as error:
            self._do(lambda error=error: self.refuse(error))  # type: ignore[misc]
        except Exception as error:  # a fault of ours: this worker is told, and the others go on
            traceback.print_exc()
            failure = Interrupted(f"the server failed: {error!r}; its log has more")
            self._do(lambda: self.refuse(failure))
        self._do(lambda: self._end(said))
        self._more.set()
        self._channel.drain(_GOODBYE_S)
        self._channel.close()

    def _do(self, task: Callable[[], None]) -> None:
        self._service.do(self, task)
        if not self._channel.encrypted:
            self._send()
            return
        # To another host a chunk takes long: the other thread sends it while this one receives the next.
        self._more.set()
        while len(self._out) > _BUFFERS and not self._channel.closed:
            self._room.wait(_LOOK_S)
            self._room.clear()

    def _end(self, said: bool) -> None:
        self._over = True
        self._service.gone(self, said=said)

    def _next(self) -> m.ToServer:
        return m.decode_to_server(self._channel.listen())  # a worker may compute as long as it likes

    def _take(self, message: m.ToServer) -> bool:
        """Deal with one message; True where it was the last."""
        if isinstance(message, m.Open):
            self._open(message)
        elif isinstance(message, m.Push):
            self._take_push(message)
        elif isinstance(message, m.Store):
            self._take_store(message)
        elif isinstance(message, m.Pull):
            table, state = self._table(message.table), message.state
            self._do(lambda: self.send_state(table) if state else self.send_all_weights(table))
        elif isinstance(message, m.Turn):
            table, gate = self._table(message.table), message.gate
            self._do(lambda: table.shard.turn(gate))
        elif isinstance(message, m.Rest):
            table = self._table(message.table)
            self._do(lambda: table.shard.rest(self.rank))
        elif isinstance(message, m.Leave):
            return True
        else:
            raise ConfigError(f"member {self.rank} said {type(message).__name__} out of turn")
        return False

    def _open(self, wish: m.Open) -> None:
        found: list[Table] = []
        self._do(lambda: found.append(self._service.table(self, wish)))
        if not found:
            return  # refused
        table, memory = found[0], self._connection.memory
        if wish.shared and memory and table.nbytes:  # without the lock: this worker may be slow to give its memory
            self._inbox[table.number] = memory.take(f"in-{table.number}", table.nbytes, self._service.limit_s)
            memory.give(f"out-{table.number}", table.block)
        elif table.codecs and table.codecs.back:
            self._traces[table.number] = Trace(table.codecs.back, table.chunks, rank=self.rank)
        self._do(lambda: self._join(table))

    def _take_push(self, push: m.Push) -> None:
        table = self._table(push.table)
        self._do(lambda: self._begin(table, push))
        inbox = self._inbox.get(push.table)
        for index, chunk in enumerate(table.chunks):
            part = self._next()
            if not isinstance(part, m.Part) or part.chunk != index:
                raise ConfigError(f"member {self.rank} pushed no part {index}")
            if table.codecs and inbox is None:
                fits = 0 <= part.nbytes <= most(table.codecs.push, chunk)
            else:
                fits = part.nbytes == (0 if inbox is not None else chunk.nbytes)
            if not fits:
                raise ConfigError(f"member {self.rank} announced {part.nbytes} bytes for a chunk of {chunk.nbytes}")
            if any(not 0 <= piece < len(chunk.pieces) for piece in part.missing):
                raise ConfigError(f"member {self.rank} leaves out pieces that chunk {index} does not have")
            buffer = None
            if table.codecs and inbox is None:
                codes = torch.empty(part.nbytes, dtype=torch.uint8)
                self._channel.recv_raw_into(bytes_of(codes), self._service.limit_s)
                try:
                    raw = unpack(table.codecs.push, chunk, part.sizes, codes).view(torch.uint8)
                except PayloadError as error:
                    raise ConfigError(f"member {self.rank} pushed codes that cannot be read: {error}") from None
            elif inbox is None:
                allowed = len(table.chunks) if table.shard.sync else _BUFFERS  # sync keeps all parts of a round
                buffer = self._buffers.take(chunk.nbytes, allowed, lambda: not self._over and not self._channel.closed)
                raw = buffer[: chunk.nbytes]
                self._channel.recv_raw_into(bytes_of(raw), self._service.limit_s)
            else:
                raw = inbox[table.places[index] : table.places[index] + chunk.nbytes]
            gradient, missing = raw.view(dtype_of(chunk.dtype)), frozenset(part.missing)
            self._do(functools.partial(self._part, table, index, gradient, missing, buffer))

    def _take_store(self, store: m.Store) -> None:
        table = self._table(store.table)
        if not 0 <= store.chunk < len(table.chunks):
            raise ConfigError(f"member {self.rank} stores chunk {store.chunk} of {len(table.chunks)}")
        chunk = table.chunks[store.chunk]
        if store.nbytes > max(2 * chunk.nbytes, 8 * chunk.numel) or store.nbytes < 0:
            raise ConfigError(f"member {self.rank} stores {store.nbytes} bytes in a chunk of {chunk.nbytes}")
        body = torch.empty(store.nbytes, dtype=torch.uint8)
        self._channel.recv_raw_into(bytes_of(body), self._service.limit_s)
        dtype = getattr(torch, store.dtype or chunk.dtype, None)
        if not isinstance(dtype, torch.dtype) or store.nbytes % dtype.itemsize:
            raise ConfigError(f"member {self.rank} stores {store.nbytes} bytes of {store.dtype!r}")
        values = body.view(dtype)
        index, piece, key, scalar = store.chunk, store.piece, store.key, store.scalar
        if not key:
            self._do(lambda: table.shard.stock.store(index, values))
            return
        if not 0 <= piece < len(chunk.pieces):
            raise ConfigError(f"member {self.rank} stores the state of piece {piece} of {len(chunk.pieces)}")
        if math.prod(store.shape) == values.numel() and store.shape:
            values = values.view(store.shape)
        value = values if scalar is None else torch.tensor(scalar, dtype=dtype) if store.dtype else scalar
        self._do(lambda: table.shard.store_state(index, piece, key, value))

    def _table(self, number: int) -> Table:
        if number not in self._tables:
            raise ConfigError(f"member {self.rank} speaks of table {number}, which it has not opened")
        return self._tables[number]

    # ---- sending

    def _send(self) -> None:
        """Send what there is to send, in order."""
        with self._sending:
            try:
                while self._out:
                    message, body, exact = self._out.popleft()
                    if isinstance(message, m.Weights) and body is not None and message.table in self._traces:
                        sizes, body = self._traces[message.table].say(message.chunk, body, exact=exact)
                        message = msgspec.structs.replace(message, nbytes=body.nbytes, sizes=sizes)
                    self._channel.send(m.encode(message))
                    if body is not None and body.numel():
                        self._channel.send_raw(bytes_of(body))
                    self._room.set()
            except Interrupted:
                self._out.clear()
                self._channel.close()

    def _send_others(self) -> None:
        try:
            while not self._over or self._out:
                self._more.wait(_LOOK_S)
                self._more.clear()
                self._send()
        except Exception:  # a fault of ours, such as no memory for what a worker has: it is not to wait for nothing
            traceback.print_exc()
            self._channel.close()
