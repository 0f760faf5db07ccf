"""Map-style datasets: the turns of a course, fetched.

`MapReader` makes the batches, wherever it runs (the caller's thread, the background, worker processes);
`MapFeed` counts them where they are handed out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from paceline.data.fetch import Fetch
from paceline.data.randomness import Private, Watch
from paceline.data.sampler import Course, DealtCourse


class MapReader(Watch):
    """Batches of this member: `(batch, None)`, since the course knows all else."""

    def __init__(self, fetch: Fetch, course: Course, pad: bool) -> None:
        super().__init__()
        self.fetch, self.course, self.pad = fetch, course, pad
        if not fetch.draws:
            self.drew = False

    def __iter__(self) -> Iterator[tuple[Any, None]]:
        for turn in self.course.turns(self.pad):
            if self.drew is False:
                batch = self.fetch(turn.indices)
            else:
                batch = self.run(Private(self.course.seed(turn.number)), partial(self.fetch, turn.indices))
                self.settle()
            yield batch, None

    def tasks(self) -> Iterator[tuple[list[int], int]]:
        """The same as pairs of indices and seed, for worker processes: all but those that others may still leave.

        A wait for these would hold up what was fetched already.
        """
        for turn in self.course.turns(self.pad, wait=False):
            yield turn.indices.tolist(), self.course.seed(turn.number)


class MapFeed:
    """One epoch over a map-style dataset, from where the course stands on."""

    def __init__(self, fetch: Fetch, course: Course, pad: bool) -> None:
        self.course, self.reader = course, MapReader(fetch, course, pad)

    @property
    def over(self) -> bool:
        """Whether all of this member's batches were handed out."""
        return not self.dealt and self.course.done >= self.course.batches

    @property
    def dealt(self) -> bool:
        """Whether members are lent batches as they ask."""
        return isinstance(self.course, DealtCourse)

    def take(self, item: tuple[Any, None] | None) -> tuple[Any, int]:
        """The batch to hand out and how many real samples it has; `None` says that the reader has ended."""
        if item is None:
            if isinstance(self.course, DealtCourse):
                self.course.end()
            raise StopIteration
        real = self.course.real(self.course.done)
        self.course.done += 1
        return item[0], real

    def asked(self, *, owed: bool) -> None:
        """The user asks for the next batch; see `DealtCourse.asked`."""
        if isinstance(self.course, DealtCourse):
            self.course.asked(owed=owed)

    def leases(self) -> dict[str, tuple[int, ...]]:
        """See `DealtCourse.leases`."""
        return self.course.leases() if isinstance(self.course, DealtCourse) else {}

    def hold(self) -> Callable[[], None]:
        """See `DealtCourse.hold`."""
        return self.course.hold() if isinstance(self.course, DealtCourse) else lambda: None

    def stop(self) -> None:
        if isinstance(self.course, DealtCourse):
            self.course.stop()

    def mark(self) -> int:
        """The place up to which batches were handed out; `state` tells what it means."""
        return self.course.done

    def state(self, at: int) -> dict[str, Any]:
        return {"consumed": self.course.consumed(at), "history": self.course.history(at)}
