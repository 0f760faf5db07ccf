"""A worker's side of the parameter server: its parameters as chunks, pushed to and pulled from where they are placed.

A `Table` is one list of parameters with one rule. `push` sends the gradients and returns when the next weights are
installed. To and from each server goes a stream of its own: while the last chunks still go out, the first come back.
Large pieces are sent from where their gradient lies and received where their parameter lies; small ones are gathered.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import torch

from paceline.core.errors import Interrupted, PacelineError, TimedOut
from paceline.core.status import Status
from paceline.server import messages as m
from paceline.server.connection import Block, Connection, bytes_of
from paceline.server.packing import Packer, coded
from paceline.server.placement import Chunk, Piece, Tensor, dtype_of, place
from paceline.server.shard import offsets, room

_DIRECT_BYTES = 64 << 10  # larger pieces are sent and received where they lie
_LOOK_S = 1.0


class Client:
    """This worker's connections to the servers of its run."""

    def __init__(
        self, rank: int, connections: Sequence[Connection], *, limit_s: float = 300.0, status: Status | None = None
    ) -> None:
        self.rank = rank
        self.limit_s = limit_s
        self.status = status or Status(None)
        self.ports = [Port(i, connection, limit_s, self.status) for i, connection in enumerate(connections)]
        self.tables: list[Table] = []

    @property
    def sent_bytes(self) -> int:
        """Bytes that went to servers, those through shared memory too."""
        return sum(port.sent_bytes for port in self.ports)

    def open(self, tensors: Sequence[tuple[Tensor, torch.Tensor]], rule: m.Rule, *, cut: bool = True) -> Table:
        """Take part in a table. All workers open the same ones in the same order."""
        table = Table(self, len(self.tables), tensors, rule, cut=cut)
        self.tables.append(table)
        return table

    def close(self, *, said: bool = True) -> None:
        """Hang up, and say goodbye before."""
        for port in self.ports:
            port.leave(said=said)


