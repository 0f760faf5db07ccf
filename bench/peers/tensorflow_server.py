"""TensorFlow's ParameterServerStrategy, steered by bench.server: one server, two workers, this process coordinates.

The function that workers run is that of a custom training loop: it reads the variables (over gRPC), makes gradients
from them in one pass, and has them applied on the server by its kernel for SGD. Both workers go at their own pace.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf

from bench.peers.processes import cpu
from bench.team import serve

SHAPES = [tuple(map(int, shape.split("x"))) for shape in os.environ["BENCH_SHAPES"].split(",")]
LR = float(os.environ["BENCH_LR"])
_held: dict[str, Any] = {}


def set_up(way: str) -> None:
    assert way == "tcp"
    first, second, third, own = (f"127.0.0.1:{_free_port()}" for _ in range(4))
    cluster = {"ps": [first], "worker": [second, third], "chief": [own]}
    tasks = [("ps", 0), ("worker", 0), ("worker", 1)]
    _held["servers"] = [
        subprocess.Popen(
            [sys.executable, "-m", "bench.peers.tensorflow_server", json.dumps([os.getpid(), cluster, *task])]
        )
        for task in tasks
    ]
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster), task_type="chief", task_id=0, rpc_layer="grpc"
    )
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    _held["coordinator"] = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        variables = [tf.Variable(tf.zeros(shape), trainable=True) for shape in SHAPES]

    @tf.function
    def step() -> None:
        for variable in variables:
            gradient = variable.read_value() * 1e-3
            with tf.device(variable.device):
                tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=LR, delta=gradient)

    _held["step"], _held["variables"] = step, variables


def block(steps: int) -> float:
    """Steps of both workers; seconds."""
    coordinator = _held["coordinator"]
    began = time.perf_counter()
    for _ in range(2 * steps):
        coordinator.schedule(_held["step"])
    coordinator.join()
    return time.perf_counter() - began


def finish() -> None:
    for server in _held["servers"]:
        server.kill()
        server.wait()


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


if __name__ == "__main__":
    if len(sys.argv) > 1:
        import ctypes
        import signal

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # no server outlives a killed benchmark
        parent, cluster, job, task = json.loads(sys.argv[1])
        if os.getppid() != parent:
            sys.exit(1)  # it was gone before that
        tf.distribute.Server(tf.train.ClusterSpec(cluster), job_name=job, task_index=task, protocol="grpc").join()
    serve({"set_up": set_up, "block": block, "cpu": cpu, "finish": finish}, rank=0)
    os._exit(0)  # the coordinator's threads would wait for the servers
