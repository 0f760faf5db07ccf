"""Fetching ahead: a background thread with a bounded buffer, or worker processes.

Both are iterators with `close`. The thread and its buffer share nothing but two queues with the iterator, so
an iterator that is dropped anywhere (a `break`, an exception, a collected loader) stops its thread. Tokens
travel against the batches: the thread may fetch as many batches as it holds tokens, which bounds the buffer.

Worker processes are those of torch's DataLoader; a worker dies with the member that started it, so that a
killed member leaves nobody behind who still holds its sockets.
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from paceline.data.fetch import Fetch
from paceline.data.mapped import MapReader
from paceline.data.randomness import Watch, seed_all

T = TypeVar("T")
JOIN_LIMIT_S = 2.0  # how long closing waits for a fetch that is under way
CHECK_S = 1.0  # how often a waiting consumer looks whether the thread still lives
_END = object()


class _Failure:
    def __init__(self, error: BaseException) -> None:
        self.error = error


class Background(Generic[T]):
    """Runs an iterator in a thread, at most `ahead` items ahead of the consumer.

    >>> list(Background(iter("abc"), ahead=2))
    ['a', 'b', 'c']
    """

    def __init__(self, items: Iterator[T], ahead: int) -> None:
        self._ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._room: queue.SimpleQueue[bool] = queue.SimpleQueue()
        for _ in range(ahead):
            self._room.put(True)
        stop, settled = threading.Event(), threading.Event()
        self._thread = threading.Thread(
            target=_work,
            args=(items, self._room, self._ready, stop, settled),
            name="paceline-prefetch",
            daemon=True,
        )
        self._thread.start()
        settled.wait(CHECK_S)
        # The thread has set its own number of threads to one, which torch also takes as the number for
        # threads that come later: set it back to what this thread has.
        torch.set_num_threads(torch.get_num_threads())
        self._finish = weakref.finalize(self, _stop, self._thread, self._room, stop)

    def __iter__(self) -> Background[T]:
        return self

    def __next__(self) -> T:
        while True:
            try:
                item = self._ready.get(timeout=CHECK_S)
                break
            except queue.Empty:
                if not self._thread.is_alive() and self._ready.empty():
                    raise RuntimeError("the background thread of the loader is gone") from None
        if item is _END:
            self._ready.put(_END)  # for whoever asks again
            self.close()
            raise StopIteration
        if isinstance(item, _Failure):
            self._ready.put(_END)
            self.close()
            raise item.error
        self._room.put(True)
        return item  # type: ignore[no-any-return]

    def close(self) -> None:
        """Stop the thread; waits for a fetch that is under way, but not for long."""
        self._finish()


def _work(
    items: Iterator[Any],
    room: queue.SimpleQueue[bool],
    ready: queue.SimpleQueue[Any],
    stop: threading.Event,
    settled: threading.Event,
) -> None:
    # More threads here would fight with the training thread for its cores.
    torch.set_num_threads(1)
    settled.set()
    try:
        while room.get() and not stop.is_set():  # `_stop` puts a token, so this wait ends
            ready.put(next(items))
    except StopIteration:
        ready.put(_END)
    except BaseException as error:
        ready.put(_Failure(error))


def _stop(thread: threading.Thread, room: queue.SimpleQueue[bool], stop: threading.Event) -> None:
    stop.set()
    room.put(False)
    if thread is not threading.current_thread():  # the collector may run in any thread
        thread.join(JOIN_LIMIT_S)


class Workers(Generic[T]):
    """An iterator over what worker processes make, in order. Closing it ends the processes."""

    def __init__(self, source: Dataset[Any], tasks: Iterable[Any] | None, workers: int, ahead: int) -> None:
        loader: DataLoader[Any] = DataLoader(
            source,
            batch_size=None,
            sampler=tasks,
            num_workers=workers,
            prefetch_factor=max(1, ahead // workers),
            collate_fn=_as_it_is,
            worker_init_fn=_die_with_parent,
            generator=torch.Generator(),  # else torch draws from the global one, which belongs to training
        )
        self._items: Iterator[T] | None = iter(loader)

    def __iter__(self) -> Workers[T]:
        return self

    def __next__(self) -> T:
        if self._items is None:
            raise StopIteration
        try:
            return next(self._items)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        items, self._items = self._items, None
        # torch does this when its iterator is collected, but one that is held by an error's traceback is
        # collected late and in pieces, and then waits 5 s for each worker.
        end = getattr(items, "_shutdown_workers", None)
        if end is not None:
            end()


def map_workers(reader: MapReader, workers: int, ahead: int) -> Workers[Any]:
    """Worker processes that fetch the batches of a course, each under its own seed."""
    return Workers(_Fetch(reader.fetch), _Tasks(reader.tasks()), workers, ahead)


def stream_worker(reader: Watch, ahead: int) -> Workers[Any]:
    """One worker process that reads a stream."""
    return Workers(_Read(reader), None, 1, ahead)


class _Tasks:
    def __init__(self, tasks: Iterator[Any]) -> None:
        self.tasks = tasks

    def __iter__(self) -> Iterator[Any]:
        return self.tasks


class _Fetch(Dataset[Any]):
    """What map workers run: a task is a list of indices and a seed."""

    def __init__(self, fetch: Fetch) -> None:
        self.fetch = fetch

    def __getitem__(self, task: tuple[list[int], int]) -> Any:
        indices, seed = task
        seed_all(seed)
        return self.fetch(torch.tensor(indices)), None


class _Read(IterableDataset[Any]):
    """What a stream worker runs."""

    def __init__(self, reader: Watch) -> None:
        self.reader = reader

    def __iter__(self) -> Iterator[Any]:
        self.reader.drew = True  # nobody watches here: always read under the stream's own state
        return iter(self.reader)  # type: ignore[call-overload, no-any-return]


def _as_it_is(item: T) -> T:
    return item


def _die_with_parent(worker: int) -> None:
    parent, sys.excepthook = os.getppid(), _unless_parent_is_gone
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG; torch itself looks every 5 s only
    except (OSError, AttributeError):
        return
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _unless_parent_is_gone(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error of a worker's own threads; not that of the one that hands out memory, to a parent that has ended
    or wants no more."""
    if not isinstance(error, EOFError | ConnectionError):
        sys.__excepthook__(kind, error, trace)