class Table:
    """One list of parameters."""

    def __init__(
        self, client: Client, number: int, tensors: Sequence[tuple[Tensor, torch.Tensor]], rule: m.Rule, *, cut: bool
    ) -> None:
        self.number = number
        self.step = 0  # this worker's clock
        self.dropped: list[str] = []  # why pushes were not applied
        self.wishes = 0  # that anybody has uttered
        self._client = client
        self._slots = [Slot(p) for _, p in tensors]
        self._tensors = tuple(t for t, _ in tensors)
        self._placement = place(self._tensors, len(client.ports), cut=cut)
        self._parts = [
            Part(
                self,
                port,
                self._placement.of(port.server),
                Packer(rule.codec, rank=client.rank) if rule.codec else None,
            )
            for port in client.ports
        ]
        opens = [
            m.Open(
                rank=client.rank,
                table=number,
                tensors=self._tensors,
                servers=len(client.ports),
                server=port.server,
                cut=cut,
                rule=rule,
                shared=part.shared,
            )
            for port, part in zip(client.ports, self._parts)
        ]
        self._each(lambda part: part.open(opens[part.port.server]))
        self.step = max((part.clock for part in self._parts), default=0)

    @property
    def slots(self) -> list[Slot]:
        return self._slots

    def store(self) -> None:
        """Make the servers' weights those of this worker."""
        for slot in self._slots:
            slot.refresh()
        self._each(lambda part: part.store())

    def pull(self) -> None:
        """Make this worker's weights those of the servers."""
        self._each(lambda part: part.pull())
        self._install()

    def push(
        self,
        gradients: Sequence[torch.Tensor | None],
        groups: list[m.Options],
        *,
        weight: float = 1.0,
        wish: bool = False,
    ) -> None:
        """Send gradients; return when the weights for the next step are installed, or the gate's wait has failed."""
        flat = [None if g is None else _flat(g) for g in gradients]
        self._check_finite(flat)
        self.step += 1

        def work(part: Part) -> Future[None]:
            head = m.Push(
                table=self.number,
                view=self._placement.view,
                step=self.step,
                read=part.version,
                weight=weight,
                groups=groups,
                wish=wish,
            )
            return part.push(head, flat)

        self._each(work)
        for part in self._parts:
            part.settle()
        self._install()

    def rest(self) -> None:
        """No push will come for a while."""
        for port in self._client.ports:
            port.send(lambda port=port: port.say(m.Rest(self.number)))  # type: ignore[misc]

    def turn(self, gate: str) -> None:
        """From now on another gate; all workers are between two steps."""
        for port in self._client.ports:
            port.send(lambda port=port: port.say(m.Turn(self.number, gate)))  # type: ignore[misc]

    def state(self) -> list[dict[str, Any]]:
        """The optimizer's state by parameter, put together from all servers."""
        self._each(lambda part: part.pull_state())
        whole: list[dict[str, Any]] = [{} for _ in self._tensors]
        for part in self._parts:
            for (number, start, stop, key), value in part.states.items():
                if not isinstance(value, torch.Tensor) or value.numel() != stop - start or not value.dim():
                    whole[number][key] = value
                    continue
                tensor = self._tensors[number]
                if key not in whole[number]:
                    whole[number][key] = torch.empty(tensor.shape, dtype=value.dtype)
                whole[number][key].view(-1)[start:stop] = value.view(-1)
            part.states.clear()
        return whole

    def unsaid(self) -> dict[str, torch.Tensor]:
        """What the codec has left unsaid, by the parameter's name; momenta that it keeps follow in further rows."""
        whole: dict[str, torch.Tensor] = {}
        for packer in (part.packer for part in self._parts if part.packer):
            rows = packer.codec.rows
            for (number, start, stop), residual in packer.residuals.items():
                tensor = self._tensors[number]
                own = whole.setdefault(tensor.name, torch.zeros(rows, tensor.numel))
                own[:, start:stop] = residual.view(rows, -1)
        return whole

    def add_unsaid(self, unsaid: dict[str, torch.Tensor]) -> None:
        """Take over what a codec of the same kind had left unsaid."""
        for chunk in self._placement.chunks:
            packer = self._parts[chunk.server].packer
            for piece in chunk.pieces:
                own = unsaid.get(self._tensors[piece.tensor].name)
                if packer and own is not None and coded(chunk, piece) and own.shape[0] == packer.codec.rows:
                    key = (piece.tensor, piece.start, piece.stop)
                    part = own[:, piece.start : piece.stop].reshape(-1)
                    packer.residuals[key] = packer.residuals.get(key, torch.zeros_like(part)) + part

    def store_state(self, states: Sequence[dict[str, Any]]) -> None:
        """Give the servers the optimizer's state."""
        self._each(lambda part: part.store_state(states))

    def _each(self, work: Callable[[Part], Future[None]]) -> None:
        """Have all servers' parts work, and wait for them."""
        status, limit_s = self._client.status, self._client.limit_s
        before = status.what
        futures = [work(part) for part in self._parts]
        status.set("waiting for the servers")
        deadline = time.monotonic() + limit_s
        error: BaseException | None = None
        for future in futures:
            try:
                future.result(max(0.0, deadline - time.monotonic()))
            except FutureTimeout:
                error = error or TimedOut(
                    f"no weights came within {limit_s:g} s: a worker that the others wait for may be stuck. `paceline "
                    "status` shows what each does; raise --wait-limit-s where steps take longer"
                )
            except BaseException as raised:
                error = error or raised
        status.set(before)
        if error is not None:
            raise error

    def _install(self) -> None:
        for slot in self._slots:
            slot.install()

    def _check_finite(self, gradients: Iterable[torch.Tensor | None]) -> None:
        """Before anything is sent, so that nothing is applied."""
        sums = [g.sum(dtype=torch.float32) if g is not None else None for g in gradients]
        for tensor, total, gradient in zip(self._tensors, sums, gradients):
            if total is not None and not torch.isfinite(total) and not torch.isfinite(gradient).all():  # type: ignore[arg-type]
                raise PacelineError(
                    f"the gradient of {tensor.name!r} is not finite on member {self._client.rank}: nothing was sent. "
                    "Look at that member's batch and loss, lower the learning rate, or clip"
                )


