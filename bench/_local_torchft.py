"""torchft's DiLoCo beside ours in `bench.local`: replicas of one process each, in an environment that has torchft.

Manager, lighthouse and DiLoCo as in its own examples, with a quorum at each round, and differences as they are: its
quantization needs a GPU. The compute of a step is slept, as for the other sides; gradients are fixed numbers. A round
that its members did not commit is an error, not a time. It needs torch and torchft alone.

Heartbeats go over the link that the exchange fills, so a replica counts as lost only after a minute without one.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from bench.team import Team, TeamError, serve

EVERY = 60  # as diloco has it
_PORT = 29_700
_LIMIT_S = 300
_HEARTBEAT_MS = 60_000


def missing(python: str) -> str:
    """Why it cannot be started with this interpreter; "" where it can."""
    lighthouse = _lighthouse(python)
    if not shutil.which(lighthouse):
        return f"no {lighthouse} beside --torchft {python}: install bench/peers/torchft.txt there"
    return ""


def _lighthouse(python: str) -> str:
    return str(Path(python).parent / "torchft_lighthouse")


@contextmanager
def start(hosts: Any, python: str, task: str, step_s: float) -> Iterator[Team]:
    """A replica on each host, and the lighthouse on the first."""
    count, commands = hosts.count, []
    wanted = ["--min_replicas", str(count), "--quorum_tick_ms", "100", "--join_timeout_ms", "10000"]
    wanted += ["--heartbeat_timeout_ms", str(_HEARTBEAT_MS), "--bind", f"[::]:{_PORT}"]
    for rank, space in enumerate(hosts._spaces):
        env = {"BENCH_RANK": str(rank), "BENCH_SIZE": str(count), "BENCH_ADDRESS": hosts.ips[rank]}
        env |= {"BENCH_TASK": task, "BENCH_STEP_S": str(step_s), "TORCHFT_LIGHTHOUSE": f"http://{hosts.ips[0]}:{_PORT}"}
        env |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        commands.append((["ip", "netns", "exec", space, python, "-m", "bench._local_torchft"], env))
    with tempfile.TemporaryFile() as said:
        light = hosts.popen(0, [_lighthouse(python), *wanted], stdout=said, stderr=said)
        try:
            with Team(count, commands, limit_s=2.0 * _LIMIT_S) as team:
                yield team
        except TeamError as error:
            said.seek(0)
            lines = said.read().decode(errors="replace").splitlines()[-15:]
            raise TeamError("\n".join([str(error), "--- output of the lighthouse", *lines])) from None
        finally:
            light.kill()
            light.wait()


# ---- a replica's side


class Replica:
    """One model under torchft's DiLoCo."""

    def __init__(self) -> None:
        from datetime import timedelta

        import torch
        from torchft import Manager, ProcessGroupGloo  # type: ignore[import-not-found]
        from torchft.local_sgd import DiLoCo  # type: ignore[import-not-found]

        from bench.models import character_gpt, fashion_cnn, wide_gpt

        torch.set_num_threads(1)
        torch.manual_seed(1)
        ip, limit = os.environ["BENCH_ADDRESS"], timedelta(seconds=_LIMIT_S)
        self._store = torch.distributed.TCPStore(ip, 0, is_master=True, wait_for_workers=False)
        makes = {"gpt": character_gpt, "wide": wide_gpt, "cnn": fashion_cnn}
        model = makes[os.environ["BENCH_TASK"]]()
        self._inner = torch.optim.AdamW(model.parameters(), lr=1e-4)
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=limit),
            min_replica_size=int(os.environ["BENCH_SIZE"]),
            use_async_quorum=False,
            init_sync=False,  # all begin alike; its checkpoint server knows hosts by names that these do not have
            load_state_dict=lambda state: None,
            state_dict=dict,
            replica_id=f"replica_{os.environ['BENCH_RANK']}",
            timeout=limit,
            quorum_timeout=limit,
            connect_timeout=limit,
            store_addr=ip,
            store_port=self._store.port,
            hostname=ip,
            rank=0,
            world_size=1,
        )
        DiLoCo(self.manager, [model], self._inner, outer, sync_every=EVERY, pin_memory=False).__enter__()
        self._gradients = [torch.full_like(p, 1e-3) for p in model.parameters()]
        self._parameters = list(model.parameters())

    def step(self, step_s: float) -> None:
        time.sleep(step_s)
        for p, gradient in zip(self._parameters, self._gradients):
            p.grad = gradient
        self._inner.step()


@cache
def replica() -> Replica:
    return Replica()


def block(steps: int, hurry: bool = False) -> dict[str, float]:
    """A round of steps; replicas wait for each other at its end, as for each other's differences."""
    made, step_s = replica(), 0.0 if hurry else float(os.environ["BENCH_STEP_S"])
    before, rounds = made.manager.current_step(), steps // EVERY
    sent, busy, began = _sent_bytes(), time.process_time(), time.perf_counter()
    for _ in range(steps):
        made.step(step_s)
    seconds = time.perf_counter() - began
    if (held := made.manager.current_step() - before) != rounds:
        raise RuntimeError(f"torchft has committed {held} of {rounds} rounds")
    return {"seconds": seconds, "busy_s": time.process_time() - busy, "sent_bytes": _sent_bytes() - sent}


def _sent_bytes() -> int:
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


if __name__ == "__main__":
    serve({"block": block})
    os._exit(0)  # its threads do not end by themselves
