"""The threads of a shard's workers, as its corrections know them, and what each worker is sent.

A correction may keep something for each of those who push, by number: a worker that trains with several threads has
several. Which of them reads is known from the push that is answered; else all of them do.
"""

from __future__ import annotations

from typing import Any

import torch

from paceline.server.corrected import Corrected
from paceline.server.kept import MARK, Kept
from paceline.server.messages import Push
from paceline.server.placement import Placement
from paceline.server.stock import Stock
from paceline.staleness import make_corrections

MOST_THREADS = 1024  # of a worker
_MOST_WORKERS = 1 << 20


class Readers:
    """With the corrections of one shard, if it has any. `words` are theirs; see `paceline.staleness`."""

    def __init__(self, stock: Stock, placement: Placement, words: str) -> None:
        self.stock = stock
        self.chunks = stock.chunks
        self.placement = placement
        self._words = words
        self._threads: dict[int, int] = {}  # by rank, of those who are here: how many of its threads have pushed
        self._asks: dict[int, int] = {}  # by rank: the thread whose push is answered; none: all of them read
        self.begin_anew()

    def begin_anew(self) -> None:
        """What corrections have learnt is forgotten."""
        self.correction = make_corrections(self._words or None)
        self._corrected = Corrected(self.stock, self.correction) if self.correction else None
        self._kept = Kept(self, self.correction) if self.correction else None

    def join(self, rank: int) -> None:
        self._threads.setdefault(rank, 1)

    def leave(self, rank: int) -> None:
        self._asks.pop(rank, None)
        if self.correction:
            for worker in self._workers(rank):
                self.correction.forget(worker)
        self._threads.pop(rank, None)

    def knows(self, worker: int) -> bool:
        """Whether this is a thread of a worker that is here, by the number that corrections know it by."""
        thread, rank = divmod(worker, _MOST_WORKERS)
        if rank not in self._threads:
            return False
        self._threads[rank] = max(self._threads[rank], thread + 1)
        return True

    def asks(self, rank: int, thread: int | None) -> None:
        """Who is sent weights next: the thread of a push, or (None) all of them."""
        self._asks.pop(rank, None)
        if thread is not None:
            self._asks[rank] = thread
            self._threads[rank] = max(self._threads[rank], thread + 1)

    # ---- corrections

    @property
    def corrects(self) -> bool:
        return self._corrected is not None

    def accepts(self, rank: int, push: Push, age: int) -> bool:
        """Whether a push is applied at all."""
        return not self._corrected or self._corrected.accepts(_worker(rank, push.thread), age, push.groups)

    def correct(
        self, rank: int, index: int, gradient: torch.Tensor, missing: frozenset[int], push: Push, age: int
    ) -> None:
        """Correct the gradients of a chunk, in place."""
        if self._corrected:
            worker = _worker(rank, push.thread)
            self._corrected.push(index, gradient, missing, worker=worker, age=age, groups=push.groups)

    def weights(self, rank: int, index: int, *, corrected: bool) -> torch.Tensor:
        """What a worker is to get of a chunk now."""
        if self._kept:
            self._kept.settle()
        if not self._corrected or not corrected:
            return self.stock.weights[index]
        asks = self._asks.get(rank)
        return self._corrected.pull(index, self._workers(rank) if asks is None else [_worker(rank, asks)])

    # ---- state, for checkpoints

    def states(self) -> dict[tuple[int, int], dict[str, Any]]:
        """By chunk and piece: what corrections keep."""
        return self._kept.all() if self._kept else {}

    def store_state(self, index: int, piece: int, key: str, value: Any) -> bool:
        """Whether this was theirs; it is left out where nothing is corrected."""
        if key.startswith(MARK) and self._kept:
            self._kept.store(index, piece, key, value)
        return key.startswith(MARK)

    def _workers(self, rank: int) -> list[int]:
        return [_worker(rank, thread) for thread in range(self._threads.get(rank, 1))]


def _worker(rank: int, thread: int) -> int:
    """What corrections know a worker's thread by."""
    return rank + thread * _MOST_WORKERS
