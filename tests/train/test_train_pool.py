"""Threads that train the same parameters: one equals the plain loop, several lose and repeat no sample."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline
from paceline.core.errors import ConfigError
from paceline.core.events import Events
from paceline.core.status import Status
from paceline.data import Loader
from paceline.strategies import AllReduce, Async, Bounded, Strategy, Sync, World
from paceline.testing.together import together
from paceline.train.meter import Meter, Scalars
from paceline.train.pool import Pool, Turns
from paceline.transport.group import Group, solo


@pytest.fixture
def run(tmp_path: Path) -> Any:
    with paceline.join(root=str(tmp_path), name="run", progress="off", checkpoint_keep=0) as run:
        yield run


def data(num: int = 48) -> TensorDataset:
    """Samples with their numbers; classes that a line can tell apart."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num, 5, generator=generator)
    y = (x @ torch.randn(5, 3, generator=generator)).argmax(1)
    return TensorDataset(x, y, torch.arange(num))


def deep() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def test_one_thread_equals_the_plain_loop_bit_for_bit(run: Any) -> None:
    ours, plain = deep(), deep()
    adam = run.optimizer(torch.optim.Adam(ours.parameters(), lr=0.01), ours)
    reference = torch.optim.Adam(plain.parameters(), lr=0.01)
    loader, again = run.loader(data(), batch_size=8), Loader(data(), batch_size=8)
    before = [p.data_ptr() for p in ours.parameters()]
    for epoch in run.epochs(3):
        torch.manual_seed(epoch)
        run.in_threads(1, loss_of, ours, adam, loader)
        torch.manual_seed(epoch)
        again.set_epoch(epoch)
        for batch in again:
            reference.zero_grad()
            loss_of(plain, batch).backward()
            reference.step()
    assert [p.data_ptr() for p in ours.parameters()] == before
    assert all(map(torch.equal, ours.state_dict().values(), plain.state_dict().values()))
    assert run._meter.step == 18


def test_four_threads_train_every_sample_once_and_converge(run: Any) -> None:
    model = nn.Linear(5, 3)
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.2), model)
    dataset = data(200)
    loader = run.loader(dataset, batch_size=4)
    seen: list[list[int]] = []
    by: set[str] = set()

    def counted(model: nn.Module, batch: Any) -> torch.Tensor:
        seen[-1] += batch[2].tolist()
        by.add(threading.current_thread().name)
        time.sleep(0.001)  # so that all threads get some
        loss = loss_of(model, batch)
        run.log(loss=loss)
        return loss

    for _ in run.epochs(6):
        seen.append([])
        run.in_threads(4, counted, model, optimizer, loader)
    assert all(sorted(numbers) == list(range(200)) for numbers in seen)
    assert len(by) == 4
    right = (model(dataset.tensors[0]).argmax(1) == dataset.tensors[1]).float().mean()
    assert right > 0.9
    assert run._meter.step == 300
    assert run._meter.totals["samples"] == 1200


def test_others_may_step_between_a_forward_and_its_backward_pass(run: Any) -> None:
    """Autograd must not take the shared memory's change for an error; nor may a thread lose gradients to another."""
    model = deep()
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
    stepped = threading.Event()
    first = threading.Lock()

    def slow(model: nn.Module, batch: Any) -> torch.Tensor:
        loss = loss_of(model, batch)
        if first.acquire(blocking=False):
            assert stepped.wait(20)
        return loss

    def step() -> None:
        assert all(p.grad is not None for p in model.parameters())
        optimizer.step()
        stepped.set()

    for _ in run.epochs(1):
        run.in_threads(2, slow, model, optimizer, run.loader(data(), batch_size=8), step)
    assert run._meter.step == 6


