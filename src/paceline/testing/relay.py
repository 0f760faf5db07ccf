"""A switch in user space, for `Hosts`: carries frames between TAP devices after a delay.

The kernel's own delay (netem) is often missing. A device `a<i>` stands for host i; what is read from it is
written, a fixed time later, to the device of the host that the frame's destination address names, or to all
others. Frames keep their offload headers, so that a burst of 64 KiB passes as one.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import os
import select
import struct
import time
from collections.abc import Callable

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_TAP, _NO_PACKET_INFO, _VNET_HEADER = 0x0002, 0x1000, 0x4000
_CHECKSUM, _SEGMENTS_4, _SEGMENTS_6 = 1, 2, 4
_HEADER = 10  # bytes of offload header in front of each frame
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


def carry(taps: list[int], delay_s: float, ended: Callable[[], bool], wake: int) -> None:
    """Carry frames until `ended`, which is looked at when `wake` becomes readable."""
    by_address = {bytes.fromhex(hardware_address(i).replace(":", "")): tap for i, tap in enumerate(taps)}
    # One delay for all keeps this sorted by the time at which a frame is due.
    late: collections.deque[tuple[float, int, bytes]] = collections.deque()
    while True:
        wait_s = max(0.0, late[0][0] - time.monotonic()) if late else None
        for ready in select.select([*taps, wake], [], [], wait_s)[0]:
            if ready == wake:
                if ended():
                    return
                continue
            for _ in range(_BATCH):
                try:
                    frame = os.read(ready, 70_000)
                except OSError:
                    break
                late.append((time.monotonic() + delay_s, ready, frame))
        now = time.monotonic()
        while late and late[0][0] <= now:
            _, source, frame = late.popleft()
            target = by_address.get(frame[_HEADER : _HEADER + 6])
            for tap in taps if target is None else [target]:
                if tap != source:
                    with contextlib.suppress(OSError):  # a device that is down loses frames, as a cut cable does
                        os.write(tap, frame)
