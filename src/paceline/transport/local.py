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
from collections.abc import Callable, Sequence

from paceline.core.errors import AuthError, Interrupted, TimedOut
from paceline.core.view import View

_HELLO = struct.Struct("<QI32s")  # number of the view, rank, proof
_MAX_LANE = 200
_TURN_S = 0.02  # for which one thread waits before another may, or before a close is noticed


class Door:
    """This member's abstract unix socket, opened before the members meet so that its name can be told to all."""

    def __init__(self, token: str) -> None:
        self.name = f"paceline-{secrets.token_hex(12)}"
        self.token = token
        self._early: dict[tuple[int, int], socket.socket] = {}  # by view and rank: of a view that is not formed here
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind("\0" + self.name)
        self._socket.listen(256)
        self._accepting = threading.Lock()

    def links(self, view: int, ranks: set[int], limit_s: float) -> dict[int, socket.socket]:
        """Those of `ranks` that have knocked for this view, after waiting up to `limit_s` for one more."""
        arrival = self._accept(limit_s)
        if arrival:
            number, rank, link = arrival
            if old := self._early.pop((number, rank), None):
                old.close()
            self._early[number, rank] = link
        for number, rank in [key for key in self._early if key[0] < view]:
            self._early.pop((number, rank)).close()
        return {rank: self._early.pop((view, rank)) for rank in ranks if (view, rank) in self._early}

    def link(self, life: int, rank: int, limit_s: float) -> socket.socket:
        """That of one who replaces a lost member, and knocks with its life in the place of a view's number."""
        deadline = time.monotonic() + limit_s
        while True:
            with self._accepting:
                if (life, rank) in self._early:
                    return self._early.pop((life, rank))
                if arrival := self._accept(_TURN_S):
                    self._early[arrival[:2]] = arrival[2]
                elif time.monotonic() > deadline:
                    raise TimedOut(f"member {rank} did not link to this one within {limit_s:g} s")

    def _accept(self, limit_s: float) -> tuple[int, int, socket.socket] | None:
        """The next member that knocks and holds the token: (view, rank, link); None after `limit_s`."""
        self._socket.settimeout(max(limit_s, 1e-3))
        try:
            link, _ = self._socket.accept()
        except TimeoutError:
            return None
        try:
            _same_user(link)
            link.settimeout(5)
            view, rank, proof = _HELLO.unpack(link.recv(_HELLO.size))
            if not hmac.compare_digest(proof, _proof(self.token, self.name, view, rank)):
                raise AuthError("wrong token")
        except (AuthError, OSError, struct.error):  # a stranger on this host: not ours to serve
            link.close()
            return None
        return view, rank, link

    def close(self) -> None:
        for link in self._early.values():
            link.close()
        self._early.clear()
        self._socket.close()


class Links:
    """Links to all other members of this host, ready when the constructor returns.

    Where members come and go, `wanted` says whether the view still counts; without it nobody would end the wait for a
    member that is lost before it has linked. One who replaces a lost member (`life`) links to those of `to`, who
    `admit` it.
    """

    def __init__(
        self,
        view: View,
        rank: int,
        door: Door,
        limit_s: float,
        wanted: Callable[[], bool] = lambda: True,
        *,
        life: int = 0,
        to: Sequence[int] = (),
    ) -> None:
        host = view.members[rank].host
        self.rank = rank
        self._door = door
        self.ranks = tuple(m.rank for m in view.members if m.host == host)
        self._links: dict[int, socket.socket] = {}
        self._early: dict[tuple[int, str], int] = {}  # descriptors that came before their lane was asked for
        self._taking = threading.Lock()
        deadline = time.monotonic() + limit_s
        try:
            for other in self.ranks:
                if other in to if life else other < rank:
                    self._links[other] = _knock(view, other, door.token, rank, limit_s, life or view.number)
            while not life and (missing := {other for other in self.ranks if other > rank} - self._links.keys()):
                left = deadline - time.monotonic()
                if not wanted():
                    raise Interrupted(f"view {view.number} is over before it was formed")
                if left <= 0:
                    raise TimedOut(
                        f"members {sorted(missing)} of this host did not link to member {rank} within {limit_s:g} s"
                    )
                self._links |= door.links(view.number, missing, min(left, _TURN_S))
        except BaseException:
            self.close()
            raise

    def admit(self, rank: int, life: int, limit_s: float) -> None:
        """Link to one who replaces a lost member; what came from the one before it is dropped."""
        link = self._door.link(life, rank, limit_s)
        with self._taking:
            old, self._links[rank] = self._links.get(rank), link
            for key in [key for key in self._early if key[0] == rank]:
                os.close(self._early.pop(key))
        if old:
            old.close()

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
        try:
            poll = select.poll()  # select.select refuses descriptors above 1023
            poll.register(self._links[rank], select.POLLIN)
            if not poll.poll(limit_s * 1000):
                return
            name, descriptors, _, _ = socket.recv_fds(self._links[rank], _MAX_LANE, 1)
        except (OSError, ValueError) as error:  # ValueError: it was closed here
            raise Interrupted(f"member {rank} left: {error}") from None
        if not name:
            raise Interrupted(f"member {rank} left")
        self._early[rank, name.decode()] = descriptors[0]

    def check(self, rank: int) -> None:
        """Raise Interrupted if that member has gone."""
        with contextlib.suppress(OSError, ValueError):  # it was closed here
            poll = select.poll()
            poll.register(self._links[rank], 0)  # hang-up is reported even where descriptors are still unread
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


def _knock(view: View, at: int, token: str, rank: int, limit_s: float, number: int) -> socket.socket:
    name = view.members[at].local
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.settimeout(limit_s)
    try:
        link.connect("\0" + name)
        _same_user(link)
        link.send(_HELLO.pack(number, rank, _proof(token, name, number, rank)))
    except OSError as error:
        link.close()
        gone = Interrupted(f"cannot reach member {at} on this host: {error}")
        gone.rank = at
        raise gone from None
    return link


def _proof(token: str, name: str, view: int, rank: int) -> bytes:
    return hmac.new(token.encode(), f"{name} {view} {rank}".encode(), hashlib.sha256).digest()


def _same_user(link: socket.socket) -> None:
    _, user, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if user != os.getuid():
        raise AuthError(f"a process of user {user} asked for a link; this run belongs to user {os.getuid()}")