def test_buffers_are_those_of_thread_0(run: Any) -> None:
    class Counts(nn.Module):
        total: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = nn.BatchNorm1d(5), nn.Linear(5, 3)
            self.register_buffer("total", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.total = self.total + 1  # another tensor each time
            out: torch.Tensor = self.head(self.norm(x))
            return out

    model = Counts()
    held = model.total
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    by: list[str] = []

    def counted(model: nn.Module, batch: Any) -> torch.Tensor:
        by.append(threading.current_thread().name)
        time.sleep(0.002)
        return loss_of(model, batch)

    for _ in run.epochs(2):
        run.in_threads(3, counted, model, optimizer, run.loader(data(), batch_size=4))
    trained = by.count("paceline-pool-0")
    assert 0 < trained < len(by) == 24
    assert model.norm.num_batches_tracked == trained
    assert model.total is held
    assert model.total == trained


@pytest.mark.parametrize("threads", [1, 4])
def test_an_exception_stops_all_and_is_raised(run: Any, threads: int) -> None:
    model = nn.Linear(5, 3)
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    loader = run.loader(data(400), batch_size=1)
    calls = 0

    def fails(model: nn.Module, batch: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 9:
            raise RuntimeError("the ninth")
        time.sleep(0.01)
        return loss_of(model, batch)

    for epoch in run.epochs(2):
        if epoch == 0:
            with pytest.raises(RuntimeError, match="the ninth") as raised:
                run.in_threads(threads, fails, model, optimizer, loader)
            assert any("run.in_threads" in note for note in getattr(raised.value, "__notes__", ())) == (threads > 1)
            assert calls <= 8 + 2 * threads
            assert not _pool_threads()
        else:  # whoever catches it may go on
            run.in_threads(threads, loss_of, model, optimizer, loader)
            assert run._meter.step >= 400


def test_a_thread_that_waits_for_what_others_may_leave_is_stopped_too() -> None:
    class Deals:
        """One batch; then it depends on others whether there are more."""

        def __init__(self) -> None:
            self.lent = 0
            self.waiting = threading.Event()

        def take(
            self, course: str, total: int, *, wait: bool, waits: Callable[[], None], bound: object = ()
        ) -> int | None:
            self.lent += 1
            for _ in range(400 if self.lent > 1 else 0):
                waits()
                self.waiting.set()
                time.sleep(0.05)
            return 0

        def done(self, course: str, numbers: Any) -> None:
            raise AssertionError("nothing was trained")

        deals = True

        def named(self, course: str) -> str:
            return course

        def rest(self) -> None:
            raise AssertionError("a batch is under way")

    deals = Deals()

    def fails(model: nn.Module, batch: Any) -> torch.Tensor:
        assert deals.waiting.wait(10)
        raise RuntimeError("after all")

    model = nn.Linear(5, 3)
    pool = Pool(
        2,
        fails,
        model,
        Loader(data(), batch_size=8, size=2, deal=deals),
        lambda: None,
        strategy=AllReduce(),
        world=World(solo(), limit_s=20.0),
        meter=Meter(Events(0), Status(None), size=1, readings=lambda: (0.0, 0.0, 0, 0.0)),
        device=torch.device("cpu"),
    )
    with pytest.raises(RuntimeError, match="after all"):
        pool.run()
    assert not _pool_threads()


def test_the_users_step_may_fail_too(run: Any) -> None:
    model = nn.Linear(5, 3)
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)

    def step() -> None:
        raise ValueError("no step")

    with pytest.raises(ValueError, match="no step"):
        run.in_threads(3, loss_of, model, optimizer, run.loader(data(), batch_size=8), step)
    assert not _pool_threads()


def test_ctrl_c_ends_it(run: Any) -> None:
    model = nn.Linear(5, 3)
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    calls = 0

    def interrupts(model: nn.Module, batch: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 10:
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        return loss_of(model, batch)

    with pytest.raises(KeyboardInterrupt):
        run.in_threads(2, interrupts, model, optimizer, run.loader(data(2000), batch_size=1))
    assert calls < 2000
    assert not _pool_threads()


def _pool_threads() -> list[str]:
    mine = [t for t in threading.enumerate() if t.name.startswith("paceline-pool")]
    for thread in mine:  # that has done its last work may still be about to end
        thread.join(0.2)
    return [thread.name for thread in mine if thread.is_alive()]


def test_the_cores_are_shared_out_and_given_back(run: Any) -> None:
    model = nn.Linear(5, 3)
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    inside: set[int] = set()

    def look(*_: Any) -> None:
        inside.add(torch.get_num_threads())

    def looked(model: nn.Module, batch: Any) -> torch.Tensor:
        look()
        loss = loss_of(model, batch)
        loss.register_hook(look)  # in the backward pass
        return loss

    def later() -> int:
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        thread.start()
        thread.join(10)
        return found[0]

    before = torch.get_num_threads()
    torch.set_num_threads(6)
    try:
        run.in_threads(3, looked, model, optimizer, run.loader(data(), batch_size=4))
        assert inside == {2}
        assert (torch.get_num_threads(), later()) == (6, 6)
    finally:
        torch.set_num_threads(before)


def test_a_step_of_the_users_own_clips_and_schedules(run: Any) -> None:
    model = nn.Linear(5, 3)
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    start = [p.detach().clone() for p in model.parameters()]

    def step() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1e-6)
        optimizer.step()
        scheduler.step()

    run.in_threads(2, loss_of, model, optimizer, run.loader(data(), batch_size=8), step)
    assert optimizer.param_groups[0]["lr"] == 0.5**6
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(start, model.parameters()))
    assert all(p.grad is None for p in model.parameters())


