"""A parameter server: one server and two workers of one host, 25M float32 parameters, push + SGD + pull.

  speedup_tcp           over TCP: time of a step with the best of the peers / ours
  speedup_tcp_PEER      the same for each peer: torch RPC, Ray's actors, TensorFlow's ParameterServerStrategy
  speedup_shm           through shared memory: time of a step with torch RPC's own shared memory / ours
  speedup_shm_ray       the same for Ray's object store
  cpu_tcp, cpu_shm, cpu_WAY_PEER
                        processor seconds of all processes in a step: torch RPC's, or a peer's / ours
  link_share_1gbit      server and worker on two hosts, 1 Gbit/s: what a push and its pull, at once, carry in each
                        direction / what plain sockets carry there in both directions at once
  colocated_over_ring   two hosts, 1 Gbit/s, a shard with each worker: time of a step of sync / of the ring's all-reduce
                        of the same gradients; colocated_over_ring_4 between four hosts, _one_host through shared memory

Both workers push as fast as they get weights back, and nobody waits for anybody (async). The RPC server is the pattern
of PyTorch's tutorials: the worker calls a method of the server with its gradients and gets the weights; the server
applies them under a lock. Both apply with torch.optim.SGD. Ray and TensorFlow live in environments of their own
(`peers/`), and are left out where they are not named. Hosts need root, and are left out without (`_server_hosts`).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.rpc as rpc

from bench import _server_hosts
from bench.harness import Figure, Report, arguments, compare, interleave
from bench.team import Team, serve
from bench.workers import wires
from paceline.launch.plan import HUGE_PAGES
from paceline.server import messages
from paceline.server.client import Client, Table
from paceline.server.connection import connect
from paceline.server.placement import Tensor
from paceline.server.service import Service

SHAPES = [(1024, 4096), (4096,), (4096, 4096), (4096,), (4096, 1024), (1024,)]  # 25.2M
SGD = {"lr": 1e-6}
RANK = int(os.environ.get("BENCH_RANK", "0"))  # 0 is the server
# Of tensorpipe: what carries messages, and what carries tensors.
RPC = {"tcp": (["uv"], ["basic", "mpt_uv"]), "shm": (["shm", "uv"], ["cma", "basic", "mpt_uv"])}


GOALS = {"tcp": ">= 2", "shm": ">= 1.5"}
WAYS = {"tcp": ("ray", "tensorflow"), "shm": ("ray",)}  # which peers know them, beside torch RPC


def main() -> None:
    if "--worker" in sys.argv:
        serve(FUNCTIONS)
        return
    options = arguments(__doc__, _options)
    report = Report("bench.server")
    for way in WAYS:
        times, spent = _measure(way, options)
        best = min((name for name in times if name != "ours"), key=lambda name: statistics.median(times[name]))
        chosen = best if way == "tcp" else "rpc"
        figure = compare(f"speedup_{way}", times["ours"], times[chosen], goal=GOALS[way])
        report.add(_with_peer(figure, chosen))
        report.add(_with_peer(compare(f"cpu_{way}", spent["ours"], spent["rpc"]), "rpc"))
        for name in times:
            if name not in ("ours", chosen):
                report.add(_with_peer(compare(f"speedup_{way}_{name}", times["ours"], times[name]), name))
            if name not in ("ours", "rpc"):
                report.add(_with_peer(compare(f"cpu_{way}_{name}", spent["ours"], spent[name]), name))
        report.extra[f"steps_per_s_{way}"] = 2 / statistics.median(times["ours"])
        report.extra |= {f"step_ms_{way}_{name}": 1e3 * statistics.median(taken) for name, taken in times.items()}
    for name in ("ray", "tensorflow"):
        if not getattr(options, f"{name}_python"):
            report.note(f"no {name}: install bench/peers/{name}.txt somewhere and name it with --{name}-python")
    report.note("a step is one of each of two workers; steps_per_s in the JSON counts both workers' steps")
    _server_hosts.add_figures(report, quick=options.quick)
    report.finish(options.json)


def _options(parser: argparse.ArgumentParser) -> None:
    for name in ("ray", "tensorflow"):
        default = os.environ.get(f"BENCH_{name.upper()}_PYTHON", "")
        parser.add_argument(f"--{name}-python", metavar="PATH", default=default, help=f"of an environment with {name}")


def _measure(way: str, options: argparse.Namespace) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of a step, and processor seconds, of all sides."""
    with contextlib.ExitStack() as stack:
        team = stack.enter_context(Team.of(3, "bench.server", limit_s=300.0))
        team.call("set_up", way=way)
        spent: dict[str, list[float]] = {"ours": [], "rpc": []}
        sides = {side: functools.partial(_block, team, spent[side], side=side) for side in spent}
        for name in WAYS[way]:
            if python := getattr(options, f"{name}_python"):
                shapes = ",".join("x".join(map(str, shape)) for shape in SHAPES)
                env = {"BENCH_SHAPES": shapes, "BENCH_LR": str(SGD["lr"]), **HUGE_PAGES}
                peer = Team(1, [([python, "-m", f"bench.peers.{name}_server"], env)], limit_s=300.0)
                stack.enter_context(peer).call("set_up", way=way)
                stack.callback(peer.call, "finish")
                spent[name] = []
                sides[name] = functools.partial(_block, peer, spent[name])
                sides[name](10)  # what the first steps allocate, later ones use again
        times = interleave(sides, repeats=5 if options.quick else 15, block_s=0.8, limit_s=12 if options.quick else 240)
        team.call("finish")
    count = len(times["ours"])
    return times, {name: found[-count:] for name, found in spent.items()}


