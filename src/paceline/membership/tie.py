"""A connection to the scheduler that is made again whenever it breaks.

Members hold one (`line`), agents too (`agent_line`). What a break means is theirs to say; this only dials, reads and
dials again, on a thread of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from paceline.core.errors import AuthError, ConfigError, Interrupted, PacelineError
from paceline.transport.channel import Channel, connect

_DIAL_S = 2.0  # for one try
_PAUSE_S, _PAUSE_MOST_S = 0.05, 0.3  # between tries; well below the silence after which one is lost
_SEND_LIMIT_S = 5.0


class Final(Exception):
    """The other side has said a last word; do not dial again."""


class Tie:
    """Holds the connection.

    `greet` says the first words on a new channel and takes the answer; `heard` gets each later message, in the tie's
    thread. Either may raise `Final`.
    """

    def __init__(
        self,
        address: str,
        token: str,
        greet: Callable[[Channel], None],
        heard: Callable[[bytearray], None],
        limit_s: float,
        on_final: Callable[[], None] = lambda: None,
    ) -> None:
        self._address, self._token = address, token
        self._greet, self._heard, self._on_final = greet, heard, on_final
        self._lock = threading.Lock()  # of sending, and of the channel
        self._channel: Channel | None = None
        self._down_at: float | None = None
        self._closed = threading.Event()
        channel = self._first(limit_s)
        self._thread = threading.Thread(target=self._keep, args=(channel,), name="paceline-line", daemon=True)
        self._thread.start()

    @property
    def up(self) -> bool:
        return self._channel is not None

    @property
    def down_s(self) -> float:
        """For how long there has been no connection."""
        at = self._down_at
        return time.monotonic() - at if at is not None else 0.0

    def send(self, data: bytes) -> bool:
        """Whether the connection took it."""
        with self._lock:
            if self._channel is None:
                return False
            try:
                self._channel.send(data)
            except PacelineError:
                self._channel.close()
                return False
            return True

    def cut(self) -> None:
        """Break the connection, so that it is made again."""
        channel = self._channel
        if channel is not None:
            channel.close()

    def close(self) -> None:
        self._closed.set()
        dials = not self.up  # nothing is said any more, so nobody need wait for what it hears
        self.cut()
        if threading.current_thread() is not self._thread:
            self._thread.join(_PAUSE_MOST_S if dials else _DIAL_S + _SEND_LIMIT_S)

    def _first(self, limit_s: float) -> Channel:
        deadline = time.monotonic() + limit_s
        while True:
            channel = connect(self._address, self._token, left(deadline))
            try:
                self._welcome(channel)
                return channel
            except Interrupted:  # it goes down, or comes up
                channel.close()
                if not left(deadline):
                    raise
            except BaseException:
                channel.close()
                raise
            time.sleep(_PAUSE_S)

    def _welcome(self, channel: Channel) -> None:
        channel.name = f"the scheduler at {self._address}"
        channel.send_limit_s = _SEND_LIMIT_S
        channel.notice_silence()
        with self._lock:  # what others send comes after the first words
            self._greet(channel)
            self._channel, self._down_at = channel, None

    def _keep(self, channel: Channel | None) -> None:
        try:
            while not self._closed.is_set():
                if channel is None:
                    channel = self._dial()
                    continue
                try:
                    self._heard(channel.listen())
                except (Interrupted, ConfigError):  # broken, or out of step
                    self._drop(channel)
                    channel = None
        except Final:
            pass
        finally:
            if channel is not None:
                self._drop(channel)
            self._on_final()

    def _dial(self) -> Channel | None:
        pause_s = _PAUSE_S
        while not self._closed.is_set():
            channel: Channel | None = None
            try:
                channel = connect(self._address, self._token, _DIAL_S, patient=False)
                self._welcome(channel)
                return channel
            except (Interrupted, ConfigError, AuthError):  # not there yet, or a stranger on its port
                if channel is not None:
                    self._drop(channel)
            except Final:
                if channel is not None:
                    self._drop(channel)
                raise
            self._closed.wait(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_MOST_S)
        return None

    def _drop(self, channel: Channel) -> None:
        channel.close()
        with self._lock:
            if self._channel is channel:
                self._channel, self._down_at = None, time.monotonic()


def left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
