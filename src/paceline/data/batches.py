"""One iteration over a loader, and where its batches are fetched.

Fetching begins in the caller's thread and moves to a background thread as soon as a batch takes longer than
handing it over would: a thread that shares the interpreter costs a small model more than it saves. A dataset
that draws random numbers stays in the caller's thread, where its draws can be kept apart from those of
training. With worker processes, they fetch from the start; where batches are dealt, those that others were lent and
come back at the end of an epoch are fetched here. Whatever the way, the batches are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter
from typing import TYPE_CHECKING, Any

from paceline.data.device import Ahead, Here
from paceline.data.mapped import MapFeed, MapReader
from paceline.data.prefetch import Background, Workers, map_workers, stream_worker
from paceline.data.source import Feed
from paceline.data.uploads import UploadFeed

if TYPE_CHECKING:
    from paceline.data.loader import Loader

# A thread costs 0.1 to 0.2 ms per batch: batches must take longer than that, and not by accident.
SLOW_S, SLOW_TIMES = 1e-3, 3  # in a row
VERY_SLOW_S = 10e-3  # once


class Batches:
    """The batches of one epoch from one point on. An iterator; `close` ends it early."""

    def __init__(self, loader: Loader, feed: Feed) -> None:
        self._loader = loader
        device = loader.device
        self._here = Here(device) if device is not None and device.type != "cpu" else None
        self._ahead = Ahead(device) if self._here and device is not None and device.type == "cuda" else None
        self._line: Iterator[Any] | None = None
        self.over = False
        self.drawn = 0  # handed out so far
        self.turn_to(feed)

    def turn_to(self, feed: Feed) -> None:
        """Go on with another feed; what was fetched ahead of the old one is dropped."""
        self._drop_line()
        self.feed, self._reader = feed, feed.reader
        if self._here and hasattr(feed, "place"):
            feed.place = self._here.put
        self._in_background = False
        self._slow = 0
        self._may_come_back = isinstance(feed, MapFeed) and feed.dealt and self._loader.workers > 0

    @property
    def active(self) -> bool:
        """Whether a loop has drawn from it and may draw more."""
        return bool(self.drawn) and not self.over

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Any:
        if self.over:
            raise StopIteration
        loader = self._loader
        try:
            loader.asked(self.feed)
            start = perf_counter()
            item = self._next_item()
            took = perf_counter() - start
            loader.wait_s += took
            if not self._in_background and item is not None:
                self._consider(took)
            batch, real = self.feed.take(item)
        except StopIteration:
            self.close()
            loader.ended(self.feed)
            raise
        except BaseException:
            self.close()
            raise
        self.drawn += 1
        loader.handed_out(self.feed, real)
        return batch

    def leases(self) -> dict[str, tuple[int, ...]]:
        """The batches that a push of now has the gradients of, by course; empty where batches are not dealt."""
        return self.feed.leases() if isinstance(self.feed, MapFeed | UploadFeed) else {}

    def hold(self) -> Callable[[], None]:
        """For a loop of several threads: the batch handed out last is done when the returned function is called."""
        return self.feed.hold() if isinstance(self.feed, MapFeed) else lambda: None

    def stop(self) -> None:
        """The loop has failed in one thread: another one that waits for a batch need not wait any longer."""
        if isinstance(self.feed, MapFeed):
            self.feed.stop()

    def close(self) -> None:
        """Stop fetching; idempotent."""
        self.over = True
        self._drop_line()

    def _drop_line(self) -> None:
        line, self._line = self._line, None
        if isinstance(line, Background | Workers):
            line.close()

    def _next_item(self) -> Any:
        """The next item with its batch on the device; None at the end."""
        if self._line is None:
            self._line = self._first_line()
        item = next(self._line, None)
        if item is None and self._may_come_back:  # worker processes have none left: now it can be waited for more
            self._may_come_back = self._in_background = False
            self._drop_line()
            self._line = iter(self._reader)
            item = next(self._line, None)
        if item is None or self._here is None:
            return item
        if self._ahead and self._in_background:
            (moved, arrived), info = item
            return self._ahead.receive(moved, arrived), info
        batch, info = item
        return (None if batch is None else self._here.put(batch)), info

    def _first_line(self) -> Iterator[Any]:
        loader = self._loader
        if not loader.workers:
            return iter(self._reader)
        self._in_background = True
        ahead = max(1, loader.prefetch)
        if isinstance(self._reader, MapReader):
            line: Iterator[Any] = map_workers(self._reader, loader.workers, ahead)
        else:
            if loader.workers > 1:
                loader.note("a stream is read by one worker process, since several would read the same samples")
            line = stream_worker(self._reader, ahead)
        return Background(self._sent(line), 1) if self._ahead else line

    def _consider(self, took: float) -> None:
        """After a batch that was fetched here: does the next one come from the background?"""
        if self._reader.drew:
            self._loader.note(
                "the dataset draws random numbers, so its batches are fetched in the training thread, each "
                "under its own seed; with workers=1 or more they are fetched ahead"
            )
            return
        self._slow = self._slow + 1 if took > SLOW_S else 0
        if self._loader.prefetch and (self._slow == SLOW_TIMES or took > VERY_SLOW_S):
            assert self._line is not None
            self._line = Background(self._sent(self._line), self._loader.prefetch)
            self._in_background = True

    def _sent(self, line: Iterator[Any]) -> Iterator[Any]:
        """With CUDA, each batch on its way to the device."""
        return _sent(line, self._ahead) if self._ahead else line


def _sent(line: Iterator[Any], ahead: Ahead) -> Iterator[Any]:
    for batch, info in line:
        yield ahead.send(batch), info
