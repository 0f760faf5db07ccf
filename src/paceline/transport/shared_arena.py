"""Arenas in the shared memory of one host.

A slice is cut into one part per member. Each sums its part of everyone's slices, in the order of ranks, where they lie,
and copies the sums of the other parts from where the others made them. By itself the training thread does this between
two gradients; with a core to spare, a thread beside it.

With `outer`, a SharedArena is the inner half of a hierarchy: the host's first member carries each sum to the other
hosts' first members and publishes the result.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from paceline.core.status import Status
from paceline.transport.arena import NOTHING, Courier, Kept, Reduce
from paceline.transport.local import Links
from paceline.transport.segment import DONE, POSTED, PUBLISHED, REDUCED, Lane

_ALIGN = 16  # elements: parts begin at cache lines


class _Operation:
    """One posted slice: which part I sum, and where the other parts' sums lie."""

    def __init__(self, lane: Lane, offset: int, flat: torch.Tensor, leader: int | None) -> None:
        size, me = len(lane.segments), lane.index
        theirs = [s.data[offset : offset + flat.nbytes].view(flat.dtype) for s in lane.segments]
        cuts = [_part(flat.numel(), j, size) for j in range(size)]
        self.flat = flat
        self.kept: Sequence[Kept] = ()
        self.start = cuts[me].start
        self.out = flat[cuts[me]]
        self.theirs = theirs[1 - me] if size == 2 else None
        self.terms = [t[cuts[me]] for t in theirs]
        self.copies = [(flat[cuts[j]], theirs[j][cuts[j]]) for j in range(size) if j != me]
        self.copies = [(to, of) for to, of in self.copies if to.numel()]
        self.published = None if leader is None else theirs[leader]

    def sum(self, scratch: torch.Tensor) -> None:
        """Add everyone's part in the order of ranks, block by block so that partial sums stay in the cache."""
        if self.theirs is not None:
            done = 0
            for span, piece, factor in self.kept:
                self._add_two(slice(done, span.start - self.start))
                torch.add(self.theirs[span], piece, alpha=factor, out=self.flat[span])
                done = span.stop - self.start
            self._add_two(slice(done, self.out.numel()))
            self.kept = ()
            return
        block = scratch.nbytes // self.out.element_size()
        partial = scratch.view(self.out.dtype)
        for start in range(0, self.out.numel(), block):
            at = slice(start, min(start + block, self.out.numel()))
            total = partial[: at.stop - at.start]
            torch.add(self.terms[0][at], self.terms[1][at], out=total)
            for term in self.terms[2:]:
                total.add_(term[at])
            self.out[at].copy_(total)

    def _add_two(self, at: slice) -> None:
        if at.stop > at.start:
            torch.add(self.terms[0][at], self.terms[1][at], out=self.out[at])

    def gather(self) -> None:
        for to, of in self.copies:
            to.copy_(of)


