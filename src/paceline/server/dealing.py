"""Batches dealt out by the first server, and a worker's side of it.

A worker asks for its next batch and gets a number, or the word that the epoch is over. Where all batches are lent but
some not yet done, it waits: should one of the others be lost, its batches are dealt again, with a note of which chunks
have them already (`server.lasts`). Batches that are bound to a label go to workers that have it; where nobody is left
who has it, all are told when nothing else is left.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from paceline.core.errors import Interrupted, Lost, PacelineError, TimedOut
from paceline.core.queue import Course
from paceline.data.kinds import Parts
from paceline.data.leases import Counted, Leases
from paceline.server.counting import Batch
from paceline.server.lasts import Begun
from paceline.transport.channel import Channel
from paceline.transport.wires import Wires

LANE = "deal"
_LOOK_S = 1.0
_KEPT = 64  # courses that are over


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """A batch of this course, please; `wait`: until the course is over where all are lent."""

    course: str
    total: int
    wait: bool
    bound: Parts = ()  # of the last ones of the batches


class Done(msgspec.Struct, frozen=True, tag="done"):
    """These of the batches that I was lent are done."""

    course: str
    numbers: tuple[int, ...]


class Again(msgspec.Struct, frozen=True):
    """This batch, of which a worker that was lost has left something: so many chunks of each table at each server."""

    number: int
    counted: tuple[tuple[int, int, int], ...]


_asked = msgspec.msgpack.Decoder(Ask | Done)
_dealt = msgspec.msgpack.Decoder(int | str | Again)
_encode = msgspec.msgpack.Encoder().encode
OVER, WAIT = -1, -2  # in the place of a number; words say why there is none


class Dealing:
    """The server's side: a thread for each worker.

    Args:
        pushes: whether workers push here as well. Then the batches of one that is lost are dealt again when `left` was
            called too: its last push may still be on its way in.
    """

    def __init__(self, wires: Wires, ranks: Sequence[int], *, pushes: bool = False) -> None:
        self._ends = dict.fromkeys(ranks, 1 + pushes)  # by rank: connections that are not over
        self._lives: dict[int, int] = {}  # by rank, of those who have replaced a lost worker
        self._changed = threading.Condition()
        self._labels = {rank: wires.view.members[rank].labels for rank in ranks}
        self._courses: dict[str, Leases] = {}
        self._torn: dict[int, Mapping[Batch, Begun]] = {}  # by rank, of those who are about to be gone
        # Called where so many samples that were counted for a worker's pushes are dealt again:
        self.again: Callable[[int, float], None] = lambda rank, samples: None
        self._closed = False
        self._channels = {rank: wires.mesh.channel(rank, LANE) for rank in ranks}
        self._waits: dict[int, Ask] = {}
        self._told: dict[int, float] = {}  # of these, who knows that it waits, and when it was told
        for rank, channel in self._channels.items():
            threading.Thread(target=self._listen, args=(rank, channel), name="paceline-deal", daemon=True).start()

    def came(self, rank: int, life: int, limit_s: float) -> None:
        """One who replaces a lost worker opens a connection, this one or that for pushes; when that worker is gone."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._ends[rank] or self._lives.get(rank) == life, limit_s):
                raise TimedOut(f"member {rank} is not gone after {limit_s:g} s")
            self._lives[rank] = life
            self._ends[rank] += 1

    def admit(self, rank: int, channel: Channel) -> None:
        """Deal to one who replaces a lost worker, and has come."""
        with self._changed:
            self._channels[rank] = channel
        threading.Thread(target=self._listen, args=(rank, channel), name="paceline-deal", daemon=True).start()

    def close(self) -> None:
        with self._changed:
            channels = list(self._channels.values())
        for channel in channels:
            channel.close()

    def _listen(self, rank: int, channel: Channel) -> None:
        with contextlib.suppress(PacelineError, msgspec.DecodeError):
            while True:
                message = _asked.decode(channel.listen())
                with self._changed:
                    if isinstance(message, Done):
                        if leases := self._courses.get(message.course):
                            leases.done(rank, message.numbers)
                    else:
                        self._course(message)
                        self._waits[rank] = message
                    self._answer()
        channel.close()
        with self._changed:
            self._waits.pop(rank, None)
            self._told.pop(rank, None)
        self.left(rank)

    def settle(self, rank: int, leases: Mapping[str, Sequence[int]]) -> None:
        """Pushes of this worker are everywhere: the batches that they were made of are done."""
        with self._changed:
            for course, numbers in leases.items():
                if known := self._courses.get(course):
                    known.done(rank, numbers)
            self._answer()

    def torn(self, rank: int, begun: Mapping[Batch, Begun]) -> None:
        """A worker is lost, and these of its batches count in some places: unless it has said that they are done."""
        with self._changed:
            self._torn[rank] = begun

    def left(self, rank: int) -> None:
        """One of a worker's connections is over: with the last of them, the worker is gone."""
        with self._changed:
            self._ends[rank] -= 1
            if self._ends[rank]:
                return
            torn, samples = self._torn.pop(rank, {}), 0.0
            for course, leases in self._courses.items():
                counted = {number: begun.parts for (of, number), begun in torn.items() if of == course}
                back = leases.lost(rank, counted)
                samples += sum(torn[course, number].samples for number in back if number in counted)
            if samples:
                self.again(rank, samples)
            self._answer()
            self._changed.notify_all()

    def queue(self) -> tuple[Course, ...]:
        """How far each course has come that is under way."""
        with self._changed:
            return tuple(_shown(name, leases) for name, leases in self._courses.items() if not leases.over)

    def _course(self, ask: Ask) -> Leases:
        if ask.course not in self._courses:
            self._courses[ask.course] = Leases(ask.total, ask.bound)
            for name in list(self._courses)[:-_KEPT]:
                del self._courses[name]
        return self._courses[ask.course]

    def _answer(self) -> None:
        """Answer all who can be answered now."""
        for rank, ask in sorted(self._waits.items()):
            leases = self._course(ask)
            answer: int | str | None = leases.take(rank, self._labels[rank])
            if answer is None and not (ask.wait and leases.lent):
                answer = _nobody(leases.missing(self._living()))
            if answer is None and ask.wait and not leases.over:
                if time.monotonic() - self._told.get(rank, -_LOOK_S) >= _LOOK_S:  # others get on: its limit begins anew
                    self._told[rank] = time.monotonic()
                    self._say(rank, WAIT)
                continue
            del self._waits[rank]
            self._told.pop(rank, None)
            if isinstance(answer, int) and (counted := leases.counted(answer)):
                self._say(rank, Again(answer, tuple((*at, parts) for at, parts in counted.items())))
            else:
                self._say(rank, OVER if answer is None else answer)

    def _living(self) -> set[str]:
        return {label for rank, labels in self._labels.items() if self._ends[rank] for label in labels}

    def _say(self, rank: int, answer: int | str | Again) -> None:
        with contextlib.suppress(PacelineError):  # its own thread will notice
            self._channels[rank].send(_encode(answer))


