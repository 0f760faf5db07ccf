"""A guest's side of one call: it dials, says what it has, and hangs up. Every wait has a limit."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from paceline.codecs import Codec
from paceline.core.errors import AuthError, ConfigError, Interrupted
from paceline.server.connection import bytes_of
from paceline.server.outside import calls as c
from paceline.server.outside.lobby import FILE, read_note
from paceline.server.outside.offers import check_sizes
from paceline.transport.address import split_address
from paceline.transport.channel import Channel, connect

_CONNECT_S = 20.0
_SILENT_S = 60.0  # of the run, at any moment
CALL_BYTES = 8192  # that a call takes besides its payloads: TLS, the words, the sizes
_TRY_BYTES = 512  # where nobody answers
_HEADERS = 1.04  # of packets, by what they carry


class Where:
    """A run's door, as a user names it: host:port, with the token in the environment, or a copy of guests.json."""

    def __init__(self, at: str) -> None:
        self.at = at
        if isinstance(at, str) and re.search(r":\d+$", at):
            split_address(at)
        elif not isinstance(at, str) or (not at.endswith(".json") and not Path(at).is_dir()):
            raise ConfigError(
                f"guest(at={at!r}): the address of the run as host:port, with {c.TOKEN} set, or a copy of its {FILE}"
            )

    def check(self) -> None:
        """ConfigError where it is clear beforehand that nothing will be found. A file may still be copied there."""
        if re.search(r":\d+$", self.at) and not os.environ.get(c.TOKEN, ""):
            raise ConfigError(f"guest(at={self.at!r}): set {c.TOKEN} to the token that the run's {FILE} has")

    def find(self) -> tuple[str, str]:
        """Address and token, as they are now: the file may have been copied anew."""
        self.check()
        if re.search(r":\d+$", self.at):
            return self.at, os.environ[c.TOKEN]
        path = Path(self.at)
        note = read_note(path / FILE if path.is_dir() else path)
        if note is None:
            raise Interrupted(f"guest(at={self.at!r}): there is no such file: copy the run's {FILE} there")
        return note.address, os.environ.get(c.TOKEN, "") or note.token


class Calling:
    """One call. A context manager; `spent` is told what goes over the link, about."""

    def __init__(self, where: Where, call: c.Call, spent: Callable[[int], object]) -> None:
        address, token = where.find()
        spent(_TRY_BYTES)
        try:
            self._channel = channel = connect(address, token, _CONNECT_S, patient=False)
        except AuthError:  # which tells of the tokens of members
            raise AuthError(
                f"the token is not that of the run at {address}, or another program listens there: take the one in "
                f"its {FILE}"
            ) from None
        self._spent, self._told = spent, 0
        spent(CALL_BYTES - _TRY_BYTES)
        channel.name = f"the run at {address}"
        channel.max_message_bytes = c.MAX_CALL_BYTES
        channel.send_limit_s = _SILENT_S
        try:
            channel.send(c.encode(call))
            self.reply = c.decode_from_run(channel.recv(_SILENT_S), c.Reply)
        except BaseException:
            self.close()
            raise

    def bring(self, bring: c.Bring, data: torch.Tensor) -> c.Thanks:
        with self._counted() as channel:
            channel.send(c.encode(bring))
            _pieces(bytes_of(data), channel.send_raw)
            return c.decode_from_run(channel.recv(_SILENT_S), c.Thanks)

    def fetch(
        self, code: Codec, numels: list[int], newer_than: int, wait_s: float
    ) -> tuple[int, list[int], torch.Tensor] | None:
        """Round, sizes and bytes of newer weights, if there are any within so many seconds."""
        deadline = time.monotonic() + wait_s
        with self._counted() as channel:
            while True:
                left = max(0.0, deadline - time.monotonic())
                channel.send(c.encode(c.Fetch(code=code.words, newer_than=newer_than, wait_s=left)))
                parcel = c.decode_from_run(channel.recv(_SILENT_S), c.Parcel)
                if parcel.sizes:
                    break
                if time.monotonic() >= deadline:
                    return None
            check_sizes(parcel.sizes, numels, code)
            data = torch.empty(sum(parcel.sizes), dtype=torch.uint8)
            _pieces(bytes_of(data), lambda piece: channel.recv_raw_into(piece, _SILENT_S))
            return parcel.round, parcel.sizes, data

    @property
    def sent_bytes(self) -> int:
        return self._channel.sent_bytes

    def close(self) -> None:
        self._tell_spent()
        self._channel.close()

    def __enter__(self) -> Calling:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _counted(self) -> Iterator[Channel]:
        try:
            yield self._channel
        finally:
            self._tell_spent()

    def _tell_spent(self) -> None:
        total = self._channel.sent_bytes + self._channel.received_bytes
        self._spent(round((total - self._told) * _HEADERS))
        self._told = total


def call_bytes(payloads: int) -> int:
    """What a call with payloads of so many bytes takes, about."""
    return CALL_BYTES + round(payloads * _HEADERS)


def _pieces(view: memoryview, move: Callable[[memoryview], object]) -> None:
    for start in range(0, len(view), 1 << 16):
        move(view[start : start + (1 << 16)])
