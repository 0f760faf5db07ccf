"""Threads of one member that train the same parameters, each with a batch of its own: `run.in_threads`.

    batch   drawn by one thread at a time; it is done when the step that has its gradients is
    pass    every thread has a replica of the model, whose parameters lie in the memory of the model's own, while
            gradients and buffers are the thread's; other threads' steps change the parameters meanwhile (Hogwild)
    step    one thread at a time: its gradients become those of the model's own parameters, and the optimizer steps.
            With servers that is a push, which names the version that the thread had read when it began

Threads help where a pass leaves cores or the wire idle. They share one interpreter: small models gain nothing.

Reference: Recht et al., Hogwild: a lock-free approach to parallelizing stochastic gradient descent, 2011.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from paceline.core.errors import ConfigError, TimedOut
from paceline.data import Loader
from paceline.strategies.strategy import Pass, Strategy, World
from paceline.train.meter import Meter

LossOf = Callable[[torch.nn.Module, Any], torch.Tensor]
_LOOK_S = 0.5
_LEAVE_S = 10.0  # after Ctrl-C
_MOST = 1024  # threads; servers know no more of a worker


class Batch(NamedTuple):
    """What a thread works on."""

    data: Any
    weight: float
    leases: dict[str, tuple[int, ...]]  # see World.leases
    done: Callable[[], None]


class Pool:
    """One pass over a loader by several threads."""

    def __init__(
        self,
        threads: int,
        loss_of: LossOf,
        model: torch.nn.Module,
        loader: Loader,
        step: Callable[[], object],
        *,
        strategy: Strategy,
        world: World,
        meter: Meter,
        device: torch.device,
    ) -> None:
        strategy.reading()  # or passes cannot overlap
        self._loss_of, self._model, self._loader, self._step = loss_of, model, loader, step
        self._strategy, self._world, self._meter, self._device = strategy, world, meter, device
        self._replicas = [_replica(model, own_buffers=number == 0) for number in range(threads)]
        self._twins = [list(zip(model.parameters(), replica.parameters())) for replica in self._replicas]
        self._batches = iter(loader)
        self._drawing, self._stepping = Turns(self._go_on), Turns(self._go_on)
        self._under = 0  # batches that are drawn and not stepped
        self._at_work = 0  # threads
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._failed_at = 0.0
        self._share = max(1, torch.get_num_threads() // threads)

    def run(self) -> None:
        """Train until the loader has no more; raises what was raised in a thread."""
        num_threads = torch.get_num_threads()
        threads = [
            threading.Thread(target=self._work, args=(number,), name=f"paceline-pool-{number}", daemon=True)
            for number in range(len(self._replicas))
        ]
        self._meter.threads = len(threads)
        try:
            for thread in threads:
                with self._changed:
                    self._at_work += 1
                thread.start()
            self._wait(self._world.limit_s)
        except KeyboardInterrupt as error:
            self._fail(error)
            self._wait(_LEAVE_S)
        finally:
            self._meter.threads = 1
            torch.set_num_threads(num_threads)  # what a thread sets is also the number for threads that come later
            self._batches.close()
        self._keep_buffers()
        if self._error is not None:
            raise self._error

    def quiet(self) -> None:
        """Called by the thread that draws: wait until what the others have drawn is stepped, for a checkpoint."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._under or self._error is not None, self._world.limit_s):
                raise TimedOut(
                    f"{self._under} threads did not end their steps within {self._world.limit_s:g} s, and a checkpoint "
                    "waits for them; raise --wait-limit-s where steps take longer"
                )
        self._go_on()
        self._keep_buffers()

    def _wait(self, limit_s: float) -> None:
        """Until all threads have ended, or one has failed and the others do not end."""
        with self._changed:  # not Thread.join: where Ctrl-C ends that, Python 3.11 takes the thread for dead
            while not self._changed.wait_for(lambda: not self._at_work, _LOOK_S):
                if self._error is not None and time.monotonic() - self._failed_at > limit_s:
                    self._error.add_note(f"{self._at_work} threads were still at work {limit_s:g} s later: left behind")
                    return

    # ---- in the threads

    def _work(self, number: int) -> None:
        try:
            torch.set_num_threads(self._share)  # of this thread alone; its backward passes run in it too
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            model = self._replicas[number]
            while (batch := self._draw()) is not None:
                read = self._strategy.reading()
                _checked(self._loss_of(model, batch.data)).backward()  # type: ignore[no-untyped-call]
                self._apply(Pass(number, batch.weight, read, batch.leases))
                batch.done()
                with self._changed:
                    self._under -= 1
                    self._changed.notify_all()
        except _Stopped:
            pass
        except BaseException as error:
            if len(self._replicas) > 1:
                error.add_note(f"in thread {number} of run.in_threads")
            self._fail(error)
        finally:
            with self._changed:
                self._at_work -= 1
                self._changed.notify_all()

    def _draw(self) -> Batch | None:
        began = time.perf_counter()
        with self._drawing.turn():
            self._loader.wait_s += time.perf_counter() - began
            for data in self._batches:
                weight, _ = self._world.tally.take()
                with self._changed:
                    self._under += 1
                return Batch(data, weight, self._batches.leases(), self._batches.hold())
        return None

    def _apply(self, passing: Pass) -> None:
        """A step with the gradients of a thread."""
        began = time.perf_counter()
        with self._stepping.turn():
            self._world.waited_s += time.perf_counter() - began
            twins = self._twins[passing.thread]
            for p, twin in twins:
                p.grad, twin.grad = twin.grad, None
            if all(p.grad is None for p, _ in twins):
                raise ConfigError(
                    "run.in_threads: the loss gave the model no gradients: the function must use the model that it is "
                    "given, def loss_of(model, batch), and not the one outside of it"
                )
            self._world.passing = passing
            try:
                self._step()
            finally:
                self._world.passing = None
            for p, _ in twins:
                p.grad = None

    def _go_on(self) -> None:
        if self._error is not None:
            raise _Stopped

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            if self._error is None:
                self._error, self._failed_at = error, time.monotonic()
            self._changed.notify_all()
        self._batches.stop()

    def _keep_buffers(self) -> None:
        """Buffers that thread 0's replica has put others in the place of."""
        held = dict(self._replicas[0].named_buffers())
        for name, own in self._model.named_buffers():
            if (buffer := held.get(name)) is not None and buffer is not own:
                own.copy_(buffer.detach())


