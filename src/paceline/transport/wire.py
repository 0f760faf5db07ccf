"""One connected socket, plain or TLS: reads and writes with a limit, and a close that wakes whoever is in one.

The channel is built on this. One thread may read while another writes.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Sequence

from paceline.core.errors import Interrupted
from paceline.transport.traffic import Traffic, traffic_of

_GATHER = 64  # buffers per gathered write, far below the system's bound
_TIMEVAL = struct.Struct("@ll")
# Seconds of silence after which the kernel asks the other side's kernel whether it is still there: one who waits learns
# of a cut cable soon, and a connection on which nobody waits costs a packet now and then.
_OFTEN_S, _RARELY_S = 1, 30


class Wire:
    """Use it inside `with wire:`, so that a close from another thread knows who is still there.

    A plain socket waits inside the system call: a large read or write is one call, however it arrives, and
    costs no more of the processor than it must. TLS goes record by record on a non-blocking socket.
    """

    def __init__(self, sock: socket.socket, name: str) -> None:
        self.name = name  # who is at the other end
        self.tls = isinstance(sock, ssl.SSLSocket)
        self.closed = False
        self._sock = sock
        sock.setblocking(not self.tls)
        # OpenSSL's connection object must not be entered by two threads, and one may read while another
        # writes. So the lock is held for each call into it, and such a call never waits: the socket is
        # non-blocking, and waiting is done by poll, outside the lock.
        self._in_tls = threading.Lock()
        self._limits = {socket.SO_RCVTIMEO: 0.0, socket.SO_SNDTIMEO: 0.0}
        self._ask_after(_RARELY_S)
        self._state = threading.Lock()
        self._users = 0

    def __enter__(self) -> None:
        with self._state:
            if self.closed:
                raise self._gone(None)
            self._users += 1

    def __exit__(self, *error: object) -> None:
        with self._state:
            self._users -= 1
            if self.closed and not self._users:
                self._sock.close()

    def option(self, level: int, name: int, value: int) -> None:
        """Set an option of the socket."""
        with self:
            self._sock.setsockopt(level, name, value)

    def traffic(self) -> Traffic:
        with self:
            return traffic_of(self._sock)

    def write(self, views: Sequence[memoryview], limit_s: float) -> int:
        """Write some bytes, waiting for room; how many. 0: there was no room within the limit."""
        if self.tls:
            return self._non_blocking(lambda: self._sock.send(views[0]), limit_s)
        flags = self._wait_up_to(limit_s, socket.SO_SNDTIMEO)
        return self._blocking(lambda: self._sock.sendmsg(views[:_GATHER], (), flags))

    def read(self, view: memoryview, limit_s: float) -> int:
        """Read into `view`, waiting for bytes; how many. 0: none came within the limit."""
        if limit_s <= _OFTEN_S:
            return self._read(view, limit_s)
        if count := self._read(view, _OFTEN_S):
            return count
        self._ask_after(_OFTEN_S)
        count = self._read(view, limit_s - _OFTEN_S)
        self._ask_after(_RARELY_S)
        return count

    def close(self) -> None:
        with self._state:
            if self.closed:
                return
            self.closed = True
            # The plain socket's shutdown, also for TLS: SSLSocket.shutdown takes the TLS object away under a
            # thread that reads, which would then read cipher text as if it were data.
            with contextlib.suppress(OSError):
                socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
            # Threads inside wake and leave, and the last one closes the descriptor: closed under them, its
            # number could at once mean another file.
            if not self._users:
                self._sock.close()

    def _read(self, view: memoryview, limit_s: float) -> int:
        if self.tls:
            return self._non_blocking(lambda: self._sock.recv_into(view) or self._ended(), limit_s)
        flags = self._wait_up_to(limit_s, socket.SO_RCVTIMEO) | socket.MSG_WAITALL
        return self._blocking(lambda: self._sock.recv_into(view, 0, flags) or self._ended())

    def _ask_after(self, silent_s: int) -> None:
        with contextlib.suppress(OSError):  # it broke or is no TCP connection: the next read says so
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, silent_s)

    def _wait_up_to(self, limit_s: float, option: int) -> int:
        """Tell the system how long a call may wait; the flags for the call."""
        if limit_s <= 0:
            return socket.MSG_DONTWAIT
        if self._limits[option] != limit_s:
            self._limits[option] = limit_s
            seconds, micros = divmod(max(1, int(limit_s * 1e6)), 1_000_000)  # 0 would mean for ever
            self._sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(seconds, micros))
        return 0

    def _blocking(self, call: Callable[[], int]) -> int:
        try:
            return call()
        except BlockingIOError:
            if self.closed:
                raise self._gone(None) from None
            return 0
        except OSError as error:
            raise self._gone(error) from None

    def _non_blocking(self, call: Callable[[], int], limit_s: float) -> int:
        deadline = time.monotonic() + limit_s
        while True:
            try:
                with self._in_tls:
                    return call()
            except ssl.SSLWantReadError:
                event = select.POLLIN
            except ssl.SSLWantWriteError:
                event = select.POLLOUT
            except OSError as error:
                raise self._gone(error) from None
            if self.closed:
                raise self._gone(None)
            poll = select.poll()
            poll.register(self._sock, event)
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1e3):
                return 0

    def _ended(self) -> int:
        raise self._gone(None)

    def _gone(self, error: OSError | None) -> Interrupted:
        if self.closed:
            return Interrupted(f"the channel to {self.name} was closed on this side")
        if error is None or isinstance(error, ssl.SSLError):
            return Interrupted(f"{self.name} closed the channel")
        return Interrupted(f"the channel to {self.name} broke: {error.strerror or error}")
