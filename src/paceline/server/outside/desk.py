"""A desk: where those who are outside a run read its weights, watch it, and leave samples for it.

Every server has one, behind the listener that it has for members anyway, so that whoever holds the run's token is let
in and nobody else. The first one also answers for the run: it watches, and keeps the input queue. Where a run has no
servers, the first member has a desk at which one can watch and upload.

Nobody at a desk can hold up the training. A visitor has a thread of its own and one message of bounded size in flight;
weights are read from copies (`copies`); what cannot be read ends that visitor's connection alone; and there are only so
many visitors: when all places are taken, one who has said nothing for long makes room.
"""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import torch

from paceline.core.directory import write_private
from paceline.core.errors import ConfigError, Interrupted, PacelineError, TimedOut
from paceline.server.connection import bytes_of
from paceline.server.messages import UPLOADS
from paceline.server.outside import visits as v
from paceline.server.outside.changes import Trace, unlike
from paceline.server.outside.copies import Copies, Copy
from paceline.server.outside.inbox import Tray
from paceline.server.outside.watching import Watching
from paceline.server.service import Service
from paceline.transport.channel import Channel
from paceline.transport.wires import Wires

MAX_VISITORS = 16
MAX_TRACES = 4  # followers with a codec, for each of whom a copy of the weights is kept
FILE = "desk.json"
_IDLE_S = 60.0  # after which a visitor makes room for another, where all places are taken
_LONGEST_S = 10.0  # that one request may wait
_STUCK_S = 30.0  # that a reader may take nothing
_PIECE_BYTES = 1 << 22
_SLOWEST = 1e6  # bytes per second at which weights must be read; slower ones keep a copy from others
_SAMPLES_S = 1.0  # that one request to upload waits for room
_TAKE_S = 0.05  # that one for samples waits: short, since the same worker may have to say that others are done
_LAST_WORDS_S = 1.0


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """What desk.json holds. The file can be read by its owner only, because of the token."""

    name: str
    addresses: list[str]
    token: str


