"""One connected socket, plain or TLS: reads and writes that never wait, a wait to be woken, a safe close.

The channel is built on this. One thread may read while another writes.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading

from paceline.core.errors import Interrupted

_GATHER = 64  # buffers per gathered write, far below the system's bound


class Wire:
    """Use it inside `with wire:`, so that a close from another thread knows who is still there."""

    def __init__(self, sock: socket.socket, name: str) -> None:
        sock.setblocking(False)
        self.name = name  # who is at the other end
        self.tls = isinstance(sock, ssl.SSLSocket)
        self.closed = False
        self._sock = sock
        # OpenSSL's connection object must not be entered by two threads, and one may read while another
        # writes. So the lock is held for each call into it, and such a call never waits: the socket is
        # non-blocking, and waiting is done by poll, outside the lock.
        self._in_tls = threading.Lock() if self.tls else contextlib.nullcontext()
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

    def write(self, views: list[memoryview]) -> tuple[int, int]:
        """How many bytes the socket took, and, where that is none, the event to wait for."""
        try:
            if self.tls:
                with self._in_tls:
                    return self._sock.send(views[0]), 0
            return self._sock.sendmsg(views[:_GATHER]), 0
        except (BlockingIOError, ssl.SSLWantWriteError):
            return 0, select.POLLOUT
        except ssl.SSLWantReadError:
            return 0, select.POLLIN
        except OSError as error:
            raise self._gone(error) from None

    def read(self, view: memoryview) -> tuple[int, int]:
        """How many bytes came, and, where that is none, the event to wait for."""
        try:
            with self._in_tls:
                count = self._sock.recv_into(view)
        except (BlockingIOError, ssl.SSLWantReadError):
            return 0, select.POLLIN
        except ssl.SSLWantWriteError:
            return 0, select.POLLOUT
        except OSError as error:
            raise self._gone(error) from None
        if not count:
            raise self._gone(None)
        return count, 0

    def wait(self, event: int, limit_s: float) -> bool:
        """Whether the event came within the limit."""
        if self.closed:
            raise self._gone(None)
        poll = select.poll()
        poll.register(self._sock, event)
        return bool(poll.poll(max(0.0, limit_s) * 1e3))

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

    def _gone(self, error: OSError | None) -> Interrupted:
        if self.closed:
            return Interrupted(f"the channel to {self.name} was closed on this side")
        if error is None or isinstance(error, ssl.SSLError):
            return Interrupted(f"{self.name} closed the channel")
        return Interrupted(f"the channel to {self.name} broke: {error.strerror or error}")
