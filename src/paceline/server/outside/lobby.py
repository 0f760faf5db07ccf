"""Where guests call: a door of the run's first member, with an address and a token of its own.

Guests dial; nobody dials them. What they can do here is bring a difference (`offers`) and fetch weights (`shelf`); the
token opens nothing else of the run, and since it stays the same when the run is resumed, so does what guests are told.
Each has a thread of its own, so that one at 1 Mbit/s keeps nobody waiting; it is cut off when it is silent for a minute
or slower than 2 kB/s. What cannot be read ends that guest's connection alone.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from paceline.core.directory import write_private
from paceline.core.errors import ConfigError, Interrupted, PacelineError, TimedOut
from paceline.server.connection import bytes_of
from paceline.server.outside import calls as c
from paceline.server.outside.offers import Offers, check_sizes
from paceline.server.outside.shelf import Shelf
from paceline.server.outside.visits import refused
from paceline.transport.address import is_loopback, split_address
from paceline.transport.channel import Channel, Listener

FILE = "guests.json"
_SILENT_S = 60.0  # after which one who does not speak, or read, is gone
_SLOWEST = 2e3  # bytes per second
_PIECE_BYTES = 1 << 16
_LONGEST_S = 10.0  # that a guest is kept waiting for weights
_LINES, _NAMES = 8, 64  # that are told at once, and of guests in all
_PLACE_S = 1.0  # that one may wait for a place
_LINGERS_S = 300.0  # in all, besides what its bytes take


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """What guests.json holds. The file can be read by its owner only, because of the token."""

    name: str
    address: str
    token: str


class Lobby:
    """Of one run.

    Args:
        at: the address to listen on, as host:port; port 0: any.
        most: guests at a time.
        model: the digest of the parameters that all must have.
        directory: of the run, where guests.json is kept; None: the token comes from the environment.
    """

    def __init__(
        self, at: str, most: int, offers: Offers, shelf: Shelf, *, model: str, numels: list[int], directory: Path | None
    ) -> None:
        self._most, self._offers, self._shelf = most, offers, shelf
        self._model, self._numels = model, numels
        self.name = directory.name if directory else ""
        token = _token(directory)
        host, _, port = at.rpartition(":")
        self._listener = Listener(host.strip("[]"), token, port=int(port))
        self.address = self._listener.address
        if directory:
            note = Note(name=self.name, address=self.address, token=token)
            write_private(directory / FILE, msgspec.json.encode(note))
        self._lock = threading.Lock()
        self._left = threading.Condition(self._lock)  # somebody has, or the run is over
        self._here: set[Channel] = set()
        self._said: list[str] = []
        self._known: set[str] = set()  # guests that were mentioned
        self._closed = False
        self._listener.hand_to(self._visit)

    @property
    def line(self) -> str:
        """Where it is."""
        near = " (of this host only)" if is_loopback(split_address(self.address)[0]) else ""
        return f"guests are let in at {self.address}{near}, at most {self._most} at a time; {FILE} has the token"

    @property
    def here(self) -> int:
        """Guests that are talking now."""
        with self._lock:
            return len(self._here)

    def close(self) -> None:
        """The run is over: nobody is let in any more."""
        self._closed = True
        self._listener.close()
        with self._left:
            here = list(self._here)
            self._left.notify_all()
        for channel in here:
            channel.close()

    def said(self) -> list[str]:
        """What the person who watches should know, since the last time."""
        if not self._said:
            return []
        with self._lock:
            said, self._said = self._said, []
        return said

    # ---- one guest; in a thread of the listener's

    def _visit(self, channel: Channel) -> None:
        channel.max_message_bytes = c.MAX_CALL_BYTES
        channel.send_limit_s = _SILENT_S
        try:
            with self._left:  # a place that was just left, by this guest too, is free in a moment
                self._left.wait_for(lambda: len(self._here) < self._most or self._closed, _PLACE_S)
                full = len(self._here) >= self._most or self._closed
                if not full:
                    self._here.add(channel)
            if full:
                raise TimedOut(f"all {self._most} places for guests are taken: come again")
            self._talk(channel)
        except Interrupted as error:
            if isinstance(error, TimedOut):
                _say(channel, error)
        except PacelineError as error:
            _say(channel, error)
        except Exception:  # a fault of ours: this guest's connection ends, and the others go on
            traceback.print_exc()
        finally:
            with self._left:
                self._here.discard(channel)
                self._left.notify()
            channel.close()

    def _talk(self, channel: Channel) -> None:
        call = c.decode_to_run(channel.recv(_SILENT_S))
        if not isinstance(call, c.Call):
            raise ConfigError(f"{type(call).__name__} was said before Call")
        if call.protocol != c.PROTOCOL:
            raise ConfigError(
                f"this guest speaks protocol {call.protocol}, the run {c.PROTOCOL}: install the same version of "
                "paceline on both sides"
            )
        if call.model != self._model:
            raise ConfigError(
                "the guest's model is not the run's: parameters that are trained must have the same names and shapes, "
                "and those that are not the same values. Use the same script, and load the same weights before training"
            )
        if not 0 < len(call.guest) <= 64 or not call.guest.isascii() or not call.guest.isalnum():
            raise ConfigError("a guest's name has 1 to 64 letters and digits")  # it goes to a person's terminal
        channel.send(c.encode(msgspec.structs.replace(self._offers.asked(call), name=self.name)))
        deadline = time.monotonic() + _LINGERS_S
        while True:
            message = c.decode_to_run(channel.recv(_SILENT_S))
            if isinstance(message, c.Bring):
                deadline += self._bring(channel, call.guest, message)
            elif isinstance(message, c.Fetch):
                deadline += self._fetch(channel, message)
            else:
                raise ConfigError("Call was said twice")
            if time.monotonic() > deadline:
                raise TimedOut("this call has lasted long enough: call again")

    def _bring(self, channel: Channel, guest: str, bring: c.Bring) -> float:
        check_sizes(bring.sizes, self._numels, c.make_code(bring.codec))
        data = torch.empty(sum(bring.sizes), dtype=torch.uint8)
        spent = _slowly(bytes_of(data), lambda piece: channel.recv_raw_into(piece, _SILENT_S))
        thanks = self._offers.bring(guest, bring, data)
        with self._lock:
            if thanks.stale and len(self._said) < _LINES:
                self._said.append(f"what guest {guest[:8]} brought is left out: {thanks.why}")
            elif thanks.taken and guest not in self._known and len(self._known) < _NAMES:
                self._known.add(guest)
                self._said.append(
                    f"guest {guest[:8]} has brought its first difference, of {bring.samples:,.0f} samples"
                )
        channel.send(c.encode(thanks))
        return spent

    def _fetch(self, channel: Channel, fetch: c.Fetch) -> float:
        words = c.make_weights_code(fetch.code).words
        wait_s = min(max(fetch.wait_s, 0.0), _LONGEST_S)
        wrapped = self._shelf.fetch(words, fetch.newer_than, wait_s, _LONGEST_S)
        if wrapped is None:
            channel.send(c.encode(c.Parcel(round=self._shelf.round)))
            return 0.0
        channel.send(c.encode(c.Parcel(round=wrapped.round, sizes=wrapped.sizes)))
        return _slowly(bytes_of(wrapped.data), channel.send_raw)


def _slowly(view: memoryview, move: Callable[[memoryview], object]) -> float:
    """Move bytes piece by piece, however slow the link is, within reason; the seconds that it took."""
    began = time.monotonic()
    for start in range(0, len(view), _PIECE_BYTES):
        move(view[start : start + _PIECE_BYTES])
        if time.monotonic() - began > _SILENT_S + start / _SLOWEST:
            raise Interrupted(f"a guest's link is slower than {_SLOWEST:g} bytes per second")
    return time.monotonic() - began


def _say(channel: Channel, error: PacelineError) -> None:
    with contextlib.suppress(PacelineError):
        channel.send(c.encode(refused(error)))
        channel.drain(1.0)


def _token(directory: Path | None) -> str:
    """What the user gives, else that of the run's last start, else a new one."""
    if given := os.environ.get(c.TOKEN, ""):
        return given
    if directory is None:
        raise ConfigError(f"guests need a token: set {c.TOKEN}")
    note = read_note(directory / FILE)
    return note.token if note else secrets.token_hex(32)


def read_note(path: Path) -> Note | None:
    """What a guests.json says; None where there is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Note)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