class Desk:
    """One member's desk.

    Args:
        ranks: who has a desk, the first one first.
        service: the shards here, once there are any.
        servers: whether the run has servers at all.
    """

    def __init__(
        self,
        wires: Wires,
        ranks: Sequence[int],
        *,
        directory: Path,
        token: str,
        strategy: str,
        service: Callable[[], Service | None],
        servers: bool = True,
    ) -> None:
        members = wires.view.members
        self._welcome = v.Welcome(
            name=directory.name,
            strategy=strategy,
            servers=servers,
            desks=[members[rank].address for rank in ranks],
        )
        self._service = service
        self._copies: Copies | None = None
        self._told: dict[str, int] = {}  # of the shards, when last asked
        self._tray = Tray()
        self._going: set[int] = set()  # workers that have left this desk, and not yet their shards
        self._lock = threading.Lock()
        self._places: dict[Channel, _Place] = {}
        self._ending = threading.Event()
        self._wires = wires
        self._first = wires.rank == ranks[0]
        self._file = directory / FILE
        self._watching = Watching(directory)
        if self._first:
            try:
                note = Note(name=directory.name, addresses=self._welcome.desks, token=token)
                write_private(self._file, msgspec.json.encode(note))
            except OSError as error:  # a full disk must not stop the training
                print(f"paceline: outsiders cannot look in by the run's name: {self._file}: {error}")
        wires.receive(self._visit)

    def close(self) -> None:
        """The run is over: watchers are told, and nobody else is let in."""
        if self._ending.is_set():
            return
        self._wires.receive(None)
        if self._first:
            self._file.unlink(missing_ok=True)
            self._await_outcome()
        self._ending.set()
        deadline = time.monotonic() + _LAST_WORDS_S
        while any(place.busy or place.watches for place in self._seated()) and time.monotonic() < deadline:
            time.sleep(0.01)
        for place in self._seated():
            place.channel.close()

    def _await_outcome(self) -> None:
        """The first member says how the run ended a moment after it has left its servers."""
        deadline = time.monotonic() + _LAST_WORDS_S
        while any(place.watches for place in self._seated()) and not self._watching.outcome:
            if time.monotonic() > deadline:
                return
            time.sleep(0.05)
            self._watching.again()
            self._watching.progress()

    # ---- what a push settles; with the lock of the shards held

    def settle(self, rank: int, leases: Mapping[str, Sequence[int]]) -> None:
        """A push of this worker is taken: uploads that it was made of are trained."""
        for course, numbers in leases.items():
            if course.startswith(UPLOADS) and numbers:
                self._tray.done(rank, course.removeprefix(UPLOADS), max(numbers) + 1)

    def left(self, rank: int) -> None:
        """A worker's pushes are over, and all of them are taken."""
        if rank in self._going:
            self._going.discard(rank)
            self._tray.lost(rank)

    def _lost(self, rank: int) -> None:
        """A worker takes no more samples: those that its last push does not settle are for the others."""
        service = self._service()

        def look() -> None:
            if service and service.session(rank):
                self._going.add(rank)  # its last push may still be on its way in
            else:
                self._tray.lost(rank)

        service.still(look) if service else look()

    def _seated(self) -> list[_Place]:
        with self._lock:
            return list(self._places.values())

    # ---- one visitor; in a thread of the listener's

    def _visit(self, channel: Channel) -> None:
        channel.max_message_bytes = v.MAX_VISIT_BYTES
        channel.send_limit_s = _STUCK_S
        place = _Place(channel)
        try:
            self._sit(place)
            while True:
                message = v.decode_to_desk(channel.listen())
                place.busy = True
                if answer := self._answer(place, message):
                    channel.send(v.encode(answer))
                place.since, place.busy = time.monotonic(), False
        except Interrupted:
            pass  # it went away
        except PacelineError as error:
            with contextlib.suppress(PacelineError):
                channel.send(v.encode(v.refused(error)))
                channel.drain(1.0)
        except Exception:  # a fault of ours: this visitor's connection ends, and the others go on
            traceback.print_exc()
        finally:
            place.busy = False
            with self._lock:
                self._places.pop(channel, None)
            if place.rank >= 0:
                self._lost(place.rank)
            channel.close()

    def _sit(self, place: _Place) -> None:
        """The first word, and a place for whoever has said it."""
        first = v.decode_to_desk(place.channel.recv(_LONGEST_S))
        if not isinstance(first, v.Visit):
            raise ConfigError(f"{type(first).__name__} was said before Visit")
        if first.protocol != v.PROTOCOL:
            raise ConfigError(
                f"this outsider speaks protocol {first.protocol}, the run {v.PROTOCOL}: install the same version of "
                "paceline on both sides"
            )
        place.rank = first.rank
        with self._lock:
            outsiders = [p for p in self._places.values() if p.rank < 0]
            if place.rank < 0 and len(outsiders) >= MAX_VISITORS:
                oldest = min(outsiders, key=lambda p: (p.busy, p.since))
                if oldest.busy or time.monotonic() - oldest.since < _IDLE_S:
                    raise ConfigError(
                        f"all {MAX_VISITORS} places for outsiders are taken: close() those that are not needed"
                    )
                self._places.pop(oldest.channel)
                oldest.channel.close()
            self._places[place.channel] = place
        place.channel.send(v.encode(self._welcome))

    def _answer(self, place: _Place, message: v.ToDesk) -> v.FromDesk | None:
        try:
            if isinstance(message, v.Look):
                return self._look(message)
            if isinstance(message, v.Pin):
                return self._pin(place, message)
            if isinstance(message, v.Read):
                self._read(place)
                return None
            if isinstance(message, v.Changes):
                self._changes(place, message)
                return None
            if isinstance(message, v.Watch):
                return self._watch(place, message.wait_s)
            if isinstance(message, v.Upload | v.Finish | v.Take | v.Done):
                return self._samples(place, message)
        except TimedOut as error:
            return v.refused(error)
        raise ConfigError(f"{type(message).__name__} was said out of turn")

    # ---- weights

    def _shelf(self) -> Copies | None:
        with self._lock:
            service = self._service()
            if service is not None and self._copies is None:
                self._copies = Copies(service)
            return self._copies

    def _standing(self) -> v.Standing:
        copies = self._shelf()
        return copies.standing() if copies else v.Standing(version=0, sync=True, serves=False)

    def _look(self, look: v.Look) -> v.Standing:
        if look.wait_s > 0 and (copies := self._shelf()):
            copies.await_newer(look.newer_than, min(look.wait_s, _LONGEST_S), self._ending.is_set)
        return self._standing()

    def _pin(self, place: _Place, wish: v.Pin) -> v.Pinned:
        place.copy = None
        copies = self._shelf()
        if copies is None:
            return v.Pinned(version=0)
        for other in self._seated():  # one that does not fetch its copy keeps it from the others
            if other.copy and not other.busy and time.monotonic() - other.since > _STUCK_S:
                other.copy = None
        version = copies.standing().version
        if 0 <= version <= wish.newer_than:
            return v.Pinned(version=version)
        place.copy = copy = copies.pin(wish.at, min(max(wish.limit_s, 0.0), _LONGEST_S))
        if copy is None:
            return v.Pinned(version=copies.standing().version)
        return v.Pinned(version=copy.version, mixed=copy.mixed, parts=copy.parts, made_at=copy.made_at)

    def _read(self, place: _Place) -> None:
        copy, place.copy = place.copy, None
        if copy is None:
            raise ConfigError("Read was said without a copy: say Pin before")
        _send(place.channel, [bytes_of(data) for data in copy.data])

    def _changes(self, place: _Place, wish: v.Changes) -> None:
        copy, place.copy = place.copy, None
        if copy is None:
            raise ConfigError("Changes was said without a copy: say Pin before")
        said = self._coded(place, wish.codec, copy)
        if said:
            del copy  # others may have it
            place.channel.send(v.encode(v.Changed(said[0])))
            _send(place.channel, [bytes_of(payload) for payload in said[1]])
            return
        have = wish.have if len(wish.have) == len(copy.parts) else [b""] * len(copy.parts)
        blocks = [unlike(mine, theirs) for mine, theirs in zip(copy.digests(), have)]
        if wish.codec:
            self._trace(place, wish.codec, copy)
        place.channel.send(v.encode(v.Changed([v.Difference(blocks=each) for each in blocks])))
        for data, numbers in zip(copy.data, blocks):
            view = bytes_of(data)
            _send(place.channel, [view[i * v.BLOCK_BYTES : (i + 1) * v.BLOCK_BYTES] for i in numbers])

    def _coded(self, place: _Place, words: str, copy: Copy) -> tuple[list[v.Difference], list[torch.Tensor]] | None:
        """A difference from what this follower holds; None where that is not known, or cannot be said so."""
        trace, place.trace = place.trace, None
        if not words or trace is None or not trace.fits(words, copy.parts):
            return None
        try:
            said = trace.say(copy.data)
        except PacelineError:  # nan or inf: it gets them as they are
            return None
        place.trace = trace
        return said

    def _trace(self, place: _Place, words: str, copy: Copy) -> None:
        """Keep what this follower will hold."""
        with self._lock:
            if sum(each.traces for each in self._places.values() if each is not place) >= MAX_TRACES:
                raise ConfigError(
                    f"codec={words!r}: {MAX_TRACES} others follow with a codec already, and for each a copy of the "
                    "weights is kept: follow without one, or close() one of them"
                )
            place.traces = True
        place.trace = Trace(words, copy.parts, copy.data)

    # ---- samples

    def _samples(self, place: _Place, message: v.Upload | v.Finish | v.Take | v.Done) -> v.FromDesk | None:
        if not self._first:
            raise ConfigError("the first desk is where samples are left")
        tray = self._tray
        if isinstance(message, v.Upload):
            return tray.put(message.samples, _SAMPLES_S)
        if isinstance(message, v.Finish):
            return tray.finish()
        if place.rank < 0:
            raise ConfigError("samples are for the members of the run")
        if isinstance(message, v.Take):
            return tray.take(place.rank, message, _TAKE_S)
        tray.done(place.rank, message.course, message.count)
        return None

    # ---- watching

    def _watch(self, place: _Place, wait_s: float) -> v.Progress:
        if not self._first:
            raise ConfigError("the first desk is where a run is watched")
        place.watches = True
        self._ending.wait(min(max(wait_s, 0.0), _LONGEST_S))
        service = self._service()
        if service:  # a shard that lived with a worker is gone at the end
            told = service.readings()
            self._told = {"version": self._standing().version} | {k: int(told[k]) for k in ("applied", "dropped")}
        progress = self._watching.progress(**self._told, uploads_waiting=self._tray.inbox.waiting)
        place.watches = not self._ending.is_set()
        if self._ending.is_set() and progress.state == "running":
            state = "failed" if service and service.fault else "gone"
            progress = msgspec.structs.replace(progress, state=state)
        return progress


