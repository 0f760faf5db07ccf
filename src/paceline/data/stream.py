"""Iterable datasets: every member reads the whole stream and keeps its stride of each global batch.

All members see the end at the same point, so they need not talk. The stream must be the same on all of them:
it is read under a random state of its own, seeded from (seed, epoch), so a stream that shuffles with the
global generators is. To resume, what was consumed is read again and passed over.

`StreamReader` makes the batches, wherever it runs (the caller's thread, the background, a worker process);
`StreamFeed` counts them where they are handed out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from torch.utils.data import default_collate

from paceline.data.fetch import Collate, collated, tell
from paceline.data.randomness import Private, Watch, mix


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How batches are made out of a stream; the same for every epoch."""

    batch_size: int
    rank: int
    size: int
    seed: int
    epoch: int
    collate: Collate | None = None
    drop_last: bool = False
    after: Callable[[Any], Any] | None = None  # what `Columns` does to the batch; then all samples are kept

    def finish(self, samples: list[Any], where: str) -> Any:
        batch = collated(samples, self.collate or default_collate, lambda: where)
        return self.after(batch) if self.after else batch


class StreamReader(Watch):
    """Batches of this member: `(batch, (real, total))`, with how many samples all members had together."""

    def __init__(self, dataset: Any, cut: Cut, skip: int) -> None:
        super().__init__()
        self.dataset, self.cut, self.skip = dataset, cut, skip

    def __iter__(self) -> Iterator[tuple[Any, tuple[int, int]]]:
        cut = self.cut
        private = Private(mix(cut.seed, cut.epoch, "stream"))
        span = cut.batch_size if cut.after else cut.batch_size * cut.size
        samples: Iterator[Any] | None = None
        position = self.skip

        def read() -> list[Any]:
            nonlocal samples
            if samples is None:
                samples = iter(self.dataset)
                for _ in islice(samples, self.skip):
                    pass
            found: list[Any] = []
            try:
                found.extend(islice(samples, span))
            except Exception as error:
                where = f"sample {position + len(found)} of {type(self.dataset).__name__}"
                tell(error, f"while reading {where}")
                raise
            return found

        while True:
            found = self.run(private, read)
            if len(found) < (span if cut.drop_last else 1):
                return
            mine = found if cut.after else found[cut.rank :: cut.size]
            kept = mine or found[:1]  # all have seen the sample, so any member can repeat it
            where = f"samples {position} to {position + len(found) - 1} of the stream"
            finish = partial(cut.finish, kept, where)
            # Only the user's own collate may draw; its seed must not depend on where the run was resumed.
            own = Private(mix(cut.seed, cut.epoch, "collate", position, cut.rank))
            batch = finish() if cut.collate is None else self.run(own, finish)
            self.settle()
            yield batch, (len(mine), len(found))
            position += len(found)


class StreamFeed:
    """One epoch of a stream, from a number of consumed samples on."""

    def __init__(self, dataset: Any, cut: Cut, consumed: int, pad: bool) -> None:
        self.reader = StreamReader(dataset, cut, consumed)
        self.consumed, self.pad = consumed, pad

    def take(self, item: tuple[Any, tuple[int, int]] | None) -> tuple[Any, int]:
        """The batch to hand out and how many real samples it has; `None` says that the reader has ended."""
        if item is None:
            raise StopIteration
        batch, (real, total) = item
        if not real and not self.pad:
            raise StopIteration  # only the last batch leaves a member without samples
        self.consumed += total
        return batch, real

    def mark(self) -> int:
        return self.consumed

    def state(self, at: int) -> dict[str, Any]:
        return {"consumed": at}
