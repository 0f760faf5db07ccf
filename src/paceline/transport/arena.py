"""Memory that members reduce in place while they compute: where gradient buckets live.

An arena is opened by all members of a group with the same size. `post` hands over a slice of its memory to be summed
over the members, in the same order everywhere; `progress` does what can be done without waiting; `wait` returns when
everything posted holds the sum and nobody reads this member's memory any more.

    SharedArena   one host: the slice is reduced where it lies, in shared memory, by the training thread itself
    Background    the same by a thread beside it, where a core is free for that; else it would only steal one
    CarriedArena  private memory: a thread carries each slice to the others, around a ring of hosts or through a codec,
                  while the training thread computes
    StagedArena   memory of a device, summed through another arena in host memory
    DeviceArena   memory of a device, reduced there by a codec

`own` tells which part of a slice this member will sum itself. What belongs there need not be copied in before posting:
it may be handed over as `kept`, and is read where it lies when the sum is made. Of two members each saves half a copy.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

import torch

from paceline.transport.link import Link

NOTHING = slice(0, 0)

Kept = tuple[slice, torch.Tensor, float]  # of a slice: what is to be there, and the factor it is still to be given


Reduce = Callable[[torch.Tensor], None]  # replaces a flat tensor by its sum over the members


class Collective(Protocol):
    """What a reduction of a strategy's own stands on: some members, in one order."""

    @property
    def size(self) -> int: ...
    @property
    def position(self) -> int: ...
    @property
    def sent_bytes(self) -> int:
        """Of this member's, so far."""

    @property
    def link(self) -> Link | None:
        """What was measured between the members; None where they share memory."""

    def measure(self) -> None:
        """Measure the link again, several times; the median counts."""

    def all_reduce(self, flat: torch.Tensor) -> None: ...
    def all_reduce_bytes(self, nbytes: int) -> int:
        """About how many bytes leave this member in an all-reduce of so many."""

    def all_gather(self, flat: torch.Tensor, out: torch.Tensor) -> None: ...
    def all_to_all(self, flat: torch.Tensor, out: torch.Tensor) -> None:
        """Row j of `flat` goes to member j; row j of `out` comes from it."""


class Scatters(Collective, Protocol):
    """One that can leave each member its part of a sum."""

    def reduce_scatter(self, flat: torch.Tensor, out: torch.Tensor) -> None:
        """`out` gets this member's row of the sum of everyone's `flat`, which is work space."""


Through = Callable[[Collective], Reduce]


class Arena(Protocol):
    """The contract of all arenas."""

    memory: torch.Tensor  # flat, uint8, zeros at first

    @property
    def sent_bytes(self) -> int: ...
    @property
    def waited_s(self) -> float: ...
    def own(self, flat: torch.Tensor) -> slice: ...
    def post(self, flat: torch.Tensor, kept: Sequence[Kept] = ()) -> None: ...
    def progress(self) -> None: ...
    def wait(self) -> None: ...
    def close(self) -> None: ...


class Courier:
    """A thread that runs blocking reductions in the order they are handed in."""

    def __init__(self, reduce: Reduce, name: str) -> None:
        self.waited_s = 0.0  # by those who hand them in
        self._reduce = reduce
        self._carried: list[Future[None]] = []  # handed in since the last wait
        self._queue: queue.SimpleQueue[tuple[torch.Tensor, Future[None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"paceline-{name}", daemon=True)
        self._thread.start()

    def post(self, flat: torch.Tensor) -> Future[None]:
        future: Future[None] = Future()
        self._carried.append(future)
        self._queue.put((flat, future))
        return future

    def wait(self) -> None:
        """Until all that was handed in is done; raises what the first one that failed has raised."""
        began = time.monotonic()
        try:
            for future in self._carried:
                future.result()  # bounded: what carries them limits its own waits
        finally:
            self._carried.clear()
            self.waited_s += time.monotonic() - began

    def close(self) -> None:
        self._queue.put(None)

    def _run(self) -> None:
        failure: BaseException | None = None
        while (job := self._queue.get()) is not None:
            flat, future = job
            try:
                if failure is None:
                    self._reduce(flat)
            except BaseException as error:  # handed to whoever waits; later jobs of a broken group fail alike
                failure = error
            if failure is None:
                future.set_result(None)
            else:
                future.set_exception(failure)


class CarriedArena:
    """An arena in private memory whose slices a thread reduces, one after another."""

    def __init__(self, reduce: Reduce, name: str, nbytes: int) -> None:
        self.memory = torch.zeros(nbytes, dtype=torch.uint8)
        self.sent_bytes = 0  # counted by what carries them
        self._courier = Courier(reduce, name)

    @property
    def waited_s(self) -> float:
        return self._courier.waited_s

    def own(self, flat: torch.Tensor) -> slice:
        return NOTHING

    def post(self, flat: torch.Tensor, kept: Sequence[Kept] = ()) -> None:
        assert not kept
        self._courier.post(flat)

    def progress(self) -> None:
        pass

    def wait(self) -> None:
        self._courier.wait()

    def close(self) -> None:
        self._courier.close()


class StagedArena:
    """An arena in a device's memory, summed through an arena in host memory."""

    def __init__(self, inner: Arena, device: torch.device) -> None:
        self._inner = inner
        self.memory = torch.zeros(inner.memory.numel(), dtype=torch.uint8, device=device)
        self._base = self.memory.data_ptr()
        self._staged: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def sent_bytes(self) -> int:
        return self._inner.sent_bytes

    @property
    def waited_s(self) -> float:
        return self._inner.waited_s

    def own(self, flat: torch.Tensor) -> slice:
        return NOTHING

    def post(self, flat: torch.Tensor, kept: Sequence[Kept] = ()) -> None:
        assert not kept
        offset = flat.data_ptr() - self._base
        host = self._inner.memory[offset : offset + flat.nbytes].view(flat.dtype)
        host.copy_(flat)
        self._staged.append((flat, host))
        self._inner.post(host)

    def progress(self) -> None:
        self._inner.progress()

    def wait(self) -> None:
        self._inner.wait()
        for flat, host in self._staged:
            flat.copy_(host)
        self._staged.clear()

    def close(self) -> None:
        self._inner.close()
