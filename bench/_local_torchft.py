"""torchft's DiLoCo beside ours in `bench.local`: replicas of one process each, in an environment that has torchft.

Manager, lighthouse and DiLoCo as in its own examples, with a quorum at each round, and differences as they are: its
quantization needs a GPU. Where steps are timed their compute is slept, as for the other sides, and gradients are fixed
numbers; what it learns is from the same batches and the same inner optimizer as with ours. A round that its members did
not commit is an error. It needs torch, torchft and msgspec alone.

Heartbeats go over the link that the exchange fills, so a replica counts as lost only after a minute without one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.team import Team, TeamError, serve

EVERY = 60  # as diloco has it
RANK, SIZE = int(os.environ.get("BENCH_RANK", "0")), int(os.environ.get("BENCH_SIZE", "1"))
_PORT = 29_700
_LIMIT_S = 300
_HEARTBEAT_MS = 60_000
Place = tuple[list[str], str]  # what goes before a command to run it there, and the address


def missing(python: str) -> str:
    """Why it cannot be started with this interpreter; "" where it can."""
    lighthouse = _lighthouse(python)
    if not shutil.which(lighthouse):
        return f"no {lighthouse} beside --torchft {python}: install bench/peers/torchft.txt there"
    return ""


def _lighthouse(python: str) -> str:
    return str(Path(python).parent / "torchft_lighthouse")


def on_hosts(hosts: Any) -> list[Place]:
    return [(["ip", "netns", "exec", space], hosts.ips[rank]) for rank, space in enumerate(hosts._spaces)]


def on_this_host(count: int) -> list[Place]:
    return [([], "127.0.0.1")] * count


@contextmanager
def start(places: list[Place], python: str, interface: str) -> Iterator[Team]:
    """A replica at each place, and the lighthouse at the first."""
    count, commands = len(places), []
    wanted = ["--min_replicas", str(count), "--quorum_tick_ms", "100", "--join_timeout_ms", "10000"]
    wanted += ["--heartbeat_timeout_ms", str(_HEARTBEAT_MS), "--bind", f"[::]:{_PORT}"]
    first, address = places[0]
    for rank, (prefix, ip) in enumerate(places):
        env = {"BENCH_RANK": str(rank), "BENCH_SIZE": str(count), "BENCH_ADDRESS": ip}
        env |= {"TORCHFT_LIGHTHOUSE": f"http://{address}:{_PORT}", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        env |= {"BENCH_DEVICE": "cpu", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": interface}
        commands.append(([*prefix, python, "-m", "bench._local_torchft"], env))
    with tempfile.TemporaryFile() as said:
        light = subprocess.Popen([*first, _lighthouse(python), *wanted], stdout=said, stderr=said)
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

    def __init__(self, model: Any, inner: Any) -> None:
        from datetime import timedelta

        import torch
        from torchft import Manager, ProcessGroupGloo  # type: ignore[import-not-found]
        from torchft.local_sgd import DiLoCo  # type: ignore[import-not-found]

        ip, limit = os.environ["BENCH_ADDRESS"], timedelta(seconds=_LIMIT_S)
        self._store = torch.distributed.TCPStore(ip, 0, is_master=True, wait_for_workers=False)
        self.model, self.inner = model, inner
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        self._manager = Manager(
            pg=ProcessGroupGloo(timeout=limit),
            min_replica_size=SIZE,
            use_async_quorum=False,
            init_sync=False,  # all begin alike; its checkpoint server knows hosts by names that these do not have
            load_state_dict=lambda state: None,
            state_dict=dict,
            replica_id=f"replica_{RANK}",
            timeout=limit,
            quorum_timeout=limit,
            connect_timeout=limit,
            store_addr=ip,
            store_port=self._store.port,
            hostname=ip,
            rank=0,
            world_size=1,
        )
        DiLoCo(self._manager, [model], self.inner, outer, sync_every=EVERY, pin_memory=False).__enter__()

    def rounds(self, steps: int, step: Callable[[], None]) -> None:
        """Whole rounds of steps; replicas wait for each other at the end of each."""
        before = self._manager.current_step()
        for _ in range(steps):
            step()
            self.inner.step()
        if (held := self._manager.current_step() - before) != steps // EVERY:
            raise RuntimeError(f"torchft has committed {held} of {steps // EVERY} rounds")


class Timed:
    """Steps whose compute is slept."""

    def __init__(self, task: str, step_s: float) -> None:
        import torch

        from bench._local_tasks import TASKS

        torch.manual_seed(1)
        model = TASKS[task].make()
        self.replica, self.step_s = Replica(model, TASKS[task].optimizer(model, 1e-4)), step_s
        self._given = [(p, torch.full_like(p, 1e-3)) for p in model.parameters()]

    def block(self, steps: int, hurry: bool) -> dict[str, float]:
        def step() -> None:
            time.sleep(0.0 if hurry else self.step_s)
            for p, gradient in self._given:
                p.grad = gradient

        sent, busy, began = _sent_bytes(), time.process_time(), time.perf_counter()
        self.replica.rounds(steps, step)
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "busy_s": time.process_time() - busy, "sent_bytes": _sent_bytes() - sent}


class Training:
    """Real steps, with the batches and the rates that ours has."""

    def __init__(self, task: str, lr: float, seed: int, total: int) -> None:
        import torch

        from bench._local_tasks import TASKS

        torch.manual_seed(seed)
        self.task, self.lr, self.seed, self.total, self.done = TASKS[task], lr, seed, total, 0
        model = self.task.make()
        self.replica = Replica(model, self.task.optimizer(model, lr))

    def train(self, steps: int) -> float:
        self.replica.rounds(steps, self._step)
        return self.task.measure(self.replica.model, RANK, SIZE)

    def _step(self) -> None:
        for group in self.replica.inner.param_groups:
            group["lr"] = self.lr * self.task.share(self.done, self.total)
        self.replica.inner.zero_grad()
        batch = self.task.draw(self.seed, self.done, RANK, SIZE, "")
        self.task.loss(self.replica.model, batch).backward()  # type: ignore[no-untyped-call]
        self.done += 1


_made: list[Any] = []


def make(task: str, step_s: float) -> None:
    _made.append(Timed(task, step_s))


def block(steps: int, hurry: bool = False) -> dict[str, float]:
    found: dict[str, float] = _made[0].block(steps, hurry)
    return found


def begin(task: str, side: dict[str, Any], lr: float, seed: int, total: int, case: str) -> None:
    _made.append(Training(task, lr, seed, total))


def train(steps: int) -> float:
    return float(_made[0].train(steps))


def _sent_bytes() -> int:
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    serve({"make": make, "block": block, "begin": begin, "train": train, "end": lambda: None})
    os._exit(0)  # its threads do not end by themselves
