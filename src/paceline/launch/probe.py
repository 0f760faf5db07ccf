"""What a host tells about itself, and how fast it reaches another: a small program that answers on its standard output.

`preflight` sends the text of this file to each host, so it must run there without Paceline, under any Python 3 that one
may find, and imports nothing but the standard library. A question is a line of JSON, {"do": NAME, …}, and so is its
answer; the end of the input ends it.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from typing import Any

_PINGS = 10
_BLOCK = b"\0" * 65536
_ACCEPT_S = 60.0


def facts(ask: dict[str, Any]) -> dict[str, Any]:
    """Versions, cores, and what is there of the run's files."""
    versions = {}
    for name in ("torch", "paceline"):
        try:
            from importlib import metadata  # not before 3.8

            versions[name] = metadata.version(name)
        except Exception:  # not there, in whatever way
            versions[name] = ""
    cwd = ask.get("cwd", "")
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        cores = os.cpu_count() or 1
    return {
        "python": sys.version.split()[0],
        "executable": sys.executable,
        "torch": versions["torch"],
        "paceline": versions["paceline"],
        "cores": cores,
        "gpus": len([n for n in os.listdir("/dev") if n.startswith("nvidia") and n[6:].isdigit()]),
        "cwd": bool(cwd) and os.path.isdir(cwd),
        "shared": bool(ask.get("marker")) and os.path.exists(ask["marker"]),
        "rsync": any(os.access(os.path.join(p, "rsync"), os.X_OK) for p in os.get_exec_path()),
        "name": socket.gethostname(),
    }


def exists(ask: dict[str, Any]) -> dict[str, Any]:
    return {"exists": os.path.exists(ask["path"])}


def route(ask: dict[str, Any]) -> dict[str, Any]:
    """The address and the interface of this host on the way to another."""
    try:
        family, _, _, _, where = socket.getaddrinfo(ask["to"], 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)  # sends nothing
            address = probe.getsockname()[0]
    except OSError as error:
        return {"error": str(error)}
    return {"address": address, "interface": interface(address)}


def interfaces() -> dict[str, str]:
    """The IPv4 address of each interface; "": it has none."""
    import fcntl
    import struct

    found = {}
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                packed = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
                found[name] = socket.inet_ntoa(packed[20:24])
            except OSError:
                found[name] = ""
    return found


def interface(address: str) -> str:
    """The name of the interface that has an address; "": not known."""
    for name, its in interfaces().items():
        if its == address:
            return name
    try:
        with open("/proc/net/if_inet6") as file:
            wanted = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
            return next((line.split()[5] for line in file if line.split()[0] == wanted), "")
    except (OSError, ValueError):
        return ""


def listen(ask: dict[str, Any]) -> dict[str, Any]:
    """Take one measurement after another from those who know the word, on an address; the port."""
    try:
        family = socket.AF_INET6 if ":" in ask["address"] else socket.AF_INET
        server = socket.socket(family, socket.SOCK_STREAM)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((ask["address"], ask.get("port", 0)))
        server.listen(16)
    except OSError as error:
        return {"error": error.strerror or str(error)}
    word = ask["word"].encode()

    def take() -> None:
        server.settimeout(_ACCEPT_S)
        while True:
            try:
                other, _ = server.accept()
            except OSError:
                server.close()
                return
            threading.Thread(target=answer, args=(other, word), daemon=True).start()

    threading.Thread(target=take, daemon=True).start()
    return {"port": server.getsockname()[1]}


def answer(other: socket.socket, word: bytes) -> None:
    """Echo single bytes, then swallow a stream and say how much came."""
    with other:
        try:
            other.settimeout(10.0)
            other.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if exactly(other, len(word)) != word:
                return
            for _ in range(_PINGS):
                other.sendall(exactly(other, 1))
            count = 0
            while True:
                data = other.recv(1 << 20)
                count += len(data)
                if not data or data.endswith(b"\1"):
                    break
            other.sendall(str(count).encode())
        except OSError:
            return


def measure(ask: dict[str, Any]) -> dict[str, Any]:
    """Round-trip time and bytes a second to one who listens, in about ask["seconds"]."""
    try:
        with socket.create_connection((ask["address"], ask["port"]), ask.get("limit_s", 5.0)) as other:
            own = other.getsockname()[0]
            other.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            other.settimeout(10.0)
            other.sendall(ask["word"].encode())
            trips = []
            for _ in range(_PINGS):
                began = time.monotonic()
                other.sendall(b"x")
                exactly(other, 1)
                trips.append(time.monotonic() - began)
            began = time.monotonic()
            while time.monotonic() - began < ask["seconds"]:
                other.sendall(_BLOCK)
            other.sendall(b"\1")
            count = int(other.recv(64))  # so that what only lies in our own buffers is not counted as sent
            took = time.monotonic() - began
    except (OSError, ValueError) as error:
        return {"error": str(error) or type(error).__name__}
    return {"rtt_s": sorted(trips)[_PINGS // 2], "bytes_per_s": count / took, "from": own}


def exactly(other: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = other.recv(count - len(data))
        if not more:
            raise OSError("the connection was closed")
        data += more
    return data


WHAT = {"facts": facts, "exists": exists, "route": route, "listen": listen, "measure": measure}


def main() -> None:
    for line in iter(sys.stdin.readline, ""):
        ask = json.loads(line)
        try:
            told = WHAT[ask["do"]](ask)
        except Exception as error:  # whatever it is: the others go on, and the launcher says it
            told = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write("paceline " + json.dumps(told) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
