"""The servers between hosts at 1 Gbit/s, for `bench.server`; needs root.

Hosts are network namespaces (`paceline.testing.hosts`). Ours is encrypted between them, as it comes; the plain sockets
are not. Blocks of both sides take turns. The ring is all of all-reduce's time, without the optimizer's; a step of sync
has that in it.
"""

from __future__ import annotations

import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import msgspec
import torch

from bench.harness import Figure, Report, compare, interleave
from bench.team import Team, serve
from paceline.core.status import Status
from paceline.core.view import Member, View
from paceline.launch.plan import HUGE_PAGES
from paceline.server import messages
from paceline.server.client import Client, Table
from paceline.server.connection import connect, pair
from paceline.server.placement import Tensor
from paceline.server.service import Service
from paceline.testing.hosts import Hosts
from paceline.transport.channel import _tune
from paceline.transport.group import Group
from paceline.transport.wires import Wires

QUICK = "BENCH_QUICK" in os.environ
SHAPES = [(1024, 4096), (4096,)] + ([] if QUICK else [(4096, 4096), (4096,), (4096, 1024), (1024,)])  # 4.2M or 25.2M
NBYTES = 4 * sum(torch.Size(shape).numel() for shape in SHAPES)
SGD = {"lr": 1e-6}
RANK, SIZE = int(os.environ.get("BENCH_RANK", "0")), int(os.environ.get("BENCH_SIZE", "1"))
TOKEN = "a token of the benchmark"
PORT = 29700
BLOCK_S = 0.8


def add_figures(report: Report, *, quick: bool) -> None:
    """Measure; where hosts cannot be made, say so."""
    repeats = 3 if quick else 9
    env = {"BENCH_QUICK": "1"} if quick else {}
    if reason := Hosts.missing():
        report.note(f"no hosts: {reason}")
    else:
        with Hosts(2, rate="1gbit") as hosts, _on_hosts(hosts, env) as team:
            nbytes = team.call("set_up", described=team.call("describe"), gate="async", colocated=False)[0]
            sides = {name: _side(team, name) for name in ("push", "sockets")}
            times = interleave(sides, repeats=repeats, block_s=BLOCK_S, limit_s=60.0)
            team.call("finish")
        figure = compare("link_share_1gbit", times["push"], times["sockets"], goal=">= 0.9")
        report.add(figure)
        carried = nbytes / statistics.median(times["sockets"]) / 125e6
        report.note(f"plain sockets carry {carried:.3f} of 1 Gbit/s in each direction, both at once")
        for count in (2,) if quick else (2, 4):
            with Hosts(count, rate="1gbit") as hosts, _on_hosts(hosts, env) as team:
                name = "colocated_over_ring" if count == 2 else f"colocated_over_ring_{count}"
                report.add(_colocated(team, name, repeats, "<= 1.1"))
    with _on_one_host(2, env) as team:
        report.add(_colocated(team, "colocated_over_ring_one_host", repeats, ""))


def _colocated(team: Team, name: str, repeats: int, goal: str) -> Figure:
    team.call("set_up", described=team.call("describe"), gate="sync", colocated=True)
    sides = {side: _side(team, side) for side in ("push", "ring")}
    times = interleave(sides, repeats=repeats, block_s=BLOCK_S, limit_s=60.0)
    team.call("finish")
    return compare(name, times["push"], times["ring"], goal=goal, ratio=lambda ours, ring: ours / ring)


def _side(team: Team, name: str) -> Callable[[int], float]:
    return lambda steps: team.slowest(name, steps=steps)


def _on_hosts(hosts: Hosts, env: dict[str, str]) -> Team:
    places = [(["ip", "netns", "exec", space], f"h{i}", hosts.ips[i]) for i, space in enumerate(hosts._spaces)]
    return _team(places, env)


def _on_one_host(count: int, env: dict[str, str]) -> Team:
    return _team([([], "one", "127.0.0.1")] * count, env)


