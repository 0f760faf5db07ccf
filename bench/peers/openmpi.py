"""Open MPI's all-reduce, under `mpirun -n 2 python -m bench.peers.openmpi`, steered by bench.allreduce.

Open MPI spins while it waits, so between calls both ranks sleep on the benchmark's socket instead.
"""

from __future__ import annotations

import time

import numpy as np
from mpi4py import MPI

from bench.team import serve

world = MPI.COMM_WORLD
arrays: dict[int, np.ndarray] = {}


def block(elements: int, iterations: int) -> float:
    """All-reduce a float32 array in place so many times; the seconds that it took."""
    x = arrays.setdefault(elements, np.full(elements, 0.0, dtype=np.float32))
    world.Barrier()
    begin = time.perf_counter()
    for _ in range(iterations):
        world.Allreduce(MPI.IN_PLACE, x)
    return time.perf_counter() - begin


if __name__ == "__main__":
    serve({"block": block}, rank=world.rank)
