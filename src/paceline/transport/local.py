"""Links between the members of one host: unix sockets that carry descriptors and tell at once when a member is gone.

Every pair of members on a host holds one link. A link carries no data: only descriptors of memory segments, each
under the name of its lane, and the end of file that the kernel delivers when the other process ends, however it ends.
The sockets have abstract names, so nothing is left in the file system.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import select
import socket
import struct
import threading
import time

from paceline.core.errors import AuthError, Interrupted, TimedOut
from paceline.core.view import View

_HELLO = struct.Struct("<I32s")
_MAX_LANE = 200
_TURN_S = 0.02  # for which one thread waits before another may


class Door:
    """This member's abstract unix socket, opened before the members meet so that its name can be told to all."""

    def __init__(self, token: str) -> None:
        self.name = f"paceline-{secrets.token_hex(12)}"
        self.token = token
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind("\0" + self.name)
        self._socket.listen(256)

    def accept(self, limit_s: float) -> tuple[int, socket.socket] | None:
        """The next member that knocks and holds the token: (rank, link); None after `limit_s`."""
        self._socket.settimeout(max(limit_s, 1e-3))
        try:
            link, _ = self._socket.accept()
        except TimeoutError:
            return None
        try:
            _same_user(link)
            link.settimeout(5)
            rank, proof = _HELLO.unpack(link.recv(_HELLO.size))
            if not hmac.compare_digest(proof, _proof(self.token, self.name, rank)):
                raise AuthError("wrong token")
        except (AuthError, OSError, struct.error):  # a stranger on this host: not ours to serve
            link.close()
            return None
        return rank, link

    def close(self) -> None:
        self._socket.close()


class Links:
    """Links to all other members of this host, ready when the constructor returns."""

    def __init__(self, view: View, rank: int, door: Door, limit_s: float) -> None:
        host = view.members[rank].host
        self.rank = rank
        self.ranks = tuple(m.rank for m in view.members if m.host == host)
        self._links: dict[int, socket.socket] = {}
        self._early: dict[tuple[int, str], int] = {}  # descriptors that came before their lane was asked for
        self._taking = threading.Lock()
        for other in self.ranks:
            if other < rank:
                self._links[other] = _knock(view.members[other].local, door.token, rank, limit_s)
        deadline = time.monotonic() + limit_s
        missing = {other for other in self.ranks if other > rank}
        while missing:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimedOut(
                    f"members {sorted(missing)} of this host did not link to member {rank} within {limit_s:g} s"
                )
            if (arrival := door.accept(left)) and arrival[0] in missing:
                missing.discard(arrival[0])
                self._links[arrival[0]] = arrival[1]

    def give(self, rank: int, lane: str, descriptor: int) -> None:
        """Pass a descriptor to a member."""
        try:
            socket.send_fds(self._links[rank], [lane.encode()], [descriptor])
        except OSError as error:
            raise Interrupted(f"member {rank} left: {error}") from None

    def take(self, rank: int, lane: str, limit_s: float) -> int:
        """The descriptor that a member passes under this lane's name."""
        deadline = time.monotonic() + limit_s
        while True:
            with self._taking:  # by turns: a thread may get what another one waits for
                if (rank, lane) in self._early:
                    return self._early.pop((rank, lane))
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimedOut(f"member {rank} did not open lane {lane!r} within {limit_s:g} s")
                self._take_one(rank, min(left, _TURN_S))

    def _take_one(self, rank: int, limit_s: float) -> None:
        poll = select.poll()  # select.select refuses descriptors above 1023
        poll.register(self._links[rank], select.POLLIN)
        if not poll.poll(limit_s * 1000):
            return
        try:
            name, descriptors, _, _ = socket.recv_fds(self._links[rank], _MAX_LANE, 1)
        except OSError as error:
            raise Interrupted(f"member {rank} left: {error}") from None
        if not name:
            raise Interrupted(f"member {rank} left")
        self._early[rank, name.decode()] = descriptors[0]

    def check(self, rank: int) -> None:
        """Raise Interrupted if that member has gone."""
        link = self._links[rank]
        if link.fileno() >= 0:
            poll = select.poll()
            poll.register(link, 0)  # hang-up is reported even where descriptors are still unread
            if not poll.poll(0):
                return
        gone = Interrupted(f"member {rank} left the run")
        gone.rank = rank
        raise gone

    def close(self) -> None:
        for link in self._links.values():
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
            link.close()
        for descriptor in self._early.values():
            os.close(descriptor)
        self._early.clear()


def _knock(name: str, token: str, rank: int, limit_s: float) -> socket.socket:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.settimeout(limit_s)
    try:
        link.connect("\0" + name)
        _same_user(link)
        link.send(_HELLO.pack(rank, _proof(token, name, rank)))
    except OSError as error:
        link.close()
        raise Interrupted(f"cannot reach the member behind {name!r} on this host: {error}") from None
    return link


def _proof(token: str, name: str, rank: int) -> bytes:
    return hmac.new(token.encode(), f"{name} {rank}".encode(), hashlib.sha256).digest()


def _same_user(link: socket.socket) -> None:
    _, user, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if user != os.getuid():
        raise AuthError(f"a process of user {user} asked for a link; this run belongs to user {os.getuid()}")
