"""A switch in user space, for `Hosts`: carries frames between TAP devices after a delay.

The kernel's own delay (netem) is often missing. A device `a<i>` stands for host i; what is read from it is
written, a fixed time later, to the device of the host that the frame's destination address names, or to all
others. Frames keep their offload headers, so that a burst of 64 KiB passes as one; the checksum of such a frame is not
filled in yet, so that a byte can be flipped without TCP noticing.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import os
import select
import struct
import time

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_TAP, _NO_PACKET_INFO, _VNET_HEADER = 0x0002, 0x1000, 0x4000
_CHECKSUM, _SEGMENTS_4, _SEGMENTS_6 = 1, 2, 4
_HEADER = 10  # bytes of offload header in front of each frame
_ETHERNET = 14
_NEEDS_CHECKSUM = 1  # flag in the offload header: the sender left the checksum to the card
_BATCH = 64  # frames taken from one device before the others get their turn


def hardware_address(i: int) -> str:
    """Of host i, as given to its network card.

    >>> hardware_address(0)
    '02:00:00:00:00:01'
    """
    return f"02:00:00:00:{(i + 1) >> 8:02x}:{(i + 1) & 255:02x}"


def open_taps(count: int) -> list[int]:
    taps = []
    for i in range(count):
        tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        flags = _TAP | _NO_PACKET_INFO | _VNET_HEADER
        fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", f"a{i}".encode(), flags))
        fcntl.ioctl(tap, _TUNSETOFFLOAD, _CHECKSUM | _SEGMENTS_4 | _SEGMENTS_6)
        taps.append(tap)
    return taps


class Orders:
    """What the owner wants, as lines in a pipe: "2 1000000" flips a byte in what host 2 sends, after so many bytes."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe
        self.ended = False
        self._rest = b""
        self._left: dict[int, list[int]] = {}  # bytes to go, by host

    def read(self) -> None:
        """Called when the pipe is readable."""
        data = os.read(self.pipe, 4096)
        self.ended = not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            host, left = map(int, line.split())
            self._left.setdefault(host, []).append(left)

    def passing(self, host: int, frame: bytes) -> bytes:
        """The frame as it goes on."""
        if not self._left.get(host):
            return frame
        at, length = _payload(frame)
        if not length:
            return frame
        lefts = self._left.pop(host)
        for left in lefts:
            if left < length:
                spoiled = bytearray(frame)
                spoiled[at + left] ^= 0x10
                frame = bytes(spoiled)
            else:
                self._left.setdefault(host, []).append(left - length)
        return frame


def _payload(frame: bytes) -> tuple[int, int]:
    """Where the bytes of a TCP stream begin in a frame whose checksum is still to come, and how many there are."""
    ip = _HEADER + _ETHERNET
    if (
        len(frame) < ip + 40
        or not frame[0] & _NEEDS_CHECKSUM
        or frame[ip - 2 : ip] != b"\x08\x00"
        or frame[ip + 9] != 6
    ):
        return 0, 0
    tcp = ip + 4 * (frame[ip] & 15)
    at = tcp + 4 * (frame[tcp + 12] >> 4)
    end = ip + int.from_bytes(frame[ip + 2 : ip + 4], "big")
    return at, max(0, min(end, len(frame)) - at)


def carry(taps: list[int], delay_s: float, orders: Orders) -> None:
    """Carry frames until the orders have ended."""
    hosts = {tap: i for i, tap in enumerate(taps)}
    by_address = {bytes.fromhex(hardware_address(i).replace(":", "")): tap for i, tap in enumerate(taps)}
    # One delay for all keeps this sorted by the time at which a frame is due.
    late: collections.deque[tuple[float, int, bytes]] = collections.deque()
    while True:
        wait_s = max(0.0, late[0][0] - time.monotonic()) if late else None
        for ready in select.select([*taps, orders.pipe], [], [], wait_s)[0]:
            if ready == orders.pipe:
                orders.read()
                if orders.ended:
                    return
                continue
            for _ in range(_BATCH):
                try:
                    frame = os.read(ready, 70_000)
                except OSError:
                    break
                late.append((time.monotonic() + delay_s, ready, orders.passing(hosts[ready], frame)))
        now = time.monotonic()
        while late and late[0][0] <= now:
            _, source, frame = late.popleft()
            target = by_address.get(frame[_HEADER : _HEADER + 6])
            for tap in taps if target is None else [target]:
                if tap != source:
                    with contextlib.suppress(OSError):  # a device that is down loses frames, as a cut cable does
                        os.write(tap, frame)
