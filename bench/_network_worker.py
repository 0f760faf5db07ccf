"""A member of `bench.network`: steps whose compute is a calibrated sleep and whose bytes are real.

`Emulated` has the parameters of a real model. Its forward sleeps as long as the model's forward took alone with one
thread; in its backward every parameter sleeps its share and then hands over a gradient of the real model, in the order
in which the real backward made them. Hooks, buckets, codecs and wire are the real ones, and communication can overlap
with the sleep as it would with compute on a host that has a core to spare for it.

Ours is driven below `paceline.join()`, with one `AllReduce` per codec in the same process: what `run.log` and the
progress display cost is not in these times.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench import workers
from bench.models import Batch, Task, _text, character_gpt, fashion_cnn, wide_gpt

NUM_GRADIENTS = 2  # sets of real gradients per member, taken in turn
TOKEN = "a token of the benchmark"


def _images(size: int, seed: int) -> Batch:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(size, 1, 28, 28, generator=g), torch.randint(10, (size,), generator=g)


TASKS = {
    "cnn": Task(make=fashion_cnn, batch=_images, batch_size=32),
    "gpt": Task(make=character_gpt, batch=_text(128, 64), batch_size=8),
    "wide": Task(make=wide_gpt, batch=_text(128, 64), batch_size=8),
}


class Compute(msgspec.Struct, frozen=True):
    """What the compute of a step took alone: seconds of the forward, and of each parameter's part of the backward."""

    forward_s: float
    backward: list[tuple[str, float]]  # in the order of arrival

    @property
    def step_s(self) -> float:
        return self.forward_s + sum(s for _, s in self.backward)

    def scaled(self, step_s: float) -> Compute:
        """As on a machine that takes so long for a step."""
        times = step_s / self.step_s
        return Compute(self.forward_s * times, [(name, times * seconds) for name, seconds in self.backward])


def calibrate(task: Task, repeats: int = 15, threads: int = 1) -> Compute:
    """Time forward and backward of the real model on so many threads: medians of the processor time of the first, which
    other programs on this machine disturb less than the clock."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    torch.manual_seed(1)
    model, batch = task.make(), task.batch(task.batch_size, 1)
    arrived: list[tuple[str, float]] = []
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda _, name=name: arrived.append((name, time.thread_time()))
        )
    forwards: list[float] = []
    shares: dict[str, list[float]] = {}
    for repeat in range(-3, repeats):  # the first ones warm up
        model.zero_grad()
        arrived.clear()
        began = time.thread_time()
        loss = task.loss(model, batch)
        last = time.thread_time()
        forward_s = last - began
        loss.backward()
        for name, at in arrived if repeat >= 0 else []:
            shares.setdefault(name, []).append(at - last)
            last = at
        if repeat >= 0:
            forwards.append(forward_s)
    torch.set_num_threads(before)
    return Compute(statistics.median(forwards), [(name, statistics.median(s)) for name, s in shares.items()])


class Sleeper:
    """Sleeps shares of a millisecond too, on the whole: what a sleep took too long is taken off the next."""

    def __init__(self) -> None:
        self._owed_s = 0.0

    def sleep(self, seconds: float) -> None:
        self._owed_s += seconds
        if self._owed_s > 5e-4:
            began = time.perf_counter()
            time.sleep(self._owed_s)
            self._owed_s -= time.perf_counter() - began


class Part(torch.autograd.Function):
    """One parameter's part of the backward."""

    @staticmethod
    def forward(ctx: Any, chain: Tensor, parameter: Tensor, hand_over: Callable[[], Tensor]) -> Tensor:
        ctx.hand_over = hand_over
        return chain.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], ctx.hand_over(), None


class Emulated(nn.Module):
    """The parameters and gradients of a real model; sleep instead of its compute."""

    def __init__(self, model: nn.Module, compute: Compute, gradients: list[dict[str, Tensor]]) -> None:
        super().__init__()
        self.model = model
        self._sleeper = Sleeper()
        self.compute = compute
        self._gradients = gradients
        self._turn = 0
        self._named = dict(model.named_parameters())

    def forward(self) -> Tensor:
        self._turn = (self._turn + 1) % len(self._gradients)
        self._sleeper.sleep(self.compute.forward_s)
        chain = torch.zeros((), requires_grad=True)
        for name, seconds in reversed(self.compute.backward):
            chain = Part.apply(chain, self._named[name], self._hand_over(name, seconds))  # type: ignore[no-untyped-call]
        return chain

    def _hand_over(self, name: str, seconds: float) -> Callable[[], Tensor]:
        def hand_over() -> Tensor:
            self._sleeper.sleep(seconds)
            return self._gradients[self._turn][name]

        return hand_over


@cache
def gradients(task: str) -> list[dict[str, Tensor]]:
    """Gradients of the real model on batches of this member's own."""
    torch.manual_seed(1)
    chosen, found = TASKS[task], []
    for turn in range(NUM_GRADIENTS):
        model = chosen.make()
        chosen.loss(model, chosen.batch(chosen.batch_size, NUM_GRADIENTS * workers.RANK + turn)).backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    return found