def test_a_checkpoint_within_an_epoch_waits_for_the_threads(tmp_path: Path) -> None:
    with paceline.join(root=str(tmp_path), name="run", progress="off", checkpoint_every_s=1e-9) as run:
        model = nn.Linear(5, 3)
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        loader = run.loader(data(60), batch_size=2)
        saved: list[tuple[int, int]] = []
        save = run._saver.save

        def noted(step: int, *place: int) -> None:
            saved.append((step, loader.state_dict()["consumed"]))
            save(step, *place)

        run._saver.save = noted  # type: ignore[method-assign]

        def slow(model: nn.Module, batch: Any) -> torch.Tensor:
            time.sleep(0.002)
            return loss_of(model, batch)

        for _ in run.epochs(1):
            run.in_threads(3, slow, model, optimizer, loader)
    within = [(step, consumed) for step, consumed in saved if step < 30]
    assert len(within) > 3
    assert all(consumed == 2 * step for step, consumed in within)


def test_what_cannot_work_is_refused(run: Any) -> None:
    model, other = nn.Linear(5, 3), nn.Linear(5, 3)
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    two = run.optimizer(torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1), other)
    loader = run.loader(data(), batch_size=8)
    with pytest.raises(ConfigError, match="from 1 to"):
        run.in_threads(0, loss_of, model, optimizer, loader)
    with pytest.raises(ConfigError, match=r"given to run\.optimizer"):
        run.in_threads(2, loss_of, model, optimizer, Loader(data(), batch_size=8))
    with pytest.raises(ConfigError, match="does not have"):
        run.in_threads(2, loss_of, other, two, loader)
    with pytest.raises(ConfigError, match="must use the model that it is given"):
        run.in_threads(2, lambda _, batch: loss_of(model, batch), model, optimizer, loader)
    model.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="cannot be copied"):
        run.in_threads(2, loss_of, model, optimizer, loader)


@pytest.mark.parametrize(("strategy", "why"), [(AllReduce, "pass by pass"), (Sync, "closes a round")])
def test_strategies_that_wait_for_each_pass_refuse_threads(strategy: type[AllReduce] | type[Sync], why: str) -> None:
    def body(group: Group) -> None:
        mine, model = strategy(), nn.Linear(5, 3)
        mine.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), World(group, wires=group._wires, limit_s=20.0))
        with pytest.raises(ConfigError, match=why):
            mine.reading()
        group.barrier()
        mine.close()

    together(2, body)


