"""Where connections come in: the parent accepts them, as many as there are descriptors for, and turns others away.

Whoever connects costs a descriptor, in the replica for as long as the connection lasts, and nobody needs a token for
that. So a replica holds no more connections than its limit leaves room for (`room`), and one above that hears 503. When
this process itself has no descriptor left, nothing is accepted for a while: a listener that stays readable would keep
the loop busy with nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import socket
from collections.abc import Callable

_BACKLOG = 2048
_REST_S = 0.5  # in which nothing is accepted, where no descriptor is left
_LINGER_S = 1.0  # for one who is turned away: closed at once, its own request would cost it the answer
_LINGERING = 64
_OWN = 128  # descriptors that a replica needs for itself
_MOST = 1 << 20
_NONE_LEFT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def room() -> int:
    """How many connections one process may hold, after its limit of descriptors was raised as far as it can be."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST if soft == resource.RLIM_INFINITY else min(soft, _MOST)
    return most - min(_OWN, most // 2)


class Door:
    """In the loop's thread.

    Args:
        give: hands a connection on; False where nobody can take it.
        refusal: what those hear.
    """

    def __init__(
        self,
        listener: socket.socket,
        give: Callable[[socket.socket], bool],
        refusal: bytes,
        *,
        say: Callable[[str], None],
    ) -> None:
        self._listener, self._give, self._refusal, self._say = listener, give, refusal, say
        self._loop = asyncio.get_running_loop()
        self._resting: asyncio.TimerHandle | None = None
        self._told = False  # that no descriptor is left; once, until one is accepted again
        self._lingering = 0

    def open(self) -> None:
        self._listener.setblocking(False)
        self._listener.listen(_BACKLOG)
        self._read()

    def close(self) -> None:
        """Who has connected already is let in, nobody else."""
        self._accept()
        if self._resting:
            self._resting.cancel()
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()

    def _read(self) -> None:
        self._resting = None
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in _NONE_LEFT:
                    self._rest(error)
                    return
                continue  # it was reset meanwhile
            self._told = False
            if self._give(connection):
                connection.close()
            else:
                self._turn_away(connection)

    def _rest(self, error: OSError) -> None:
        if not self._told:
            self._say(f"connections cannot be taken for now: {error.strerror}")
            self._told = True
        self._loop.remove_reader(self._listener.fileno())
        self._resting = self._resting or self._loop.call_later(_REST_S, self._read)

    def _turn_away(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection.setblocking(False)
            connection.send(self._refusal)
            connection.shutdown(socket.SHUT_WR)
        if self._lingering >= _LINGERING:
            connection.close()
            return
        self._lingering += 1
        self._loop.call_later(_LINGER_S, self._let_go, connection)

    def _let_go(self, connection: socket.socket) -> None:
        self._lingering -= 1
        connection.close()
