"""Samples that come from outside while the run goes on: `run.uploads()`.

Every sample goes to one member. Where members keep step they get a global batch together, as from a stream; where each
goes its own pace, each asks for its own. There is no order to shuffle and nothing to begin anew: what was taken is
gone, and an epoch ends when its limit is reached or no more will come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

from paceline.data.randomness import Private, Watch, mix
from paceline.data.stream import Cut


class Queue(Protocol):
    """Where samples are asked for."""

    def take(
        self, course: str, number: int, batch_size: int, waits: Callable[[], None]
    ) -> tuple[list[Any], int, int] | None:
        """Samples for a batch, how many of them count, and how many all members have; None: there are no more.

        `waits` is called where they are waited for.
        """

    def done(self, course: str, count: int) -> None:
        """So many batches, counted from the first, are trained."""

    def rest(self) -> None:
        """This member has nothing to do until samples come."""


class Uploads:
    """A dataset for `run.loader`: the samples that outsiders upload."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue


class UploadReader(Watch):
    """Batches of this member: `(batch, (real, total))`."""

    def __init__(self, queue: Queue, cut: Cut, waits: Callable[[], None]) -> None:
        super().__init__()
        self.queue, self.cut, self.waits = queue, cut, waits
        self.course = f"{cut.seed}/{cut.epoch}"
        self.taken = 0  # batches
        if cut.collate is None:
            self.drew = False

    def __iter__(self) -> Iterator[tuple[Any, tuple[int, int]]]:
        cut = self.cut
        while (found := self.queue.take(self.course, self.taken, cut.batch_size, self.waits)) is not None:
            samples, real, total = found
            self.taken += 1
            finish = partial(cut.finish, samples, f"uploaded samples of batch {self.taken - 1}")
            own = Private(mix(cut.seed, cut.epoch, "collate", self.taken, cut.rank))
            batch = finish() if cut.collate is None else self.run(own, finish)
            if cut.collate is not None:
                self.settle()
            yield batch, (real, total)


class UploadFeed:
    """One epoch of uploads."""

    def __init__(self, queue: Queue, cut: Cut) -> None:
        self._queue = queue
        self.reader = UploadReader(queue, cut, self._wait)
        self.done = 0  # batches that were handed out
        self.consumed = 0
        self._told = 0
        self._waiting = False

    def take(self, item: tuple[Any, tuple[int, int]] | None) -> tuple[Any, int]:
        """The batch to hand out and how many real samples it has; `None` says that the reader has ended."""
        self._waiting = False
        if item is None:
            raise StopIteration
        batch, (real, total) = item
        self.done += 1
        self.consumed += total
        return batch, real

    def asked(self) -> None:
        """The user asks for a batch: those that were handed out are trained."""
        if self.done > self._told:
            self._told = self.done
            self._queue.done(self.reader.course, self.done)
        if self._waiting:
            self._rest_if_idle()

    def mark(self) -> int:
        return self.consumed

    def state(self, at: int) -> dict[str, Any]:
        return {"consumed": at}

    def _wait(self) -> None:
        self._waiting = True
        self._rest_if_idle()

    def _rest_if_idle(self) -> None:
        """Called by whoever fetches and by whoever trains: the later of both finds that there is nothing to train."""
        if self.reader.taken == self.done == self._told:
            self._queue.rest()


class UploadSource:
    """The samples that outsiders upload."""

    in_memory = True  # fetching them in other processes gains nothing
    evenly = "uploads go to the members as they come"
    batches = None  # nobody knows
    length = None

    def __init__(self, dataset: Uploads, cut: Callable[[int, int], Cut]) -> None:
        self._queue, self._cut = dataset.queue, cut

    def left(self, seed: int, epoch: int, state: dict[str, Any]) -> int | None:
        return None

    def begin(self, seed: int, epoch: int, state: dict[str, Any]) -> UploadFeed:
        return UploadFeed(self._queue, self._cut(seed, epoch))
