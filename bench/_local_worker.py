"""A member of `bench.local`: how each side agrees, on an emulated model for its time and on a real one for its loss.

    ddp              gloo, a gradient per step
    ddp post-local   DDP with PyTorch's PostLocalSGDOptimizer and hook: parameters averaged every H steps
    ours             a strategy in words, driven below `paceline.join()`; a shard of the servers lives with each member
    torchft diloco   in an environment of its own (`_local_torchft`)

What is emulated is the compute alone (`_network_worker.Emulated`): a calibrated sleep instead of forward and backward.
Optimizers, differences, codecs, outer steps and bytes are the real ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench import _network_worker as network
from bench import workers
from bench._local_tasks import TASKS, Task

_OUTER, _FOUR_BITS = "outer='nesterov(lr=1.0, momentum=0.5)'", "codec='quantize(4), back=quantize(4)'"
_EIGHTH = "codec='topk(0.125, values=2bit), back=topk(0.125, values=2bit)'"
SIDES: dict[str, dict[str, Any]] = {
    "alone": {"kind": "alone", "every": 20},
    "ddp": {"kind": "ddp", "every": 1},
    "ddp post-local": {"kind": "post_local", "every": 50},
    "local": {"kind": "ours", "every": 50, "strategy": "local(every=50)"},
    "average": {"kind": "ours", "every": 100, "strategy": "average(every=100)"},
    "diloco": {
        "kind": "ours",
        "every": 60,
        "strategy": f"diloco(every=60, {_OUTER}, {_FOUR_BITS})",
    },
    "diloco overlap": {
        "kind": "ours",
        "every": 60,
        "strategy": f"diloco(every=60, {_OUTER}, {_FOUR_BITS}, overlap=12)",
    },
    "diloco late": {
        "kind": "ours",
        "every": 60,
        "strategy": f"diloco(every=60, {_OUTER}, {_FOUR_BITS}, overlap=overlap(5, fragments=1))",
    },
    "sparse diloco": {
        "kind": "ours",
        "every": 60,
        "strategy": f"local(every=60, {_OUTER}, {_EIGHTH})",
    },
    "sparseloco": {"kind": "ours", "every": 30, "strategy": "sparseloco(every=30)"},
    "sites": {  # two, of two members each
        "kind": "ours",
        "every": 60,
        "strategy": f"diloco(every=60, {_OUTER}, {_FOUR_BITS}, inner=allreduce)",
    },
    "async local": {
        "kind": "ours",
        "every": 60,
        "strategy": "async_local(every=60, lr=1.0, momentum=0.5)",
        "codec": "quantize(4), back=quantize(4)",
    },
}


def side(name: str) -> dict[str, Any]:
    """One of these, or a local strategy in words."""
    if name in SIDES:
        return SIDES[name]
    from paceline.strategies import AsyncLocal, Local, make_strategy

    strategy = make_strategy(name)
    if not isinstance(strategy, Local | AsyncLocal):
        raise SystemExit(f"bench.local: {name!r} is no local strategy, nor one of {', '.join(SIDES)}")
    every = strategy.every if isinstance(strategy, AsyncLocal) else strategy.plan.every.least
    return {"kind": "ours", "every": every, "strategy": name}


class Agreement:
    """How one model becomes the members' own, whatever the side."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, side: dict[str, Any], samples: int) -> None:
        self.model, self.forward, self.optimizer = model, model, optimizer
        self._strategy: Any = None
        self._wires: Any = None  # of its own
        self._samples = samples
        self.computed: Callable[[], object] = lambda: None  # called after each backward
        if side["kind"] == "ours":
            from paceline.strategies import AsyncLocal, World, make_strategy

            self._strategy = make_strategy(side["strategy"], side.get("codec", ""))
            if isinstance(self._strategy, AsyncLocal):
                self._wires, self._group = network.meet_again()
            else:
                self._group = network.members().subgroup(range(workers.SIZE))
            site = f"site-{2 * workers.RANK // workers.SIZE}"
            self._world = World(self._group, wires=self._wires, site=site)
            self._strategy.attach(model, optimizer, self._world)
        elif side["kind"] in ("ddp", "post_local"):
            workers.gloo()
            self.forward = nn.parallel.DistributedDataParallel(model)
        if side["kind"] == "post_local":
            self.optimizer = _post_local(self.forward, optimizer, side["every"])

    def step(self, loss_of: Callable[[nn.Module], Tensor]) -> None:
        self.optimizer.zero_grad()
        if self._strategy:
            self._strategy.cleared()
            self._world.tally.add(self._samples, self._samples)
        loss = loss_of(self.forward)
        loss.backward()  # type: ignore[no-untyped-call]
        self.computed()
        if self._strategy:
            if self._world.listen:
                self._world.listen({"loss": loss.detach(), "tokens": self._samples})
            self._strategy.reduced()
            if self._strategy.finish(self.optimizer):
                self.optimizer.step()
            self._strategy.stepped(self.optimizer)
        else:
            self.optimizer.step()

    def look(self, measure: Callable[[nn.Module], Any], *, end: bool) -> Any:
        """What the run has agreed on, measured."""
        if not self._strategy:
            return measure(self.model)
        self._strategy.together(end=end)
        with self._strategy.showing():
            return measure(self.model)

    @property
    def waited_s(self) -> float:
        """For exchanges, of our sides; others do not tell."""
        return float(self._world.waited_s) if self._strategy else 0.0

    def close(self) -> None:
        if self._strategy:
            self._strategy.close()
            self._group.close()
            if self._wires:
                self._wires.close()


