"""The input queue of a run: samples from outside, lent to workers.

Each sample goes to one worker. Where workers go their own pace, one asks for a batch and gets the next samples, lent:
those of a worker that is lost before it has trained them are given to the others. A push settles what it was made of,
so each sample is trained once. Where workers keep step, a round has a batch for each,
and a worker for which there is none at the end gets a filler that counts for nothing.

A batch is full, but for the last ones of a course: when no more samples will come, or the course has a limit. All that
is held, waiting or lent, is bounded; `Inbox` waits for nothing, `Tray` does, with limits.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

from paceline.core.errors import ConfigError
from paceline.server.outside.samples import check
from paceline.server.outside.visits import Given, Soon, Take, Taken

MAX_BYTES = 256 << 20
MAX_SAMPLES = 1 << 16
_KEPT = 16  # courses


class _Course:
    def __init__(self, limit: int) -> None:
        self.left = limit or 1 << 62  # samples that it may still have
        self.lent: dict[int, deque[list[bytes]]] = {}  # by rank, batch by batch
        self.done: dict[int, int] = {}  # by rank: batches
        self.rounds: dict[int, _Round] = {}
        self.next = 0


class _Round:
    def __init__(self, found: list[bytes], size: int) -> None:
        self.found = found
        self.size = size
        self.due = set(range(size))  # ranks that have not fetched their part

    def part(self, rank: int) -> Given:
        mine = self.found[rank :: self.size]
        return Given(samples=mine or self.found[:1], real=len(mine), total=len(self.found))


class Inbox:
    """The queue.

    >>> inbox = Inbox()
    >>> [inbox.put(sample) for sample in (b"a", b"b", b"c")]
    [True, True, True]
    >>> ask = Take(course="0", number=0, batch_size=2, size=1)
    >>> inbox.take(0, ask).samples, inbox.take(1, ask)
    ([b'a', b'b'], None)
    >>> inbox.lost(0); inbox.finish()
    >>> inbox.take(1, ask).samples, inbox.take(1, ask).samples
    ([b'a', b'b'], [b'c'])
    """

    def __init__(self, max_bytes: int = MAX_BYTES, max_samples: int = MAX_SAMPLES) -> None:
        self.finished = False
        self.nbytes = self.count = 0  # of all that is held
        self._max = max_bytes, max_samples
        self._waiting: deque[bytes] = deque()
        self._courses: dict[str, _Course] = {}

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def put(self, sample: bytes) -> bool:
        """Whether there was room."""
        if self.finished:
            raise ConfigError("finish_uploads was called: this run takes no more samples")
        if len(sample) > self._max[0]:
            raise ConfigError(f"a sample of {len(sample)} bytes is longer than the queue, which has {self._max[0]}")
        if self.nbytes + len(sample) > self._max[0] or self.count >= self._max[1]:
            return False
        self._waiting.append(sample)
        self.nbytes += len(sample)
        self.count += 1
        return True

    def finish(self) -> None:
        """No more samples will come."""
        self.finished = True

    def take(self, rank: int, ask: Take) -> Given | None:
        """Samples for a worker; none: the course is over; None: there are not enough yet."""
        if ask.batch_size < 1 or ask.size < 1 or ask.number < 0 or ask.limit < 0 or rank < 0:
            raise ConfigError(f"member {rank} asks for samples by {ask}")
        course = self._course(rank, ask)
        if ask.size > 1:
            return self._of_round(course, rank, ask)
        found = self._find(course, ask.batch_size)
        if found is None or (not found and any(course.lent.values())):
            return None  # some that are lent may come back
        if found:
            course.lent.setdefault(rank, deque()).append(found)
        return Given(samples=found, real=len(found), total=len(found))

    def done(self, rank: int, course: str, count: int) -> None:
        """A worker has trained so many of its batches of a course, counted from its first."""
        if (known := self._courses.get(course)) and (lent := known.lent.get(rank)):
            while lent and known.done.get(rank, 0) < count:
                self._release(lent.popleft())
                known.done[rank] = known.done.get(rank, 0) + 1

    def lost(self, rank: int) -> None:
        """A worker is gone: what it had not trained comes first for the others."""
        for course in self._courses.values():
            back = [sample for batch in course.lent.pop(rank, ()) for sample in batch]
            course.done.pop(rank, None)
            course.left += len(back)
            self._waiting.extendleft(reversed(back))

    def _course(self, rank: int, ask: Take) -> _Course:
        if ask.course not in self._courses:
            self._courses[ask.course] = _Course(ask.limit)
            for name in list(self._courses)[:-_KEPT]:
                self._forget(name)
        for name, course in self._courses.items():
            if name != ask.course:  # it has left that loop: nobody is to wait for what it was lent there
                for batch in course.lent.pop(rank, ()):
                    self._release(batch)
                for number in list(course.rounds):
                    self._fetched(course, number, rank)
        return self._courses[ask.course]

    def _of_round(self, course: _Course, rank: int, ask: Take) -> Given | None:
        if rank >= ask.size:
            raise ConfigError(f"member {rank} asks for its part of a round of {ask.size}")
        if ask.number not in course.rounds:
            if ask.number != course.next:
                raise ConfigError(f"member {rank} asks for round {ask.number} after round {course.next - 1}")
            found = self._find(course, ask.batch_size * ask.size)
            if not found:
                return None if found is None else Given(samples=[])
            course.rounds[ask.number] = _Round(found, ask.size)
            course.next += 1
        given = course.rounds[ask.number].part(rank)
        self._fetched(course, ask.number, rank)
        return given

    def _fetched(self, course: _Course, number: int, rank: int) -> None:
        course.rounds[number].due.discard(rank)
        if not course.rounds[number].due:
            self._release(course.rounds.pop(number).found)

    def _find(self, course: _Course, count: int) -> list[bytes] | None:
        """The next samples: so many, or fewer at the end; None: they have not come yet."""
        count = min(count, course.left)
        if len(self._waiting) < count:
            if not self.finished:
                return None
            count = len(self._waiting)
        course.left -= count
        return [self._waiting.popleft() for _ in range(count)]

    def _forget(self, name: str) -> None:
        course = self._courses.pop(name)
        for batches in (*course.lent.values(), *([each.found] for each in course.rounds.values())):
            for batch in batches:
                self._release(batch)

    def _release(self, samples: Sequence[bytes]) -> None:
        self.nbytes -= sum(map(len, samples))
        self.count -= len(samples)


class Tray:
    """An inbox for several threads, which wait for room and for samples, each for a limited time."""

    def __init__(self, inbox: Inbox | None = None) -> None:
        self.inbox = inbox or Inbox()
        self._open = False  # the run's script has asked for samples
        self._like = b""
        self._changed = threading.Condition()

    def put(self, samples: list[bytes], wait_s: float) -> Taken:
        """Take what fits within the limit, from the first sample on."""
        deadline = time.monotonic() + wait_s
        with self._changed:
            if not self._changed.wait_for(lambda: self._open, wait_s):
                return Taken(0, "its script has not asked for samples: it does so with run.uploads()", asked=False)
        for sample in samples:
            check(sample, self._like)
        with self._changed:
            for number, sample in enumerate(samples):
                while not self.inbox.put(sample):
                    if (left := deadline - time.monotonic()) <= 0 or not self._changed.wait(left):
                        return Taken(number, "its input queue is full: it trains more slowly than samples come")
                self._changed.notify_all()
        return Taken(len(samples))

    def finish(self) -> Taken:
        with self._changed:
            self.inbox.finish()
            self._changed.notify_all()
        return Taken(0)

    def take(self, rank: int, ask: Take, wait_s: float) -> Given | Soon:
        deadline = time.monotonic() + wait_s
        with self._changed:
            if not self._open:
                self._open, self._like = True, ask.like
                self._changed.notify_all()
            while (given := self.inbox.take(rank, ask)) is None:
                if (left := deadline - time.monotonic()) <= 0 or not self._changed.wait(left):
                    return Soon()
            self._changed.notify_all()  # a round that everyone has makes room
            return given

    def done(self, rank: int, course: str, count: int) -> None:
        with self._changed:
            self.inbox.done(rank, course, count)
            self._changed.notify_all()

    def lost(self, rank: int) -> None:
        with self._changed:
            self.inbox.lost(rank)
            self._changed.notify_all()