def _with_peer(figure: Figure, name: str) -> Figure:
    told = f"{name} {figure.peer}"
    return Figure(
        name=figure.name, value=figure.value, ours=figure.ours, peer=told, spread=figure.spread, goal=figure.goal
    )


def _block(team: Team, spent: list[float], steps: int, **arguments: Any) -> float:
    """Seconds for so many steps; the processor's seconds in a step go to `spent`."""
    before = sum(team.call("cpu"))
    seconds = team.slowest("block", steps=steps, **arguments)
    spent.append((sum(team.call("cpu")) - before) / steps)
    return seconds


# ---- in the processes

_held: dict[str, Any] = {}


class Shelf:
    """The RPC server's parameters."""

    def __init__(self) -> None:
        self.parameters = [torch.nn.Parameter(w) for w in _weights()]
        self.optimizer = torch.optim.SGD(self.parameters, **SGD)
        self.lock = threading.Lock()

    def step(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        with self.lock:
            for p, gradient in zip(self.parameters, gradients):
                p.grad = gradient
            self.optimizer.step()
            return [p.detach() for p in self.parameters]


def push_and_pull(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """Called by a worker, runs on the RPC server."""
    shelf: Shelf = _held["shelf"]
    return shelf.step(gradients)


def _weights() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def set_up(way: str) -> None:
    shared = way == "shm"
    if RANK == 0:
        _held["service"] = service = Service(limit_s=60.0)
        for rank in (1, 2):
            service.attach(connect(wires(), rank, 0, shared=shared))
        _held["shelf"] = Shelf()
    else:
        _held["client"] = client = Client(RANK, [connect(wires(), 0, 0, shared=shared)], limit_s=60.0)
        tensors = [Tensor(f"p{i}", shape, "float32", 0) for i, shape in enumerate(SHAPES)]
        rule = messages.Rule(optimizer="SGD", groups=[SGD], gate="async")
        _held["table"] = table = client.open(list(zip(tensors, _weights())), rule)
        if RANK == 1:
            table.store()
    transports, channels = RPC[way]
    backend = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{os.environ['BENCH_FOLDER']}/rpc", _transports=transports, _channels=channels
    )
    rpc.init_rpc(f"process{RANK}", rank=RANK, world_size=3, rpc_backend_options=backend)
    _held["gradients"] = [torch.randn(shape) * 1e-3 for shape in SHAPES]
    _held["mine"] = _weights()


def cpu() -> float:
    """Processor seconds of this process so far."""
    return time.process_time()


def block(side: str, steps: int) -> float:
    """So many steps of this worker; seconds."""
    began = time.perf_counter()
    if RANK == 0:
        return 0.0
    if side == "ours":
        table: Table = _held["table"]
        for _ in range(steps):
            table.push(_held["gradients"], [SGD])
    else:
        for _ in range(steps):
            weights = rpc.rpc_sync("process0", push_and_pull, args=(_held["gradients"],))
            for mine, new in zip(_held["mine"], weights):
                mine.copy_(new)
    return time.perf_counter() - began


def finish() -> None:
    rpc.shutdown(graceful=True)
    if RANK:
        _held["client"].close()
    else:
        _held["service"].wait(10.0)
        _held["service"].close()
    wires().close()


FUNCTIONS: dict[str, Callable[..., Any]] = {"set_up": set_up, "cpu": cpu, "block": block, "finish": finish}


if __name__ == "__main__":
    main()
