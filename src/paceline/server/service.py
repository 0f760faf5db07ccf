"""A server at work: tables of parameters, and a connection to each worker (`session`).

What a worker says that cannot be read, or does not fit, ends its connection with a word about why; the others go on.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from paceline.core.errors import ConfigError, Interrupted, PacelineError, TimedOut
from paceline.core.trained import Work
from paceline.server import messages as m
from paceline.server.connection import Block, Connection
from paceline.server.counting import Batch
from paceline.server.lasts import Begun, begun, told
from paceline.server.packing import servable
from paceline.server.placement import Tensor, place
from paceline.server.rounds import Agreement
from paceline.server.session import Session
from paceline.server.shard import Shard
from paceline.server.stock import offsets, room


class Service:
    """One server of a run.

    Args:
        limit_s: bounds every wait for a worker that is in the middle of saying something.
        view: the number of the placement.
        agreement: with the other servers, on rounds; left out where this is the only one.
        replaces: lost workers are replaced (`admit`), and this goes on until one has come to the end of its script.
    """

    def __init__(
        self, *, limit_s: float = 300.0, view: int = 1, agreement: Agreement | None = None, replaces: bool = False
    ) -> None:
        self.limit_s = limit_s
        self.replaces = replaces
        self.view = view
        self.tables: dict[int, Table] = {}
        self.fault = ""  # why nobody can go on
        self.look: Callable[[], None] = lambda: None  # called, with the lock held, when the shards may have changed
        # Where batches are dealt here, called with the lock held:
        self.settle: Callable[[int, Mapping[str, Sequence[int]]], None] = lambda rank, leases: None
        self.torn: Callable[[int, Mapping[Batch, Begun]], None] = lambda rank, begun: None  # just before `left`
        self.left: Callable[[int], None] = lambda rank: None  # a worker's connection is over, and all it said is done
        self.lost: Callable[[int, Work], None] = lambda rank, work: None  # it had not said goodbye, and had done this
        self._work: dict[int, Work] = {}  # by rank, of those who are here
        self._sessions: dict[int, Session] = {}
        self._done = False  # a worker has come to its end
        self._shards = threading.RLock()
        self._idle = threading.Condition()
        self.agreement = agreement or Agreement()
        self.agreement.start(self._shards, self._close_round, self._fail, self._is_here, self._lost)

    def attach(self, connection: Connection) -> None:
        """Serve one more worker."""
        with self._idle:
            self._sessions[connection.rank] = session = Session(self, connection)
        session.start()

    def admit(self, connection: Connection) -> None:
        """Serve one who replaces a lost worker, when that one is gone."""
        with self._idle:
            if not self._idle.wait_for(lambda: connection.rank not in self._sessions, self.limit_s):
                raise TimedOut(f"member {connection.rank} is not gone after {self.limit_s:g} s")
            self._sessions[connection.rank] = session = Session(self, connection)
        session.start()

    @property
    def alone(self) -> bool:
        """Whether no worker is here."""
        return not self._sessions

    def wait(self, limit_s: float) -> bool:
        """Whether all workers have left within the limit, and none will come again."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._sessions and (self._done or not self.replaces), limit_s)

    def close(self) -> None:
        with self._idle:
            sessions = list(self._sessions.values())
        for session in sessions:
            session.close()
        self.agreement.close()
        for table in self.tables.values():
            table.block.close()

    def readings(self) -> dict[str, float]:
        """What there is to tell, over all tables."""
        shards = [table.shard for table in self.tables.values()]
        return {
            "applied": float(sum(s.applied for s in shards)),
            "dropped": float(sum(s.dropped for s in shards)),
            "halves": float(sum(s.halves for s in shards)),
            "version": float(max((s.version for s in shards), default=0)),
        }

    def do(self, session: Session, task: Callable[[], None]) -> None:
        """Do something for a worker while nobody else touches the shards; what is wrong with it ends its connection."""
        with self._shards, torch.no_grad():
            try:
                task()
            except PacelineError as error:
                session.refuse(error)
            self.look()

    def still(self, task: Callable[[], None]) -> None:
        """Do something while nobody touches the shards."""
        with self._shards, torch.no_grad():
            task()

    def session(self, rank: int) -> Session | None:
        return self._sessions.get(rank)

    # ---- with the lock held

    def table(self, session: Session, wish: m.Open) -> Table:
        """The table that a worker asks for, made when the first one does."""
        if wish.protocol != m.PROTOCOL:
            raise m.other_protocol(wish.protocol)
        if wish.rank != session.rank:
            raise ConfigError(f"member {session.rank} opens a table as member {wish.rank}")
        if self.fault:
            raise Interrupted(self.fault)
        terms = Terms(wish.tensors, wish.servers, wish.server, wish.cut, wish.rule)
        table = self.tables.get(wish.table)
        if table is None:
            table = self.tables[wish.table] = Table(wish.table, terms, self)
        elif terms != table.terms:
            raise ConfigError(f"table {wish.table}: {_difference(terms, table.terms)} on member {wish.rank}")
        return table

    def taken(self, rank: int, push: m.Push, *, final: bool) -> None:
        """A push is taken. What it was made of is used up, but for batches that are dealt again if it is torn."""
        self._work[rank] = self._work.get(rank, Work()) + Work(samples=push.samples, pushes=1)
        leases = {c: numbers for c, numbers in push.leases.items() if final or c.startswith(m.UPLOADS)}
        if leases:
            self.settle(rank, leases)

    def gone(self, session: Session, *, said: bool) -> None:
        """A worker's connection has ended. In sync, one that has not said goodbye takes its round with it."""
        if self._sessions.get(session.rank) is not session:
            return
        here = [table for table in self.tables.values() if session.rank in table.shard.clocks.of]
        lasts = [t.shard.last(session.rank, t.number) for t in here if t.chunks and not t.shard.sync]
        account = m.Account(session.rank, session.life, tuple(lasts))
        for table in here:
            if said:
                table.shard.sure(session.rank)
        for table in self.tables.values():
            if session.rank in table.shard.clocks.of:
                if not said and not table.shard.forgives:
                    self.fault = self.fault or f"member {session.rank} left the run, and sync waits for every member"
                else:
                    table.shard.leave(session.rank)
        work = self._work.pop(session.rank, None)
        if work and not said:
            self.lost(session.rank, work)
        self.agreement.gone(account, said=said)
        if said:
            self.left(session.rank)
        with self._idle:
            del self._sessions[session.rank]
            self._done = self._done or said
            self._idle.notify_all()
        if self.fault:
            self._fail(self.fault)

    def _is_here(self, rank: int, life: int) -> bool:
        session = self._sessions.get(rank)
        return session is not None and session.life == life

    def _lost(self, accounts: Mapping[int, m.Account]) -> None:
        """All servers have told what they have of a lost worker."""
        rank = next(iter(accounts.values())).rank
        for words in told(accounts):
            print(f"paceline: {words}", file=sys.stderr, flush=True)
        found = begun(accounts)
        chunks = {place: count for table in self.tables.values() for place, count in table.counts.items()}
        for (course, number), each in found.items():
            if each.whole(chunks):
                self.settle(rank, {course: (number,)})
        self.torn(rank, {batch: each for batch, each in found.items() if each.parts and not each.whole(chunks)})
        self.left(rank)

    def _close_round(self, word: m.Closed) -> None:
        with torch.no_grad():
            self.tables[word.table].shard.close(word.contributors)

    def _fail(self, fault: str) -> None:
        """Nobody can go on, and everybody is told why."""
        self.fault = self.fault or fault
        with self._idle:
            others = list(self._sessions.values())
        for other in others:
            other.refuse(Interrupted(self.fault))


