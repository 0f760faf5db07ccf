"""What the system knows of a TCP connection: how much of what was sent has arrived, and how long that took."""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple

_INFO_BYTES = 192
_ACKED = struct.Struct("@Q")  # at 120 of Linux' struct tcp_info: bytes
_TIMES = struct.Struct("@QQ")  # at 168: microseconds with something on its way, and of these without room over there


class Traffic(NamedTuple):
    """Of a connection, since it was made.

    >>> Traffic(3_000_000, 3.0).plus(Traffic(1_000_000, 1.0))
    Traffic(sent_bytes=4000000, busy_s=4.0)
    """

    sent_bytes: int = 0  # that have arrived
    busy_s: float = 0.0  # while something was on its way; the time in which the other side took nothing is left out

    def plus(self, other: Traffic) -> Traffic:
        return Traffic(self.sent_bytes + other.sent_bytes, self.busy_s + other.busy_s)


def traffic_of(sock: socket.socket) -> Traffic:
    """Nothing where the system does not say, as on anything but Linux."""
    option = getattr(socket, "TCP_INFO", None)
    if option is None or sock.family == socket.AF_UNIX:
        return Traffic()
    info = sock.getsockopt(socket.IPPROTO_TCP, option, _INFO_BYTES)
    if len(info) < _INFO_BYTES:
        return Traffic()
    (acked,), (busy, no_room) = _ACKED.unpack_from(info, 120), _TIMES.unpack_from(info, 168)
    return Traffic(acked, 1e-6 * max(busy - no_room, 0))