class SharedArena:
    """An arena in the shared memory of one host."""

    def __init__(
        self,
        links: Links,
        ranks: tuple[int, ...],
        name: str,
        nbytes: int,
        *,
        limit_s: float,
        status: Status,
        outer: Reduce | None = None,
        hierarchical: bool = False,
    ) -> None:
        self._lane = Lane(links, ranks, name, nbytes, limit_s=limit_s, status=status)
        self.memory = self._lane.own.data
        self._base = self.memory.data_ptr()
        self._scratch = torch.empty(128 << 10, dtype=torch.uint8)
        self._known: dict[tuple[int, int, torch.dtype], _Operation] = {}
        self._queue: list[_Operation] = []  # posted since the last wait
        self._start = 0  # number of the first of them
        self._summed = 0  # of the queue
        self._finished = 0
        self._hierarchical = hierarchical
        self._courier = Courier(self._carry(outer), name) if outer else None
        self._leads = hierarchical and self._lane.index == 0
        self._sent_bytes = 0
        self.background = False  # somebody else drives it

    @property
    def sent_bytes(self) -> int:
        return self._sent_bytes

    @property
    def waited_s(self) -> float:
        return self._lane.waited_s + (self._courier.waited_s if self._courier else 0.0)

    def own(self, flat: torch.Tensor) -> slice:
        size = len(self._lane.ranks)
        return _part(flat.numel(), self._lane.index, size) if size == 2 else NOTHING

    def post(self, flat: torch.Tensor, kept: Sequence[Kept] = ()) -> None:
        offset = flat.data_ptr() - self._base
        key = (offset, flat.numel(), flat.dtype)
        if key not in self._known:
            self._known[key] = _Operation(self._lane, offset, flat, 0 if self._hierarchical else None)
        self._known[key].kept = kept
        self._queue.append(self._known[key])
        self._lane.own.raise_to(POSTED, self._start + len(self._queue))
        self._sent_bytes += flat.nbytes - flat.nbytes // len(self._lane.ranks)
        if not self.background:
            self.progress()

    def progress(self) -> None:
        while self._summed < len(self._queue) and self._lane.reached(POSTED, self._start + self._summed + 1):
            self._sum_next()
        while self._finished < self._summed and self._can_finish():
            self._finish_next()

    def complete(self, count: int) -> None:
        """Wait until the first `count` of what was posted since the last `wait` hold their sums."""
        while self._finished < count:
            if self._summed < count:
                self._lane.wait(POSTED, self._start + self._summed + 1)
                self._sum_next()
                self.progress()
                continue
            number = self._start + self._finished + 1
            if not self._hierarchical:
                self._lane.wait(REDUCED, number)
            elif not self._leads:
                self._lane.wait(PUBLISHED, number, only=0)
            else:
                self._lane.wait(REDUCED, number)
            self._finish_next()

    def wait(self) -> None:
        self.complete(len(self._queue))
        if self._courier:
            self._courier.wait()
        self._start += len(self._queue)
        self._queue.clear()
        self._summed = self._finished = 0
        self._lane.wait(DONE, self._start)

    def close(self) -> None:
        if self._courier:
            self._courier.close()

    def _sum_next(self) -> None:
        operation = self._queue[self._summed]
        if operation.out.numel():
            operation.sum(self._scratch)
        self._summed += 1
        self._lane.own.raise_to(REDUCED, self._start + self._summed)

    def _can_finish(self) -> bool:
        number = self._start + self._finished + 1
        if self._hierarchical and not self._leads:
            lane = self._lane
            return not (lane.segments[0].counter(PUBLISHED) - number) & 0x80000000
        return self._lane.reached(REDUCED, number)

    def _finish_next(self) -> None:
        operation = self._queue[self._finished]
        if self._hierarchical and not self._leads:
            assert operation.published is not None
            operation.flat.copy_(operation.published)
        else:
            operation.gather()
        self._finished += 1
        if self._courier:
            self._courier.post(operation.flat)
        self._lane.own.raise_to(DONE, self._start + self._finished)

    def _carry(self, outer: Reduce) -> Reduce:
        published = 0

        def carry(flat: torch.Tensor) -> None:
            nonlocal published
            outer(flat)
            published += 1
            self._lane.own.raise_to(PUBLISHED, published)

        return carry


class Background:
    """A SharedArena driven by a thread of its own while the training thread computes."""

    def __init__(self, inner: SharedArena, name: str) -> None:
        inner.background = True
        self.memory = inner.memory
        self.waited_s = 0.0
        self._inner = inner
        self._courier = Courier(lambda _: self._inner.complete(self._next()), name)
        self._begun = 0

    @property
    def sent_bytes(self) -> int:
        return self._inner.sent_bytes

    def own(self, flat: torch.Tensor) -> slice:
        return self._inner.own(flat)

    def post(self, flat: torch.Tensor, kept: Sequence[Kept] = ()) -> None:
        self._inner.post(flat, kept)
        self._courier.post(flat)

    def progress(self) -> None:
        pass

    def wait(self) -> None:
        began = time.monotonic()
        try:
            self._courier.wait()
            self._inner.wait()
        finally:
            self._begun = 0
            self.waited_s += time.monotonic() - began

    def close(self) -> None:
        self._courier.close()
        self._inner.close()

    def _next(self) -> int:
        self._begun += 1
        return self._begun


def _part(numel: int, index: int, size: int) -> slice:
    """What the member at `index` sums of a slice."""
    per = -(-numel // (size * _ALIGN)) * _ALIGN
    return slice(min(index * per, numel), min((index + 1) * per, numel))