class Slot:
    """A parameter, as flat memory on the CPU: its own where it is such, else a copy."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self.parameter = parameter
        p = parameter.detach()
        direct = p.device.type == "cpu" and p.is_contiguous()
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
        self.chunks = chunks
        self.version = 0
        self.clock = 0
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

    def push(self, head: m.Push, gradients: Sequence[torch.Tensor | None]) -> Future[None]:
        def work() -> None:
            self.port.say(head)
            for index, chunk in enumerate(self.chunks):
                missing = tuple(i for i, piece in enumerate(chunk.pieces) if gradients[piece.tensor] is None)
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

        return self._begin(work, chunks=True)

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
        body = (_flat(value)[piece.start : piece.stop] if part else _flat(value)) if whole else None
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
        self._table.wishes = max(self._table.wishes, message.wishes)
        self._fresh.discard(message.chunk)
        if not self._fresh:
            self._finish()

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


class Port:
    """One server, as this worker reaches it: a thread that sends, and one that receives."""

    def __init__(self, server: int, connection: Connection, limit_s: float, status: Status) -> None:
        self.server = server
        self.limit_s = limit_s
        self.memory = connection.memory
        self.parts: dict[int, Part] = {}
        self.shown_bytes = 0  # gradients in shared memory
        self._channel = connection.channel
        self._channel.name = f"server {server}"
        self._channel.send_limit_s = limit_s
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], Future[None] | None] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._left = False
        self._threads = [
            threading.Thread(target=work, name=f"paceline-server-{server}", daemon=True)
            for work in (self._send, self._receive)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def sent_bytes(self) -> int:
        return self._channel.sent_bytes + self.shown_bytes

    def send(self, work: Callable[[], None], done: Future[None] | None = None) -> None:
        with self._lock:
            if self._error is None:
                self._jobs.put((work, done))
                return
        if done is not None and not done.done():
            done.set_exception(self._error)

    def say(self, message: m.ToServer, body: torch.Tensor | None = None) -> None:
        self._channel.send(m.encode(message))
        if body is not None and body.numel():
            self._channel.send_raw(bytes_of(body))

    def read(self, into: torch.Tensor) -> None:
        self._channel.recv_raw_into(bytes_of(into), self.limit_s)

    def leave(self, *, said: bool) -> None:
        """Hang up; say goodbye before, behind what was sent."""
        with self._lock:
            if self._left:
                return
            self._left = True
        self._jobs.put(None)
        if said:
            self._threads[0].join(self.limit_s)
        self._channel.close()
        self._threads[1].join(self.limit_s)

    def _send(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                job[0]()
            if self._error is None:
                self.say(m.Leave())
        except BaseException as error:
            # The server may have said why it hung up: that word comes first, and through the other thread.
            self._threads[1].join(2.0)
            self._fail(error)

    def _receive(self) -> None:
        try:
            while True:
                self._take(self._next())
        except BaseException as error:
            self._fail(error)

    def _next(self) -> m.ToWorker:
        while True:
            try:
                return m.decode_to_worker(self._channel.recv(_LOOK_S))
            except TimedOut:
                if self._channel.closed:
                    raise

    def _take(self, message: m.ToWorker) -> None:
        if isinstance(message, m.Refused):
            raise message.error()
        part = self.parts.get(message.table)
        if part is None:
            raise Interrupted(f"server {self.server} speaks of table {message.table}, which nobody has opened")
        if isinstance(message, m.Opened):
            part.opened(message)
        elif isinstance(message, m.Weights):
            part.arrived(message)
        elif isinstance(message, m.State):
            part.state_arrived(message)
        else:
            part.dropped = True
            part._table.dropped.append(f"step {message.step} at server {self.server}: {message.reason}")

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if self._error is None:
                self._error = error
            first = self._error
        self._channel.close()
        for part in self.parts.values():
            if part._done and not part._done.done():
                part._done.set_exception(first)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.to_dense() if tensor.is_sparse else tensor
    return dense.detach().to("cpu").contiguous().view(-1)