def sgd(model: nn.Module, side: dict[str, str], lr: float) -> torch.optim.Optimizer:
    """SGD with momentum 0.9; with dgc, which keeps the momentum itself, only for parameters that it does not encode."""
    kept = 0.0 if side.get("codec", "").startswith("dgc") else 0.9
    parameters = list(model.parameters())
    large, small = [p for p in parameters if p.numel() >= 1024], [p for p in parameters if p.numel() < 1024]
    return torch.optim.SGD([{"params": large, "momentum": kept}, {"params": small, "momentum": 0.9}], lr=lr)


class Exchange:
    """How one model's gradients become the members' mean."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, side: dict[str, str]) -> None:
        self.kind, self.forward, self._strategy, self._group = side["kind"], model, None, None
        if self.kind == "ours":
            from paceline.strategies import AllReduce, World

            self._group = members().subgroup(range(workers.SIZE))
            self._strategy = AllReduce(codec=side.get("codec"), back=side.get("back"))
            self._strategy.attach(model, optimizer, World(self._group))
        elif self.kind == "ddp":
            self.forward = ddp(model, side.get("hook", ""))

    def finish(self, optimizer: torch.optim.Optimizer) -> None:
        if self._strategy:
            self._strategy.finish(optimizer)

    def cost(self) -> dict[str, float]:
        coders = [e.coder for e in self._strategy._engines.values()] if self._strategy else []
        return {k: float(v) for coder in coders if coder for k, v in vars(coder.cost).items()}

    def close(self) -> None:
        if self._strategy and self._group:
            self._strategy.close()
            self._group.close()


def ddp(model: nn.Module, hook: str) -> nn.Module:
    """DDP as it comes, with its fp16 hook, or with PowerSGD (over gloo only a single bucket works)."""
    workers.gloo()
    if hook != "powersgd":
        wrapped = nn.parallel.DistributedDataParallel(model)
        if hook == "fp16":
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

            wrapped.register_comm_hook(None, fp16_compress_hook)
        return wrapped
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1000)
    wrapped.register_comm_hook(PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2), powerSGD_hook)
    return wrapped


@dataclass
class Loop:
    """One emulated model being trained."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    exchange: Exchange

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.exchange.forward().backward()
        self.exchange.finish(self.optimizer)
        self.optimizer.step()


_loops: dict[str, Loop] = {}
_wires: list[Any] = []
_groups: list[Any] = []


def members() -> Any:
    """Our group of all members."""
    return _groups[0]


def describe() -> str:
    """Open this member's own end of the wires; how the others will see it."""
    made, told = _described()
    _wires.append(made)
    return told


def connect(described: list[str]) -> None:
    """Join the others, by ours and by gloo."""
    _groups.append(_joined(_wires[0], described))
    workers.gloo()


def meet_again() -> tuple[Any, Any]:
    """Further wires and a group on them: servers take their workers' channels by name, once."""
    made, told = _described()
    described = [""] * workers.SIZE
    dist.all_gather_object(described, told)
    return made, _joined(made, described)


def _described() -> tuple[Any, str]:
    from paceline.transport.wires import Wires

    made = Wires(TOKEN, os.environ["BENCH_ADDRESS"])
    return made, msgspec.json.encode(made.describe(workers.RANK, os.environ["BENCH_HOST"])).decode()


def _joined(wires: Any, described: list[str]) -> Any:
    from paceline.core.status import Status
    from paceline.core.view import Member, View
    from paceline.transport.group import Group

    everyone = tuple(msgspec.json.decode(text, type=Member) for text in described)
    wires.join(View(number=1, members=everyone), workers.RANK, limit_s=120.0, status=Status(None))
    return Group(wires, range(workers.SIZE))


def make(name: str, task: str, side: dict[str, str], compute: dict[str, Any]) -> None:
    torch.manual_seed(1)
    model = Emulated(TASKS[task].make(), msgspec.convert(compute, Compute), gradients(task))
    optimizer = sgd(model, side, lr=1e-3)
    _loops[name] = Loop(model, optimizer, Exchange(model, optimizer, side))


def block(name: str, steps: int) -> dict[str, float]:
    """Run steps: their seconds, processor time, bytes that left this host, and what the codec says it took."""
    loop = _loops[name]
    dist.barrier()
    before, sent, busy, began = loop.exchange.cost(), _sent_bytes(), time.process_time(), time.perf_counter()
    for _ in range(steps):
        loop.step()
    seconds = time.perf_counter() - began
    cost = {key: value - before.get(key, 0.0) for key, value in loop.exchange.cost().items()}
    busy = time.process_time() - busy
    return {"seconds": seconds, "busy_s": busy, "sent_bytes": _sent_bytes() - sent, **cost}


def _sent_bytes() -> int:
    """By the interface counter of this host; 0 where the members share a host."""
    file = Path("/sys/class/net/eth0/statistics/tx_bytes")
    return int(file.read_text()) if os.environ["BENCH_HOST"] != "one" else 0


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "describe": describe,
    "connect": connect,
    "make": make,
    "block": block,
}
