"""A parameter server: one server and two workers of one host, 25M float32 parameters, push + SGD + pull.

  speedup_tcp    over TCP: time of a step with torch RPC over TCP / ours
  speedup_shm    through shared memory: time of a step with torch RPC's own shared memory / ours
  cpu_tcp, cpu_shm
                 processor seconds of all three processes in a step: torch RPC's / ours

Both workers push as fast as they get weights back, and nobody waits for anybody (async). The RPC server is the pattern
of PyTorch's tutorials: the worker calls a method of the server with its gradients and gets the weights; the server
applies them under a lock. Both apply with torch.optim.SGD.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.rpc as rpc

from bench.harness import Figure, Report, arguments, compare, interleave, middle, short
from bench.team import Team, serve
from bench.workers import wires
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


def main() -> None:
    if "--worker" in sys.argv:
        serve(FUNCTIONS)
        return
    options = arguments(__doc__)
    report = Report("bench.server")
    for way, goal in (("tcp", ">= 2"), ("shm", ">= 1.5")):
        with Team.of(3, "bench.server", limit_s=300.0) as team:
            team.call("set_up", way=way)
            spent: dict[str, list[float]] = {"ours": [], "rpc": []}
            repeats = 5 if options.quick else 15
            sides = {side: functools.partial(_block, team, side, spent[side]) for side in spent}
            times = interleave(sides, repeats=repeats, block_s=0.8, limit_s=12 if options.quick else 120)
            team.call("finish")
        report.add(compare(f"speedup_{way}", times["ours"], times["rpc"], goal=goal))
        count = len(times["ours"])
        ratios = [b / a for a, b in zip(spent["ours"][-count:], spent["rpc"][-count:])]
        low, high = middle(ratios)
        value = sorted(ratios)[len(ratios) // 2]
        report.add(Figure(name=f"cpu_{way}", value=value, spread=f"{short(low)} .. {short(high)}"))
        report.extra[f"steps_per_s_{way}"] = 2 / sorted(times["ours"])[count // 2]
    report.note("a step is one of each of two workers; steps_per_s in the JSON counts both workers' steps")
    report.finish(options.json)


def _block(team: Team, side: str, spent: list[float], steps: int) -> float:
    """Seconds for so many steps; the processor's seconds in a step go to `spent`."""
    before = sum(team.call("cpu"))
    seconds = team.slowest("block", side=side, steps=steps)
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