def served(group: Group, strategy: Strategy, threads: int, step: Callable[[Any], None], *, slow_s: float = 0.0) -> None:
    """A pool of threads on a member of `together`; `step` is called with the optimizer's own."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    world = World(group, wires=group._wires, limit_s=20.0)
    strategy.attach(model, optimizer, world)
    meter = Meter(Events(0), Status(None), size=group.size, readings=lambda: (0.0, 0.0, 0, 0.0))

    def slow(model: nn.Module, batch: Any) -> torch.Tensor:
        time.sleep(slow_s)
        return loss_of(model, batch)

    pool = Pool(
        threads,
        slow,
        model,
        Loader(data(160), batch_size=4, rank=group.rank, size=group.size),
        lambda: step(lambda: strategy.finish(optimizer)),
        strategy=strategy,
        world=world,
        meter=meter,
        device=torch.device("cpu"),
    )
    pool.run()
    strategy.together()
    strategy.close()


def test_threads_never_lead_by_more_than_the_bound() -> None:
    leads: list[int] = []

    def body(group: Group) -> None:
        strategy = Bounded(2)

        def step(push: Callable[[], bool]) -> None:
            push()
            assert strategy._service is not None
            for table in strategy._service.tables.values():
                clocks, resting = dict(table.shard.clocks.of), set(table.shard.clocks.resting)
                others = [clock for rank, clock in clocks.items() if rank != group.rank and rank not in resting]
                leads.extend(clocks[group.rank] - clock for clock in others)

        served(group, strategy, 4, step, slow_s=0.02 if group.rank else 0.0)

    together(2, body)
    assert max(leads) == 2  # the fast one runs into it
    assert len(leads) > 20


def test_a_push_names_what_its_thread_had_read() -> None:
    """While one thread computes, two others push about as often as it does: so old are its gradients."""
    ages: list[int] = []

    def body(group: Group) -> None:
        strategy = Async()

        def step(push: Callable[[], bool]) -> None:
            assert strategy._world is not None
            assert strategy._world.passing is not None
            [(_, read)] = strategy._world.passing.read.items()
            assert strategy._service is not None
            shard = strategy._service.tables[0].shard
            if shard.chunks:
                ages.append(shard.version - read[group.rank])
            push()

        served(group, strategy, 3, step, slow_s=0.005)

    together(2, body)
    assert min(ages) >= 0
    assert 1.0 < sum(ages) / len(ages) < 12.0


def test_turns_are_given_in_the_order_of_asking() -> None:
    turns, order = Turns(lambda: None), list[int]()

    def take(number: int) -> None:
        with turns.turn():
            order.append(number)

    threads = [threading.Thread(target=take, args=(number,)) for number in range(12)]
    with turns.turn():
        for number, thread in enumerate(threads):
            thread.start()
            while turns._given < number + 2:
                time.sleep(0.001)
    for thread in threads:
        thread.join(20)
    assert order == list(range(12))


def test_scalars_of_many_threads_are_all_counted() -> None:
    scalars, one = Scalars(), torch.ones(())

    def add() -> None:
        for _ in range(2000):
            scalars.add({"x": one})

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    taken = [scalars.take().get("x", (0.0, 0)) for _ in range(50)]
    for thread in threads:
        thread.join(20)
    taken.append(scalars.take().get("x", (0.0, 0)))
    assert sum(count for _, count in taken) == sum(total for total, _ in taken) == 8000


@pytest.mark.parametrize("threads", [0, 2.5, True, "2", 2000])
def test_threads_are_a_whole_number(run: Any, threads: Any) -> None:
    model = deep()
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with pytest.raises(ConfigError, match=r"in_threads\(threads=.*must be whole, and from 1 to"):
        run.in_threads(threads, loss_of, model, optimizer, run.loader(data(), batch_size=8))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda model, batch: None, "a NoneType"),
        (lambda model, batch: model(batch[0]), r"a Tensor of shape \(8, "),
        (lambda model, batch: 0.5, "a float"),
    ],
)
def test_a_loss_that_is_none_names_loss_of(run: Any, wrong: Any, said: str) -> None:
    model = deep()
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with pytest.raises(ConfigError, match=rf"loss_of\(model, batch\) returned {said}"):
        run.in_threads(1, wrong, model, optimizer, run.loader(data(), batch_size=8))