class Turns:
    """A lock that is given in the order of asking: with a plain one, a thread may starve and its gradients grow old.

    Whoever has its turn bounds its own waits. `go_on` raises where nobody is to have another turn.
    """

    def __init__(self, go_on: Callable[[], None]) -> None:
        self._go_on = go_on
        self._changed = threading.Condition()
        self._given = self._over = 0  # tickets; turns that are over

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        with self._changed:
            ticket = self._given
            self._given += 1
            while self._over != ticket:
                self._changed.wait(_LOOK_S)
                self._go_on()
        try:
            self._go_on()
            yield
        finally:
            with self._changed:
                self._over += 1
                self._changed.notify_all()


class _Stopped(BaseException):
    """Another thread has failed."""


def _replica(model: torch.nn.Module, *, own_buffers: bool) -> torch.nn.Module:
    """The model with the same memory for parameters; `own_buffers`: and the same buffers."""
    # Through `data`: to autograd these are other tensors, which nobody else changes while it holds them.
    shared = {id(p): torch.nn.Parameter(p.data, p.requires_grad) for p in model.parameters()}
    buffers = {id(b): b if own_buffers else b.detach().clone() for b in model.buffers()}
    try:
        return copy.deepcopy(model, {**shared, **buffers})
    except Exception as error:
        raise ConfigError(
            f"run.in_threads copies the model for each thread, and this {type(model).__name__} cannot "
            f"be copied: {error}"
        ) from error


def _checked(loss: Any) -> torch.Tensor:
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss
    shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else ""
    raise ConfigError(
        f"run.in_threads: loss_of(model, batch) returned a {type(loss).__name__}{shape}: return the loss, a tensor "
        "with one number"
    )


def check(threads: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, known: bool) -> None:
    """Refuse what cannot work, before a thread is started. `known`: model, optimizer and loader are the run's."""
    if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= _MOST:
        raise ConfigError(
            f"run.in_threads(threads={threads!r}, ...): the number of threads must be whole, and from 1 to {_MOST}"
        )
    if not known:
        raise ConfigError(
            "run.in_threads(threads, loss_of, model, optimizer, loader): the model and the optimizer must be those "
            "given to run.optimizer, and the loader one of run.loader"
        )
    own = {id(p) for p in model.parameters()}
    if any(id(p) not in own for group in optimizer.param_groups for p in group["params"]):
        raise ConfigError(
            "run.in_threads: the optimizer holds parameters that the model does not have: put all models into one "
            "nn.Module, such as an nn.ModuleDict"
        )
