"""A shard: who pushes to one server's part of a table (`stock`), and who gets which weights when.

Called by one thread, opens nothing and waits for nothing: what comes in are a worker's pushes, part by part, and what
goes out is `ready(rank, chunk)`: these weights may go to that worker now. So any order of events can be tested.

    async, bounded   a part is corrected for its age and applied when it comes; the worker gets the chunk back at once,
                     or when the gate opens
    sync             parts are kept until all workers have sent theirs, then summed in the order of ranks and applied;
                     with backups, and where lost workers are replaced, a round is closed by one word for all shards
                     (`server.rounds`); nothing is corrected

The version counts pushes that were applied (in sync: rounds). A worker's own push counts as seen by it, so the age of
its next one is the number of others' pushes in between.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from paceline.core.errors import ConfigError
from paceline.server.clocks import Clocks
from paceline.server.counting import Counting, Leases, batches_of
from paceline.server.gates import Together, make_gate
from paceline.server.messages import UPLOADS, Last, Push, Rule, Standing
from paceline.server.placement import Placement
from paceline.server.readers import MOST_THREADS, Readers
from paceline.server.stock import Stock
from paceline.server.under import Under, finite, mean_of


class Shard:
    """One server's chunks of a table.

    Args:
        memory: where the weights live; `stock.room` says how much is needed.
        ready: called when a chunk may go to a worker.
        stands: called where rounds are agreed on and `standing` may have changed: who knows all shards calls `close`.
        dropped: called with rank, step and reason where a push is dropped that `begin` had taken.
        settle: called with rank and push when it is taken: with the first of its chunks, from which on it cannot be
            undone; in sync, where nothing is applied before, when it is whole, or its round is agreed on.
        sure: called with rank and batches that all servers have whole, in async and bounded.
        replaces: lost workers are replaced, so that in sync too nobody waits for one who is gone.
    """

    def __init__(
        self,
        placement: Placement,
        server: int,
        rule: Rule,
        memory: torch.Tensor,
        ready: Callable[[int, int], None],
        stands: Callable[[], None] = lambda: None,
        dropped: Callable[[int, int, str], None] = lambda rank, step, reason: None,
        settle: Callable[[int, Push], None] = lambda rank, push: None,
        sure: Callable[[int, Leases], None] = lambda rank, leases: None,
        *,
        replaces: bool = False,
    ) -> None:
        self.stock = Stock(placement, server, rule, memory)
        self.placement = placement
        self.chunks = self.stock.chunks
        self.rule = rule
        self.gate = make_gate(rule.gate)
        self.readers = Readers(self.stock, placement, rule.correct)
        self.version = 0
        self.round = 0  # of those with backups: the same on all shards
        self.wishes = 0
        self.clocks = Clocks()
        self.applied = self.dropped = 0  # pushes
        self.halves = 0  # pushes that ended when some of their chunks had been applied, which stay so, and for good
        self._ready = ready
        self._stands = stands
        self._dropped = dropped
        self._settle = settle
        self._sure = sure
        self._counting = Counting()
        self._replaces = replaces
        self._under: dict[int, Under] = {}
        self._gone: dict[tuple[int, int], Under] = {}  # by rank and life: whole pushes of who has left, with backups
        self._ages: dict[int, int] = {}  # by rank, of its last push
        self._seen: dict[int, int] = {}  # versions that workers will name in their next push
        self._waits: dict[int, set[int]] = {}  # by rank: chunks that are due to it
        self._summed: set[int] = set()  # chunks of the round under way, in sync without backups

    # ---- who is here

    def join(self, rank: int) -> int:
        """A worker comes; the clock at which it begins: that of the slowest, so that nobody waits for its past."""
        step = self.clocks.join(rank)
        self.readers.join(rank)
        self._seen[rank] = self.version
        self._tell()
        return step

    def leave(self, rank: int) -> None:
        """A worker goes, or has died. A push that was under way is forgotten; what was applied of it stays.

        Where rounds are agreed on, one that was whole is kept until the round is closed, which may have been decided
        with it.
        """
        if self._agreed and rank in self.whole_pushes():
            self._gone[rank, self._under[rank].push.life] = self._under[rank]
        self.halves += self._applied_of(rank) > 0 and not self._comes_again(self._under[rank].push)
        self._counting.rests(rank)
        self.clocks.leave(rank)
        self.readers.leave(rank)
        for known in (self._under, self._waits, self._seen, self._ages):
            known.pop(rank, None)
        if self.clocks.of:
            self._go_on()
        else:
            self._tell()

    def last(self, rank: int, table: int = 0) -> Last:
        """How far a worker has come with its pushes."""
        under, whole = self._under.get(rank), self.clocks.whole(rank)
        return Last(
            table=table,
            begun=under.push.step if under and under.parts else whole,
            whole=whole,
            again=self._comes_again(under.push) if under else self._counting.counts(rank),
            taken=self._counting.of(rank),
        )

    def rest(self, rank: int) -> None:
        """A worker will not push for a while, and nobody is to wait for it. All that it has pushed is everywhere."""
        self.clocks.resting.add(rank)
        self.sure(rank)
        self._go_on()

    def sure(self, rank: int) -> None:
        """What a worker has pushed is everywhere: it rests, or has said goodbye."""
        if leases := self._counting.rests(rank):
            self._sure(rank, leases)

    def _wake(self, rank: int) -> None:
        """A worker that has rested pushes again. Nobody waits for what it has not done meanwhile."""
        if self.clocks.wake(rank):
            self._tell()

    def turn(self, words: str) -> None:
        """From now on another gate; between two steps of all workers.

        In sync corrections rest: nothing is corrected, and weights are sent as they are. What they had learnt by then
        is of other steps than will come behind it, and is forgotten.
        """
        if any(self._under.values()):
            raise ConfigError("the gate changes between two steps of all workers, and a push is under way")
        self.gate = make_gate(words)
        if self.sync:
            self.readers.begin_anew()
        self.clocks.level()
        self._seen = dict.fromkeys(self._seen, self.version)
        if self.chunks:
            self._stands()

    # ---- a push

    def begin(self, rank: int, push: Push) -> str:
        """A worker announces its gradients; why they will be dropped, or ""."""
        if rank not in self.clocks.of:
            raise ConfigError(f"member {rank} pushes to a table that it has not opened")
        if rank in self._under:
            raise ConfigError(f"member {rank} pushes before it has the weights of its last push")
        if push.view != self.placement.view:
            raise ConfigError(
                f"member {rank} pushes by view {push.view} of the placement, which is at {self.placement.view}"
            )
        if not 0 <= push.read <= self.version or not 0.0 <= push.weight < math.inf:
            raise ConfigError(f"member {rank} names version {push.read} of {self.version} and weight {push.weight}")
        if not 0 <= push.round <= self.round:
            raise ConfigError(f"member {rank} names round {push.round} of {self.round}")
        self.clocks.check(rank, push.step)
        if len(push.groups) != len(self.rule.groups):
            raise ConfigError(
                f"member {rank} has {len(push.groups)} parameter groups, the table {len(self.rule.groups)}"
            )
        if not 0 <= push.thread < MOST_THREADS:
            raise ConfigError(f"member {rank} pushes from thread {push.thread}: at most {MOST_THREADS} are allowed")
        age = self._ages[rank] = self.version - push.read
        self.clocks.pushes(rank)
        self._wake(rank)
        self.readers.asks(rank, push.thread)
        self._under[rank] = under = Under(push, age, self._why_not(rank, push, age))
        self._waits[rank] = set()
        if push.wish:
            self.wishes += 1
        if not self.sync:
            self._seen[rank] = self.version + (not under.reason)
            if leases := self._counting.begin(rank, push):
                self._sure(rank, leases)
        return under.reason

    def part(self, rank: int, index: int, gradient: torch.Tensor, missing: frozenset[int] = frozenset()) -> None:
        """The gradients of one chunk, flat. The shard changes nothing in them, and may keep them; see `keeps`."""
        under = self._under.get(rank)
        if under is None or index != under.parts or index >= len(self.chunks):
            raise ConfigError(f"member {rank} sent part {index} out of turn")
        if gradient.numel() != self.chunks[index].numel or gradient.dtype != self.stock.weights[index].dtype:
            raise ConfigError(
                f"member {rank} sent {gradient.numel()} elements for a chunk of {self.chunks[index].numel}"
            )
        if not under.reason and not finite(gradient):
            raise ConfigError(f"member {rank} sent a gradient that is not finite, in {self.stock.name(index)}")
        under.parts += 1
        if self.sync and not under.reason:
            under.kept[index] = gradient, missing
            self._sum_what_is_here(index)
        elif not under.reason:
            self._apply_one(rank, index, gradient, missing, under)
            self._due(rank, index)
        if not self.sync:
            self._counting.part(rank, under.push)
        if not self._agreed and under.parts == (len(self.chunks) if self.sync else 1):
            self._settle(rank, under.push)
        if under.parts == len(self.chunks) and rank in self._under:  # else it was the round's last
            self._end(rank, under)

    def keeps(self, rank: int, index: int) -> bool:
        """Whether the gradients of a chunk must stay as they are: until it is ready for that worker."""
        return rank in self._under and index in self._under[rank].kept

    def half(self, rank: int) -> str:
        """In words, which chunks of the push under way have been applied: they have been sent on, and stay so."""
        if not (count := self._applied_of(rank)):
            return ""
        which = "chunk 0" if count == 1 else f"chunks 0 to {count - 1}"
        names = [self.placement.tensors[self.chunks[i].pieces[j].tensor].name for i, j in ((0, 0), (count - 1, -1))]
        return f"{which} of {len(self.chunks)} of this push, from {names[0]!r} to {names[1]!r}, had been applied"

    def close(self, contributors: Sequence[tuple[int, int]]) -> None:
        """End a round that was agreed on with the pushes of these ranks and lives, whole here; others' are dropped."""
        if not self.chunks:
            return  # nobody pushes here
        whole = {(rank, self._under[rank].push.life): self._under[rank] for rank in self.whole_pushes()} | self._gone
        if not whole.keys() >= set(contributors):
            raise ConfigError(
                f"round {self.round} was closed with {contributors}, of whom only {sorted(whole)} are here"
            )
        for index in range(len(self.chunks)):
            self._sum(index, [whole[each] for each in sorted(contributors)])
        here = sorted(rank for rank, life in contributors if (rank, life) not in self._gone)
        self.round += 1
        for rank in here:
            self._settle(rank, self._under[rank].push)
        self.applied += len(contributors) - len(here)
        self._gone.clear()
        self._round_over(here)
        late = {rank: under for rank, under in self._under.items() if not under.reason}
        for rank, under in late.items():  # before any of them is dropped: none is for the next round
            under.reason = "its round was closed without it"
            under.kept.clear()
            self._dropped(rank, under.push.step, under.reason)
        for rank in here:
            for index in range(len(self.chunks)):
                self._ready(rank, index)
        for rank, under in late.items():
            if under.whole:
                self._drop(rank, under)
        self._tell()

    def weights(self, rank: int, index: int) -> torch.Tensor:
        """What a worker is to get of a chunk now."""
        return self.readers.weights(rank, index, corrected=not self.sync)

    def pulls(self, rank: int) -> None:
        """A worker is about to get all weights as they are now, and not for a push of one of its threads.

        It is about to train, if it has rested: nobody is to go ahead of it from here.
        """
        self._wake(rank)
        self.readers.asks(rank, None)
        if rank not in self._under:
            self._seen[rank] = self.version

    def named_version(self, rank: int) -> int:
        """What this worker is to name in its next push."""
        return self._seen[rank]

    def age(self, rank: int) -> int:
        """How old this worker's last push was when it came."""
        return self._ages.get(rank, 0)

    @property
    def sync(self) -> bool:
        return isinstance(self.gate, Together)

    @property
    def between(self) -> bool:
        """Whether no round or push is half applied."""
        if self.sync:
            return not self._summed
        return all(not under.parts or under.reason for under in self._under.values())

    def whole_pushes(self) -> set[int]:
        """Ranks whose push for the round under way is whole."""
        return {rank for rank, under in self._under.items() if under.whole and not under.reason}

    # ---- state, for checkpoints

    def states(self) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """By chunk and piece: the optimizer's state, and what corrections keep."""
        kept = self.readers.states()
        for index, chunk in enumerate(self.chunks):
            for piece in range(len(chunk.pieces)):
                yield index, piece, self.stock.state(index, piece) | kept.get((index, piece), {})

    def store_state(self, index: int, piece: int, key: str, value: Any) -> None:
        if not self.readers.store_state(index, piece, key, value):
            self.stock.store_state(index, piece, key, value)

    # ---- inside

    def _why_not(self, rank: int, push: Push, age: int) -> str:
        if self.sync:
            ago = self.round - push.round if self._agreed else age
            return f"its round was closed {ago} rounds ago" if ago else ""
        return "" if self.readers.accepts(rank, push, age) else f"it is {age} versions old"

    def _apply_one(self, rank: int, index: int, gradient: torch.Tensor, missing: frozenset[int], under: Under) -> None:
        push = under.push
        if not push.weight:
            return
        if push.weight != 1.0 or self.readers.corrects:
            gradient = torch.mul(gradient, push.weight, out=self.stock.scratch(index))
        self.readers.correct(rank, index, gradient, missing, push, under.age)
        self.stock.apply(index, gradient, missing, push.groups)

    def _comes_again(self, push: Push) -> bool:
        """Whether what a push is made of is dealt again where it is missing."""
        dealt = batches_of(push.leases)
        return bool(dealt) and not self.sync and not any(course.startswith(UPLOADS) for course in push.leases)

    def _applied_of(self, rank: int) -> int:
        """Chunks of the push under way that have been applied: the first ones, as all come in order."""
        under = self._under.get(rank)
        if under is None or under.reason or not under.push.weight:
            return 0
        return len(self._summed) if self.sync else under.parts

    def _end(self, rank: int, under: Under) -> None:
        """A push is whole."""
        under.whole = True
        if under.reason:
            self._drop(rank, under)
        elif not self.sync:
            self.version += 1
            self.applied += 1
            self._tick(rank, under)
        else:
            self._tell()

    def _drop(self, rank: int, under: Under) -> None:
        """A push that will not be applied has come to its end: its worker gets all weights, as they are now."""
        self.dropped += 1
        if self._agreed:
            self._settle(rank, under.push)
        self._tick(rank, under)
        self._seen[rank] = self.version
        for index in range(len(self.chunks)):
            self._due(rank, index)

    def _tick(self, rank: int, under: Under) -> None:
        self.clocks.count(rank, under.push.step)
        del self._under[rank]
        self._go_on()

    def _due(self, rank: int, index: int) -> None:
        """A chunk is due to a worker: now, or when the gate opens."""
        if self._open(rank):
            self._ready(rank, index)
        else:
            self._waits[rank].add(index)

    def _open(self, rank: int) -> bool:
        return self.clocks.lead(rank, rank in self._under) <= self.gate.lead or self.sync

    def _go_on(self) -> None:
        """Someone's clock has moved, or someone is gone: see who may go on."""
        for rank in list(self._waits):
            if self._waits[rank] and self._open(rank):
                due, self._waits[rank] = sorted(self._waits[rank]), set()
                if rank not in self._under:  # it gets all that has been applied since its own push
                    self._seen[rank] = self.version
                for index in due:
                    self._ready(rank, index)
        self._tell()
        if self.sync:
            for index in range(len(self.chunks)):
                self._sum_what_is_here(index)

    @property
    def forgives(self) -> bool:
        """Whether a worker may be lost."""
        return not self.sync or self._agreed

    def standing(self, table: int = 0) -> Standing:
        """What whoever closes the rounds of all shards must know of this one."""
        return Standing(
            table=table,
            servers=self._servers,
            round=self.round,
            backups=self.gate.backups if self._agreed and isinstance(self.gate, Together) else None,
            here=tuple(sorted(self.clocks.of)),
            resting=tuple(sorted(self.clocks.resting)),
            whole=tuple((rank, self._under[rank].push.life) for rank in sorted(self.whole_pushes())),
        )

    @property
    def _servers(self) -> int:
        """That hold a part of the table."""
        return len({chunk.server for chunk in self.placement.chunks})

    def _tell(self) -> None:
        if self._agreed and self.chunks:
            self._stands()

    @property
    def _agreed(self) -> bool:
        """Whether rounds are closed by one word for all shards."""
        return isinstance(self.gate, Together) and (self._replaces or self.gate.backups > 0)

    def _sum_what_is_here(self, index: int) -> None:
        """Sync of workers that stay: a chunk is summed when all have sent it, while others still come."""
        here = sorted(self.clocks.of)
        if self._agreed or not here or index in self._summed:
            return
        if all(r in self._under and index in self._under[r].kept for r in here):
            self._sum(index, [self._under[rank] for rank in here])
            self._summed.add(index)
            for rank in here:
                self._seen[rank] = self.version + 1
                self._ready(rank, index)
            if len(self._summed) == len(self.chunks):
                self._summed.clear()
                self._round_over(here)

    def _sum(self, index: int, whole: list[Under]) -> None:
        """The mean over the samples of these pushes, applied."""
        if found := mean_of(index, whole, lambda: self.stock.scratch(index)):
            self.stock.apply(index, *found, whole[0].push.groups)

    def _round_over(self, contributors: list[int]) -> None:
        self.version += 1
        self.applied += len(contributors)
        for rank in contributors:
            self.clocks.count(rank, self._under.pop(rank).push.step)
            self._seen[rank] = self.version
