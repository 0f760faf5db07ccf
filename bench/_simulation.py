"""Asynchronous training in virtual time: `bench.straggler` and `bench.corrections`.

One process, no sockets, no sleep. Gradients, shard, gate, corrections and optimizer are the real ones; what is emulated
is time. Workers are events in a queue: a worker's compute takes as long as its delay says, then its push waits for the
server, which takes `push` for one push and its pull, one after another. The worker computes its gradient with the
weights that it was sent, and gets the next ones when the shard says that they are ready for it, as over the network.

    computed ──▶ the server is free, a push later ──▶ shard.part ──▶ ready: these weights are sent ──▶ computes ...

Samples of an epoch are dealt to whoever comes next. The data is Debian's dataset-fashion-mnist, or the same files in
BENCH_DATA. The model is a CNN of 106,000 parameters, small enough for one core.
"""

from __future__ import annotations

import heapq
import itertools
import math
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.nn import functional as F

from bench import _delays
from bench import _network_accuracy as fashion
from bench.models import small_cnn
from bench.team import Team, serve
from paceline.core.errors import ConfigError
from paceline.server.messages import Push, Rule
from paceline.server.placement import Tensor as Placed
from paceline.server.placement import place
from paceline.server.shard import Shard
from paceline.server.stock import room

LOOKS = 20  # at the test set in an epoch, until the target is reached
CHANCE = 0.1  # accuracy of a model that has learned nothing


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One training. Times are multiples of a step at full speed."""

    workers: int
    gate: str
    delays: str  # see `_delays`
    lr: float
    correct: str = ""
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0
    batch: int = 32
    epochs: float = 4.0
    push: float = 0.0  # and its pull, at the server
    target: float = 0.0
    seed: int = 0
    device: str = "cpu"


class Outcome(msgspec.Struct, kw_only=True):
    """What came of a plan."""

    accuracy: float = CHANCE  # at the end
    to_target: float = math.inf  # time
    time: float = 0.0  # of the whole training
    mean_age: float = 0.0
    max_age: int = 0
    dropped: int = 0
    failed: str = ""  # why it ended before its time


class Simulation:
    """One plan under way."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        torch.manual_seed(plan.seed)
        with torch.device("cpu"):  # the same weights whatever the device
            self.model = small_cnn().to(plan.device)
        self.parameters = list(self.model.parameters())
        first = torch.cat([p.detach().view(-1) for p in self.parameters])
        placement = place([Placed("model", (first.numel(),), "float32", 0)], 1, cut=False)
        rule = Rule(optimizer="SGD", groups=[self._options(plan.lr)], gate=plan.gate, correct=plan.correct)
        memory = torch.zeros(room(placement.of(0)), dtype=torch.uint8)
        self.shard = Shard(placement, 0, rule, memory, self._ready)
        self.shard.stock.store(0, first)
        self.read = [first.clone() for _ in range(plan.workers)]  # the weights that each worker has
        self.outcome = Outcome()
        self.now = 0.0  # of the server, when it is done with a push
        self._steps = [self.shard.join(rank) for rank in range(plan.workers)]
        self._delay = _delays.delay(plan.delays, plan.seed)
        self._events: list[tuple[float, int, int]] = []  # when, tie, whose push has come in
        self._ties = itertools.count()
        self._begun = 0  # batches
        self._ages = [0]

    def run(self) -> Outcome:
        plan, outcome = self.plan, self.outcome
        count = len(fashion._data("train")[1])
        total = round(plan.epochs * count / plan.batch)
        every, look, done = count / plan.batch / LOOKS, 1, 0
        for rank in range(plan.workers):
            self._go(rank)
        while done < total:
            came, _, rank = heapq.heappop(self._events)
            self.now = max(self.now, came) + plan.push
            try:
                self._push(rank, total)
            except ConfigError as error:  # a gradient that is not finite
                outcome.failed = f"after {done} of {total} pushes: {error}"
                break
            done += 1
            if plan.target and outcome.to_target == math.inf and done >= every * look:
                look += 1
                if self._accuracy() >= plan.target:
                    outcome.to_target = self.now
        outcome.time, outcome.dropped = self.now, self.shard.dropped
        outcome.mean_age, outcome.max_age = sum(self._ages) / len(self._ages), max(self._ages)
        outcome.accuracy = CHANCE if outcome.failed else self._accuracy()
        return outcome

    def _go(self, rank: int) -> None:
        """A worker begins to compute; when it is done, it pushes."""
        heapq.heappush(self._events, (self.now + self._delay(rank, self.now), next(self._ties), rank))

    def _push(self, rank: int, total: int) -> None:
        warm = max(1, total // 10)
        lr = self.plan.lr * min(1.0, (self._begun + 1) / warm) * 0.5 * (1 + math.cos(math.pi * self._begun / total))
        gradient = self._gradient(rank)
        self._begun += 1
        self._steps[rank] += 1
        named = self.shard.named_version(rank)
        self._ages.append(self.shard.version - named)
        push = Push(table=0, view=1, step=self._steps[rank], read=named, weight=1.0, groups=[self._options(lr)])
        with torch.no_grad():
            self.shard.begin(rank, push)
            self.shard.part(rank, 0, gradient)

    def _ready(self, rank: int, index: int) -> None:
        self.read[rank].copy_(self.shard.weights(rank, index))
        self._go(rank)

    def _gradient(self, rank: int) -> Tensor:
        self._use(self.read[rank])
        x, y = fashion._batch("train", self._dealt())
        gradients = torch.autograd.grad(F.cross_entropy(self.model(x), y), self.parameters)
        return torch.cat([g.view(-1) for g in gradients])

    def _dealt(self) -> Tensor:
        count = len(fashion._data("train")[1])
        epoch, number = divmod(self._begun, count // self.plan.batch)
        with torch.device("cpu"):  # the same order whatever the device
            order = fashion._order(count, 1000 * self.plan.seed + epoch)
        return order[number * self.plan.batch : (number + 1) * self.plan.batch]

    def _use(self, flat: Tensor) -> None:
        at = 0
        for p in self.parameters:
            p.data = flat[at : at + p.numel()].view(p.shape)
            at += p.numel()

    def _accuracy(self) -> float:
        """Of the weights on the shard."""
        self._use(self.shard.stock.weights[0])
        right = 0
        with torch.no_grad():
            indices = torch.arange(len(fashion._data("t10k")[1]), device="cpu")
            for at in indices.split(500):
                x, y = fashion._batch("t10k", at)
                right += int((self.model(x).argmax(1) == y).sum())
        return right / len(indices)

    def _options(self, lr: float) -> dict[str, Any]:
        plan = self.plan
        return {"lr": lr, "momentum": plan.momentum, "nesterov": plan.nesterov, "weight_decay": plan.weight_decay}


def simulate(plan: dict[str, Any]) -> dict[str, Any]:
    """Run a plan."""
    made = msgspec.convert(plan, Plan)
    fashion.DEVICE = made.device
    for part in ("train", "t10k"):
        fashion._data(part)
    with torch.device(made.device):
        found: dict[str, Any] = msgspec.to_builtins(Simulation(made).run())
    return found


def run_all(plans: Sequence[Plan], jobs: int, say: Callable[[Plan, Outcome], None]) -> list[Outcome]:
    """The outcomes of all plans, `jobs` of them at a time, each in a process of one thread."""
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in range(len(plans)):
        waiting.put(index)
    found: dict[int, Outcome] = {}
    errors: list[Exception] = []

    def work() -> None:
        try:
            with Team.of(1, "bench._simulation", ours=False, limit_s=1200.0) as team:
                while True:
                    try:
                        index = waiting.get_nowait()
                    except queue.Empty:
                        return
                    answer = team.call("simulate", plan=msgspec.to_builtins(plans[index]))[0]
                    found[index] = msgspec.convert(answer, Outcome)
                    say(plans[index], found[index])
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(min(jobs, len(plans)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [found[index] for index in range(len(plans))]


if __name__ == "__main__":
    serve({"simulate": simulate})