class _Place:
    """Where a visitor sits."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.rank = -1
        self.since = time.monotonic()  # it has said nothing
        self.busy = False
        self.watches = False  # and has not been told the end yet
        self.copy: Copy | None = None
        self.trace: Trace | None = None  # of a follower with a codec
        self.traces = False  # whether it has, or had, one


def _send(channel: Channel, views: Sequence[memoryview]) -> None:
    """Bare bytes, to one who must not take for ever."""
    deadline = time.monotonic() + _STUCK_S + sum(map(len, views)) / _SLOWEST
    for view in views:
        for start in range(0, len(view), _PIECE_BYTES):
            channel.send_raw(view[start : start + _PIECE_BYTES])
            if time.monotonic() > deadline:
                raise Interrupted("the weights were read too slowly")


def read_note(directory: Path) -> Note | None:
    """What the desk of the run in this directory has left; None where there is none."""
    try:
        return msgspec.json.decode((directory / FILE).read_bytes(), type=Note)
    except FileNotFoundError:
        return None
    except PermissionError:
        raise ConfigError(
            f"{directory / FILE} belongs to another user: it holds the run's token. Ask that user for the token, and "
            'use paceline.connect("host:port", token=...)'
        ) from None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{directory / FILE} cannot be read: {error}") from None
