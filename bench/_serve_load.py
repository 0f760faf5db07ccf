"""Load for a server, with the standard library alone: for machines without wrk.

    python -m bench._serve_load PORT CONNECTIONS SECONDS FILE

One process with some open connections, each with one request of FILE under way: when an answer has come whole, the next
request is sent. Prints a JSON object: the seconds of each request, and how many answers were not 200. `load` starts
several such processes, so that they are not what is measured, lets them begin together, and puts together what they
say.
"""

from __future__ import annotations

import json
import selectors
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

_LIMIT_S = 60.0
_MOST_PROCESSES = 8
_END = b"\r\n\r\n"


@dataclass(frozen=True)
class Load:
    """What one block of load came to."""

    p50_ms: float
    p99_ms: float
    per_s: float
    failed: int


def load(port: int, connections: int, seconds: float, head: bytes, body: bytes, directory: Path) -> Load:
    """Ask for so long, over so many connections."""
    request = directory / "request"
    request.write_bytes(head + body)
    count = min(connections, _MOST_PROCESSES)
    shares = [connections // count + (i < connections % count) for i in range(count)]
    words = [sys.executable, "-m", "bench._serve_load", str(port)]
    sides = [
        subprocess.Popen(
            [*words, str(share), str(seconds), str(request)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for share in shares
    ]
    try:
        for side in sides:
            assert side.stdout
            side.stdout.readline()  # it has connected
        told = []
        for side in sides:
            assert side.stdin
            side.stdin.write("go\n")
            side.stdin.flush()
        for side in sides:
            assert side.stdout
            told.append(json.loads(side.stdout.readline()))
    finally:
        for side in sides:
            side.kill()
            side.wait()
    took = sorted(second for one in told for second in one["took_s"])
    if not took:
        raise RuntimeError(f"no request was answered within {seconds:g} s")
    return Load(
        p50_ms=took[len(took) // 2] * 1e3,
        p99_ms=took[min(len(took) - 1, len(took) * 99 // 100)] * 1e3,
        per_s=sum(len(one["took_s"]) / one["lasted_s"] for one in told),
        failed=sum(one["failed"] for one in told),
    )


class _Asking:
    """One connection."""

    def __init__(self, port: int, request: bytes) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), _LIMIT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._request = request
        self._got = b""
        self._whole = 0  # bytes of the answer, once its head is there
        self.began = 0.0

    def ask(self) -> None:
        self._got, self._whole = b"", 0
        self.began = time.perf_counter()
        self.socket.sendall(self._request)

    def answered(self) -> bytes:
        """The first line of the answer, if it is whole now."""
        more = self.socket.recv(1 << 16)
        if not more:
            raise ConnectionError("the server has closed a connection")
        self._got += more
        if not self._whole:
            at = self._got.find(_END)
            if at < 0:
                return b""
            lines = self._got[:at].lower().split(b"\r\n")
            length = next(int(line[15:]) for line in lines if line.startswith(b"content-length:"))
            self._whole = at + len(_END) + length
        return self._got[: self._got.index(b"\r\n")] if len(self._got) >= self._whole else b""


def main(port: int, connections: int, seconds: float, request: bytes) -> None:
    asking = [_Asking(port, request) for _ in range(connections)]
    selector = selectors.DefaultSelector()
    for one in asking:
        selector.register(one.socket, selectors.EVENT_READ, one)
    print("connected", flush=True)
    sys.stdin.readline()
    took: list[float] = []
    failed = 0
    began = now = time.perf_counter()
    for one in asking:
        one.ask()
    while now < began + seconds:
        for key, _ in selector.select(_LIMIT_S):
            one = key.data
            if line := one.answered():
                now = time.perf_counter()
                took.append(now - one.began)
                failed += b" 200 " not in line
                one.ask()
        now = time.perf_counter()
    print(json.dumps({"took_s": took, "failed": failed, "lasted_s": now - began}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4]).read_bytes())
