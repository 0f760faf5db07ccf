"""A worker's side of the parameter server: its parameters as chunks, pushed to and pulled from where they are placed.

A `Table` is one list of parameters with one rule. `push` sends the gradients and returns when the next weights are
installed. To and from each server goes a stream of its own: while the last chunks still go out, the first come back.
A chunk that is one piece is sent from where its gradient lies and received where its parameter lies; others are
gathered.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import torch

from paceline.core.errors import PacelineError, TimedOut
from paceline.core.status import Status
from paceline.data.leases import Counted
from paceline.server import messages as m
from paceline.server.connection import Connection
from paceline.server.counting import Batch, batches_of
from paceline.server.packing import Packer, coded, servable
from paceline.server.part import Part, Slot
from paceline.server.placement import Tensor, place
from paceline.server.port import Port
from paceline.server.pushes import Pushes
from paceline.transport.group import flat_of

_KEPT = 64  # reasons
_PAUSE_S = 0.005


class Client:
    """This worker's connections to the servers of its run."""

    def __init__(
        self, rank: int, connections: Sequence[Connection], *, limit_s: float = 300.0, status: Status | None = None
    ) -> None:
        self.rank = rank
        self.life = random.SystemRandom().getrandbits(32)
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
        self.dropped: dict[int, str] = {}  # by step: why a push was not applied; of the last ones
        self.pushes = Pushes()
        self.wishes = 0  # that anybody has uttered
        self.versions: tuple[int, ...] = ()  # of the weights that are installed, by server
        self._pushed: dict[Batch, int] = {}  # of the last push: in how many pushes each of its batches was
        self._client = client
        back = bool(rule.codec and servable(rule.codec).back) and any(port.memory is None for port in client.ports)
        self._slots = [Slot(p, apart=back) for _, p in tensors]
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
        self.versions = tuple(part.version for part in self._parts)

    def note_dropped(self, step: int, reason: str) -> None:
        """A server says that a push was not applied; the first reason counts."""
        self.dropped.setdefault(step, reason)
        while len(self.dropped) > _KEPT:
            del self.dropped[next(iter(self.dropped))]

    @property
    def names(self) -> list[str]:
        """Of the parameters."""
        return [tensor.name for tensor in self._tensors]

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

    def catch_up(self) -> None:
        """Make this worker's weights those of the servers now, and of one round on all of them.

        From the first server's answer on no round is closed without this worker; others may not have heard yet of the
        one that was closed last.
        """
        self._each(lambda part: part.pull(), [part for part in self._parts if part.chunks][:1])
        deadline = time.monotonic() + self._client.limit_s
        self.pull()
        while len({part.round for part in self._parts if part.chunks}) > 1:
            if time.monotonic() > deadline:
                raise TimedOut(f"the servers were not at one round within {self._client.limit_s:g} s")
            time.sleep(_PAUSE_S)
            self.pull()

    def push(
        self,
        gradients: Sequence[torch.Tensor | None],
        groups: list[m.Options],
        *,
        weight: float = 1.0,
        wish: bool = False,
        read: Sequence[int] | None = None,
        thread: int = 0,
        leases: Mapping[str, Sequence[int]] | None = None,
        counted: Mapping[Batch, Counted] | None = None,
        samples: float = 0.0,
    ) -> None:
        """Send gradients; return when the weights for the next step are installed, or the gate's wait has failed.

        Where several threads compute and push in turn, `read` is what `versions` was when this one began. `leases` are
        the batches that the gradients were made of; chunks that have all of these already, by `counted`, are left out.
        `samples` is how many samples the first server is to count for this worker.
        """
        read = self.versions if read is None else read
        flat = [None if g is None else flat_of(g.to_dense() if g.is_sparse else g) for g in gradients]
        self._check_finite(flat)
        self.step += 1
        # Weights of unlike rounds, after a push that was dropped, make a gradient of the oldest one.
        oldest = min((part.round for part in self._parts if part.chunks), default=0)

        named = {course: tuple(numbers) for course, numbers in (leases or {}).items()}
        # What cannot be dealt again is settled by the first chunk that the first server gets.
        uploads = any(course.startswith(m.UPLOADS) for course in named)
        begun = threading.Event() if uploads and len(self._parts) > 1 else None
        there = self._there(batches_of(named), {} if uploads else counted or {})

        def work(part: Part) -> Future[None]:
            if not part.chunks:  # more servers than pieces: this one has nothing to answer
                nothing: Future[None] = Future()
                nothing.set_result(None)
                return nothing
            head = m.Push(
                table=self.number,
                view=self._placement.view,
                step=self.step,
                read=read[part.port.server],
                weight=weight,
                groups=groups,
                wish=wish,
                round=oldest,
                life=self._client.life,
                thread=thread,
                leases=named,
                samples=0.0 if part.port.server else samples,
            )
            future = part.push(head, flat, begun, there[part.port.server])
            if begun and not part.port.server:
                future.add_done_callback(lambda _: begun.set())  # a server that is gone holds nobody up
            return future

        self._each(work)
        reason = next((part.reason for part in self._parts if part.dropped), "")
        self.pushes.add(age=max((part.age for part in self._parts), default=0), reason=reason)
        for part in self._parts:
            part.settle()
        self._install()

    def _there(self, batches: Sequence[Batch], counted: Mapping[Batch, Counted]) -> list[int]:
        """By server: how many chunks have all these batches already."""
        times = {batch: self._pushed.get(batch, 0) for batch in batches}
        self._pushed = {batch: count + 1 for batch, count in times.items()}
        if not counted or not batches:
            return [0] * len(self._parts)
        return [
            min(self._left_of(part, counted.get(batch, {}), times[batch]) for batch in batches) for part in self._parts
        ]

    def _left_of(self, part: Part, counted: Counted, times: int) -> int:
        """How many of a server's chunks have a batch already, when it was in so many pushes of this worker."""
        chunks = len(part.chunks)
        return min(max(counted.get((self.number, part.port.server), 0) - times * chunks, 0), chunks)

    def spans(self, batch: Batch, counted: Counted) -> list[tuple[int, int, int]]:
        """What of which parameter has a batch already: its number, from where, and up to where."""
        times = self._pushed.get(batch, 0)
        chunks = [chunk for part in self._parts for chunk in part.chunks[: self._left_of(part, counted, times)]]
        return [(piece.tensor, piece.start, piece.stop) for chunk in chunks for piece in chunk.pieces]

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

    @property
    def packers(self) -> list[Packer]:
        """What has encoded pushes to servers on other hosts."""
        return [part.packer for part in self._parts if part.packer and part.packer.bytes_before]

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

    def _each(self, work: Callable[[Part], Future[None]], parts: Sequence[Part] | None = None) -> None:
        """Have all servers' parts work, or these, and wait for them."""
        status, limit_s = self._client.status, self._client.limit_s
        before = status.what
        futures = [work(part) for part in (self._parts if parts is None else parts)]
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
        self.versions = tuple(part.version for part in self._parts)  # not before all of them are there

    def _check_finite(self, gradients: Iterable[torch.Tensor | None]) -> None:
        """Before anything is sent, so that nothing is applied."""
        sums = [g.sum(dtype=torch.float32) if g is not None else None for g in gradients]
        for tensor, total, gradient in zip(self._tensors, sums, gradients):
            if total is not None and not torch.isfinite(total) and not torch.isfinite(gradient).all():  # type: ignore[arg-type]
                raise PacelineError(
                    f"the gradient of {tensor.name!r} is not finite on member {self._client.rank}: nothing was sent. "
                    "Look at that member's batch and loss, lower the learning rate, or clip"
                )