def _team(places: list[tuple[list[str], str, str]], more: dict[str, str]) -> Team:
    commands = []
    for rank, (prefix, host, ip) in enumerate(places):
        env = {"BENCH_RANK": str(rank), "BENCH_SIZE": str(len(places)), "BENCH_HOST": host, "BENCH_ADDRESS": ip}
        env |= {"BENCH_FIRST": places[0][2], "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **HUGE_PAGES, **more}
        commands.append(([*prefix, sys.executable, "-m", "bench._server_hosts"], env))
    return Team(len(places), commands, limit_s=300.0)


# ---- on a host

_held: dict[str, Any] = {}


def describe() -> str:
    """Open this member's own end of the wires; how the others will see it."""
    _held["wires"] = Wires(TOKEN, os.environ["BENCH_ADDRESS"])
    return msgspec.json.encode(_held["wires"].describe(RANK, os.environ["BENCH_HOST"])).decode()


def set_up(described: list[str], gate: str, colocated: bool) -> int:
    """Join the others, and open a table; how many bytes it has."""
    wires: Wires = _held["wires"]
    everyone = tuple(msgspec.json.decode(text, type=Member) for text in described)
    wires.join(View(number=1, members=everyone), RANK, limit_s=60.0, status=Status(None))
    _held["group"] = Group(wires, range(SIZE))
    servers, workers = (list(range(SIZE)), list(range(SIZE))) if colocated else ([0], [1])
    own = {}
    if RANK in servers:
        _held["service"] = service = Service(limit_s=60.0)
        for rank in workers:
            mine = connect(wires, rank, RANK) if rank != RANK else None
            if mine is None:
                mine, own[RANK] = pair(RANK)
            service.attach(mine)
    if RANK in workers:
        connections = [own.get(rank) or connect(wires, rank, rank) for rank in servers]
        _held["client"] = client = Client(workers.index(RANK) if colocated else RANK, connections, limit_s=60.0)
        tensors = [(Tensor(f"p{i}", shape, "float32", 0), torch.zeros(shape)) for i, shape in enumerate(SHAPES)]
        _held["table"] = client.open(tensors, messages.Rule(optimizer="SGD", groups=[SGD], gate=gate))
        _held["gradients"] = [torch.randn(shape) * 1e-3 for shape in SHAPES]
    _held["flat"] = torch.randn(NBYTES // 4) * 1e-3
    if not colocated:
        _held["socket"] = _plain_socket()
    return NBYTES


def push(steps: int) -> float:
    began = time.perf_counter()
    if "table" in _held:
        table: Table = _held["table"]
        for _ in range(steps):
            table.push(_held["gradients"], [SGD])
    return time.perf_counter() - began


def ring(steps: int) -> float:
    group: Group = _held["group"]
    began = time.perf_counter()
    for _ in range(steps):
        group.all_reduce(_held["flat"])
    return time.perf_counter() - began


def sockets(steps: int) -> float:
    """As many bytes as a push has, in both directions at once, over one plain connection."""
    sock: socket.socket = _held["socket"]
    sent = memoryview(_held["flat"].numpy()).cast("B")
    room = memoryview(bytearray(1 << 20))
    began = time.perf_counter()
    for _ in range(steps):
        sender = threading.Thread(target=sock.sendall, args=(sent,))
        sender.start()
        left = NBYTES
        while left:
            got = sock.recv_into(room[: min(left, len(room))])
            if not got:
                raise ConnectionError("the other side has hung up")
            left -= got
        sender.join(60.0)
    return time.perf_counter() - began


def _plain_socket() -> socket.socket:
    address = (os.environ["BENCH_FIRST"], PORT)
    if RANK == 0:
        with closing(socket.create_server(address)) as listener:
            listener.settimeout(30.0)
            sock, _ = listener.accept()
    else:
        end = time.monotonic() + 30.0
        while True:
            try:
                sock = socket.create_connection(address, timeout=5.0)
                break
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)
    _tune(sock)  # the same congestion control as ours
    sock.settimeout(60.0)
    return sock


def finish() -> None:
    if "client" in _held:
        _held["client"].close()
    if "service" in _held:
        _held["service"].wait(10.0)
        _held["service"].close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve({"describe": describe, "set_up": set_up, "push": push, "ring": ring, "sockets": sockets, "finish": finish})
