"""What stands here for a member on Ray that stays: the launcher's agent watches it as if it were the member.

    python -I -S relay.py DESK HOST

Started by `membership.process`, under the agent of `launch.local`; at the other end of its connection is the launcher's
own `desk.Desk`, in a folder that only this user can enter. The first line of its input, an errand, goes there; what the
member prints comes back, and at last its exit code. It imports nothing of Paceline, so that it starts at once.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from multiprocessing.connection import Client

OUT, ERR, CODE = b"o", b"e", b"c"  # how what comes back begins
END = b"end"
_LOST = 137  # as of a member that was killed


def main(desk: str, host: str) -> int:
    with Client(desk, "AF_UNIX") as launcher:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: threading.Thread(target=launcher.send_bytes, args=(END,)).start())
        launcher.send_bytes(host.encode() + b"\n" + sys.stdin.buffer.readline())
        try:
            while (told := launcher.recv_bytes())[:1] != CODE:
                _write(1 if told[:1] == OUT else 2, told[1:])
        except (EOFError, OSError):
            return _LOST
        return int(told[1:])


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