def _shown(course: str, leases: Leases) -> Course:
    loader, _, epoch = course.split("/")  # as `DealsFor` and `DealtCourse` name them
    return Course(loader=int(loader), epoch=int(epoch), parts=leases.parts())


def _nobody(missing: Mapping[str, int]) -> str | None:
    """
    >>> _nobody({"site-a": 1, "gpu": 3})
    "no worker that is left has the label 'gpu', to which 3 batches are bound, or 'site-a' (1)"
    """
    if not missing:
        return None
    (label, count), *others = sorted(missing.items())
    batches = "1 batch is" if count == 1 else f"{count} batches are"
    more = "".join(f", or {label!r} ({count})" for label, count in others)
    return f"no worker that is left has the label {label!r}, to which {batches} bound{more}"


class Dealer:
    """A worker's side."""

    def __init__(self, wires: Wires, server: int) -> None:
        self.deals = True  # epochs that begin now
        self.rest: Callable[[], None] = lambda: None  # called where this worker has nothing to do for a while
        self.counted: dict[Batch, Counted] = {}  # of what this worker was lent: where it counts already
        self._limit_s = wires.limit_s
        self._channel = wires.mesh.channel(server, LANE)
        self._asking = threading.Lock()  # one asks, and waits for the answer
        self._sending = threading.Lock()

    def take(self, course: str, total: int, *, wait: bool, waits: Callable[[], None], bound: Parts = ()) -> int | None:
        """The number of this worker's next batch; None: there is none.

        `waits` is called while it has to wait, about once a second; what it raises ends the wait.

        Raises:
            Lost: what is left is bound to labels that nobody has who is left.
        """
        with self._asking:
            try:
                self._send(Ask(course, total, wait, bound))
                answer = self._answer(waits)
            except BaseException:
                self.close()  # an answer may still come, and would be taken for that to another question
                raise
        if isinstance(answer, Again):
            self.counted[course, answer.number] = {(table, server): n for table, server, n in answer.counted}
            return answer.number
        return None if answer == OVER else answer

    def _answer(self, waits: Callable[[], None]) -> int | Again:
        deadline = time.monotonic() + self._limit_s
        waiting = False
        while True:
            try:
                answer: int | str | Again = _dealt.decode(self._channel.recv(_LOOK_S))
                if isinstance(answer, str):
                    raise Lost(f"{answer}: start members with it, and the run goes on from its last checkpoint")
                if answer != WAIT:
                    return answer
                waiting, deadline = True, time.monotonic() + self._limit_s
            except TimedOut:  # the server answers when another worker's batch is done, or it is lost
                if time.monotonic() > deadline:
                    raise TimedOut(
                        f"the other workers did not end their batches within {self._limit_s:g} s: `paceline "
                        "status` shows what each does; raise --wait-limit-s where steps take longer"
                    ) from None
            except msgspec.DecodeError as error:
                raise Interrupted(f"the server dealt what cannot be read: {error}") from None
            if waiting:
                waits()

    def done(self, course: str, numbers: Sequence[int]) -> None:
        """These of the batches that this worker was lent are trained."""
        self._send(Done(course, tuple(numbers)))
        for number in numbers:
            self.counted.pop((course, number), None)

    def close(self) -> None:
        self._channel.close()

    def _send(self, message: Ask | Done) -> None:
        with self._sending:
            self._channel.send(_encode(message))


class DealsFor:
    """A dealer for one of a worker's loaders."""

    def __init__(self, dealer: Dealer, loader: str) -> None:
        self._dealer = dealer
        self._loader = loader

    @property
    def deals(self) -> bool:
        return self._dealer.deals

    def take(self, course: str, total: int, *, wait: bool, waits: Callable[[], None], bound: Parts = ()) -> int | None:
        return self._dealer.take(self.named(course), total, wait=wait, waits=waits, bound=bound)

    def done(self, course: str, numbers: Sequence[int]) -> None:
        self._dealer.done(self.named(course), numbers)

    def named(self, course: str) -> str:
        return f"{self._loader}/{course}"

    def rest(self) -> None:
        self._dealer.rest()