def _post_local(model: nn.Module, optimizer: torch.optim.Optimizer, every: int) -> torch.optim.Optimizer:
    """As PyTorch's documentation has it, without warm-up; nothing is reduced within a host, which has one member."""
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    state = PostLocalSGDState(None, None, start_localSGD_iter=0, post_local_gradient_allreduce=False)
    model.register_comm_hook(state, post_localSGD_hook)  # type: ignore[operator]
    return PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(period=every, warmup_steps=0))


# ---- time: emulated compute, real bytes

_loops: dict[str, tuple[network.Emulated, Agreement, network.Compute]] = {}


def make(name: str, task: str, side: dict[str, Any], compute: dict[str, Any]) -> None:
    torch.manual_seed(1)
    told = msgspec.convert(compute, network.Compute)
    model = network.Emulated(network.TASKS[task].make(), told, network.gradients(task))
    _loops[name] = model, Agreement(model, TASKS[task].optimizer(model, 1e-4), side, 1), told


def drop(name: str) -> None:
    _loops.pop(name)[1].close()


def block(name: str, steps: int, hurry: bool = False) -> dict[str, float]:
    """Run steps: their seconds, processor time, seconds waited and the bytes that left this host. `hurry`: without the
    sleep."""
    model, agreement, compute = _loops[name]
    still = network.Compute(0.0, [(parameter, 0.0) for parameter, _ in compute.backward])
    model.compute = still if hurry else compute
    dist.barrier()
    waited, sent, busy = agreement.waited_s, network._sent_bytes(), time.process_time()
    began = time.perf_counter()
    for _ in range(steps):
        agreement.step(lambda forward: forward())
    seconds = time.perf_counter() - began
    return {
        "seconds": seconds,
        "busy_s": time.process_time() - busy,
        "waited_s": agreement.waited_s - waited,
        "sent_bytes": network._sent_bytes() - sent,
    }


# ---- loss: real compute


class Training:
    """One model in training. A batch depends on the seed, the step and the member only."""

    def __init__(self, task: Task, side: dict[str, Any], lr: float, seed: int, total: int, case: str) -> None:
        torch.manual_seed(seed)
        self.task, self.lr, self.seed, self.total, self.case, self.done = task, lr, seed, total, case, 0
        self.pace_s, self._began = 0.0, 0.0  # what the compute of a step takes at least, and when one began
        self.model = task.make().to(task.device)
        self.ranks = [workers.RANK]  # whose batches this member trains on
        if task.whole and side["kind"] == "ddp":
            side, self.ranks = SIDES["alone"], list(range(workers.SIZE)) if workers.RANK == 0 else []
        self.agreement = Agreement(self.model, task.optimizer(self.model, lr), side, task.batch)
        self.agreement.computed = self._rest

    def step(self) -> None:
        self._began = time.perf_counter()
        for group in self.agreement.optimizer.param_groups:
            group["lr"] = self.lr * self.task.share(self.done, self.total)
        if self.ranks:
            drawn = [self.task.draw(self.seed, self.done, rank, workers.SIZE, self.case) for rank in self.ranks]
            x, y = (torch.cat(parts) for parts in zip(*drawn))
            self.agreement.step(lambda model: self.task.loss(model, (x, y)))
        self.done += 1

    def _rest(self) -> None:
        time.sleep(max(0.0, self._began + self.pace_s - time.perf_counter()))

    def measure(self, model: nn.Module) -> float:
        """What its batches' members measure on their shares of the held-out data."""
        return sum(self.task.measure(model, rank, workers.SIZE) for rank in self.ranks)


_training: list[Training] = []


def begin(task: str, side: dict[str, Any], lr: float, seed: int, total: int, case: str = "") -> None:
    _training[:] = [Training(TASKS[task], side, lr, seed, total, case)]


def train(steps: int) -> float:
    """Go on for so many steps; then this member's sum over its share of the held-out data."""
    training = _training[0]
    for _ in range(steps):
        training.step()
    return float(training.agreement.look(training.measure, end=training.done >= training.total))


def begin_paced(task: str, side: dict[str, Any], lr: float, seed: int, totals: list[int], paces: list[float]) -> None:
    """A training in which this member takes its own number of steps, each of so many seconds."""
    begin(task, side, lr, seed, totals[workers.RANK])
    _training[0].pace_s = paces[workers.RANK]
    dist.barrier()


def train_paced() -> float:
    """All of it; as `train`."""
    return train(_training[0].total)


def end() -> None:
    _training.pop().agreement.close()


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "describe": network.describe,
    "connect": network.connect,
    "make": make,
    "drop": drop,
    "block": block,
    "begin": begin,
    "train": train,
    "begin_paced": begin_paced,
    "train_paced": train_paced,
    "end": end,
}
