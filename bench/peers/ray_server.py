"""A parameter server of Ray actors, steered by bench.server: the asynchronous one of Ray's documentation.

Tuned: gradients and weights are lists of numpy arrays, which are read without a copy where Ray's object store has them;
SGD is applied in place, in blocks that fit the cache; workers call the server themselves, which saves the way through
the driver; every actor has a processor of its own as Ray counts them.

    shm   one node, as Ray runs on one host: objects lie in shared memory
    tcp   a node for each actor, as on three hosts: objects go from store to store over TCP
"""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import ray
from ray.cluster_utils import Cluster

from bench.peers.processes import cpu
from bench.team import serve

SHAPES = [tuple(map(int, shape.split("x"))) for shape in os.environ["BENCH_SHAPES"].split(",")]
LR = float(os.environ["BENCH_LR"])
_BLOCK = 1 << 16  # elements
_actors: list[Any] = []
_clusters: list[Any] = []


@ray.remote(num_cpus=1)
class ParameterServer:
    def __init__(self) -> None:
        self.weights = [np.zeros(shape, np.float32) for shape in SHAPES]
        self.scratch = np.empty(_BLOCK, np.float32)

    def ready(self) -> str:
        """The node on which this actor lives."""
        return _node()

    def apply_gradients(self, *gradients: np.ndarray) -> list[np.ndarray]:
        for weights, gradient in zip(self.weights, gradients):
            w, g = weights.reshape(-1), gradient.reshape(-1)
            for at in range(0, w.size, _BLOCK):
                part = w[at : at + _BLOCK]
                scaled = np.multiply(g[at : at + _BLOCK], np.float32(LR), out=self.scratch[: part.size])
                part -= scaled
        return self.weights


@ray.remote(num_cpus=1)
class Worker:
    def __init__(self, server: Any) -> None:
        self.server = server
        self.gradients = [np.full(shape, 1e-3, np.float32) for shape in SHAPES]
        self.weights = [np.zeros(shape, np.float32) for shape in SHAPES]

    def ready(self) -> str:
        return _node()

    def work(self, steps: int) -> float:
        """So many steps; seconds."""
        began = time.perf_counter()
        for _ in range(steps):
            pushed = self.server.apply_gradients.remote(*self.gradients)
            for mine, new in zip(self.weights, ray.get(pushed)):
                np.copyto(mine, new)
        return time.perf_counter() - began


def set_up(way: str) -> None:
    store = {"object_store_memory": 2 << 30}
    first = {"include_dashboard": False, **store}
    if way == "tcp":
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "resources": {"server": 1}, **first})
        for number in range(2):
            cluster.add_node(num_cpus=1, resources={f"worker{number}": 1}, **store)
        _clusters.append(cluster)
        ray.init(address=cluster.address, logging_level="error")
    else:
        places = {"server": 1, "worker0": 1, "worker1": 1}
        ray.init(address="local", num_cpus=3, resources=places, logging_level="error", **first)
    server = ParameterServer.options(resources={"server": 1}).remote()
    _actors.extend(Worker.options(resources={f"worker{number}": 1}).remote(server) for number in range(2))
    homes = ray.get([server.ready.remote(), *(worker.ready.remote() for worker in _actors)])
    assert len(set(homes)) == (3 if way == "tcp" else 1), homes


def _node() -> str:
    node: str = ray.get_runtime_context().get_node_id()
    return node


def block(steps: int) -> float:
    """Both workers at once; the slower one's seconds."""
    return max(ray.get([worker.work.remote(steps) for worker in _actors]))


def finish() -> None:
    ray.shutdown()
    for cluster in _clusters:
        cluster.shutdown()


if __name__ == "__main__":
    serve({"set_up": set_up, "block": block, "cpu": cpu, "finish": finish}, rank=0)
