"""What one member holds to reach the others: a door for its own host, a listener for the rest, and what grew from them.

Opened before the members meet, so that the names can be told to all; joined to the others when the view is known.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Sequence

from paceline.core.errors import ConfigError
from paceline.core.status import Status
from paceline.core.view import Member, View
from paceline.transport.address import is_loopback
from paceline.transport.channel import Channel, Listener
from paceline.transport.local import Door, Links
from paceline.transport.mesh import Mesh, visit

_LATE = 1 << 62  # above the number of any view


class Wires:
    """All connections of one member, in one view after another."""

    def __init__(self, token: str, address: str = "127.0.0.1", *, encrypt: bool | None = None) -> None:
        self._door = Door(token)
        self._listener = Listener(address, token=token, encrypt=encrypt)
        self._token = token
        self._visits: list[Channel] = []
        self._desk: Callable[[Channel], None] | None = None
        self._newest = 0  # number of the newest view that was heard of

    @property
    def name(self) -> str:
        """Tells this process from all others; process numbers repeat, as in pods that all start alike."""
        return self._door.name

    def describe(self, rank: int, host: str, labels: tuple[str, ...] = ()) -> Member:
        """This member as the others will see it."""
        return Member(
            rank=rank,
            host=host,
            pid=os.getpid(),
            address=self._listener.address,
            local=self._door.name,
            labels=labels,
        )

    def join(self, view: View, rank: int, *, limit_s: float, status: Status, late_to: Sequence[int] = ()) -> None:
        """Connect to the members of this host; channels to other hosts are opened when first used.

        Called again for each view that follows; the connections of the one before are closed. One who replaces a lost
        member of a view connects only to those of `late_to`, who let it in.
        """
        life = _LATE | secrets.randbits(62) if late_to else 0
        self.leave()
        self.view = view
        self.rank = rank
        self.limit_s = limit_s
        self.status = status
        self.links = Links(view, rank, self._door, limit_s, lambda: self._newest <= view.number, life=life, to=late_to)
        self.mesh = Mesh(view, rank, self._token, self._listener, limit_s, life=life)
        self.mesh.visit = self._desk
        if self._newest > view.number:
            self.leave()

    def leave(self) -> None:
        """Close the connections of this view: the abort. Whoever waits in one, here or elsewhere, gets Interrupted."""
        if hasattr(self, "mesh"):
            self.mesh.close()
        if hasattr(self, "links"):
            self.links.close()

    def outdated(self, number: int) -> None:
        """View `number` takes the place of older ones; from any thread."""
        self._newest = max(self._newest, number)
        if hasattr(self, "view") and self.view.number < number:
            self.leave()

    def receive(self, desk: Callable[[Channel], None] | None) -> None:
        """Who takes those from outside the run, in this view and those that follow."""
        self._desk = self.mesh.visit = desk

    def visit(self, rank: int) -> Channel:
        """A channel to the desk of a member, which may be this one."""
        channel = visit(self.view.members[rank].address, self._token, self.limit_s)
        channel.name = f"the desk of member {rank}"
        self._visits.append(channel)
        return channel

    def close(self) -> None:
        """Close everything; whoever waits for this member is told at once."""
        for channel in self._visits:
            channel.close()
        self.leave()
        self._door.close()
        self._listener.close()


def own_address(towards: str) -> str:
    """The address of this host on the way to another one: that of the interface which leads there.

    >>> own_address("127.0.0.1")
    '127.0.0.1'
    """
    try:
        family, _, _, _, where = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
    except socket.gaierror as error:
        raise ConfigError(f"cannot find the host {towards!r}: {error}") from None
    if is_loopback(str(where[0])):
        return str(where[0])
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # connecting a datagram socket sends nothing
        try:
            probe.connect(where)
        except OSError as error:
            raise ConfigError(f"no route to the host {towards!r}: {error}") from None
        return str(probe.getsockname()[0])