class Terms(NamedTuple):
    """What all workers of a table must have alike."""

    tensors: tuple[Tensor, ...]
    servers: int
    server: int
    cut: bool
    rule: m.Rule


class Table:
    """A shard, and where its weights lie."""

    def __init__(self, number: int, terms: Terms, service: Service) -> None:
        if not 0 <= terms.server < terms.servers:
            raise ConfigError(f"table {number}: there is no server {terms.server} among {terms.servers}")
        self.number = number
        self.terms = terms
        placement = place(terms.tensors, terms.servers, cut=terms.cut, view=service.view)
        self.chunks = placement.of(terms.server)
        of = [(server, len(placement.of(server))) for server in range(terms.servers)]
        self.counts = {(number, server): count for server, count in of if count}
        self.codecs = servable(terms.rule.codec) if terms.rule.codec else None
        self.places = offsets(self.chunks)
        self.nbytes = room(self.chunks)
        self.block = Block(max(self.nbytes, 1))
        self._service = service
        self.shard = Shard(
            placement,
            terms.server,
            terms.rule,
            self.block.data,
            self._ready,
            self._stands,
            self._dropped,
            self._settle,
            self._sure,
            replaces=service.replaces,
        )

    def _ready(self, rank: int, index: int) -> None:
        if session := self._service.session(rank):
            session.send_weights(self, index)

    def _stands(self) -> None:
        self._service.agreement.stand(self.shard.standing(self.number))

    def _dropped(self, rank: int, step: int, reason: str) -> None:
        if session := self._service.session(rank):
            session.say_dropped(self, step, reason)

    def _settle(self, rank: int, push: m.Push) -> None:
        self._service.taken(rank, push, final=self.shard.sync)

    def _sure(self, rank: int, leases: Mapping[str, Sequence[int]]) -> None:
        self._service.settle(rank, leases)


def _difference(mine: Terms, first: Terms) -> str:
    if mine.rule != first.rule:
        return f"trained by {mine.rule} instead of {first.rule}"
    for ours, theirs in zip(mine.tensors, first.tensors):
        if ours != theirs:
            return f"parameter {ours.name!r} {list(ours.shape)} instead of {theirs.name!r} {list(theirs.shape)}"
    return "another number of parameters or servers"
