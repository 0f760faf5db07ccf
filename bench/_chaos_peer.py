"""The peers of bench.chaos at the same training: a worker under torchrun, or a replica of torchft.

It needs torch alone, so that it runs in a peer's environment. Each committed step is one line in a file of the process:
its number and the time.

    torchrun   DDP with gloo. The first rank saves model, optimizer and step every so many seconds, into a file that it
               moves into place; whoever starts loads it: the pattern of PyTorch's tutorial on torchrun.
    torchft    a replica group of one process; Manager, DistributedDataParallel and Optimizer as in its train_ddp.py.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn
from torch.nn import functional as F

SAMPLES = 960


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--side", choices=["torchrun", "torchft"], required=True)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--step-s", type=float, required=True)
    parser.add_argument("--save-every-s", type=float, default=1.0)
    parser.add_argument("--replica", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    file = (options.dir / f"steps-{os.getpid()}").open("w", buffering=1)
    (torchrun if options.side == "torchrun" else torchft)(options, file)


def torchrun(options: argparse.Namespace, file: IO[str]) -> None:
    import torch.distributed as dist

    # With init_process_group("gloo") alone no restart ever succeeds (torch 2.13, --standalone): the agent's store still
    # has the addresses of the first attempt, and whoever comes again dials the dead.
    master, attempt = (os.environ[name] for name in ("MASTER_ADDR", "TORCHELASTIC_RESTART_COUNT"))
    store = dist.PrefixStore(f"attempt {attempt}", dist.TCPStore(master, int(os.environ["MASTER_PORT"])))
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    rank, saved = dist.get_rank(), options.dir / "checkpoint.pt"
    model = nn.parallel.DistributedDataParallel(_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    step = 0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    save_at = time.monotonic() + options.save_every_s
    while step < options.steps:
        _train(model, optimizer, options.step_s)
        step += 1
        _note(file, step)
        if rank == 0 and (time.monotonic() >= save_at or step == options.steps):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, saved.with_suffix(".new"))
            saved.with_suffix(".new").replace(saved)
            save_at = time.monotonic() + options.save_every_s
    dist.destroy_process_group()


def torchft(options: argparse.Namespace, file: IO[str]) -> None:
    from datetime import timedelta

    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo  # type: ignore[import-not-found]

    # As under torchrun: a store of this replica's own.
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    net = _net()
    inner = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)

    def load(state: dict[str, Any]) -> None:
        net.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=2,
        load_state_dict=load,
        state_dict=lambda: {"model": net.state_dict(), "optimizer": inner.state_dict()},
        replica_id=f"replica_{options.replica}",
        timeout=timedelta(seconds=10),
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
    )
    model, optimizer = DistributedDataParallel(manager, net), Optimizer(manager, inner)
    while manager.current_step() < options.steps:
        before = manager.current_step()
        _train(model, optimizer, options.step_s)
        if manager.current_step() == before + 1:  # not one that was dropped, nor one that was healed from others
            _note(file, manager.current_step())
    os._exit(0)  # its threads do not end by themselves


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def _train(model: nn.Module, optimizer: Any, step_s: float) -> None:
    time.sleep(step_s)
    x, y = torch.randn(8, 64), torch.randint(10, (8,))
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def _note(file: IO[str], step: int) -> None:
    file.write(f"{step} {time.monotonic()}\n")


if __name__ == "__main__":
    main()
