"""A dataset in files, of which each member opens only its own.

How many samples a file has shows only when it is read, so the members cannot know from the start how many
batches there will be. Before each batch they tell each other how many samples they have (and how many came
from files that ended), in the caller's thread; a member that has run out repeats its last batch with weight
zero until all are done. So every member knows how far each file has been read, and the state of any of them
serves to resume on another number of members.

`FileReader` makes the batches wherever it runs; `FileFeed` agrees and counts where they are handed out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.utils.data import IterableDataset

from paceline.core.errors import ConfigError
from paceline.data.fetch import tell
from paceline.data.partition import ByFile
from paceline.data.randomness import Private, Watch, mix, permutation
from paceline.data.stream import Cut

Agree = Callable[[int], list[int]]
_NOTHING = -1  # a member that has no sample and never had one


class Files(IterableDataset[Any]):
    """A list of files and a function that opens one and gives its samples.

    >>> list(Files(["ab", "c"], open=iter))
    ['a', 'b', 'c']
    """

    def __init__(self, paths: Sequence[Any], open: Callable[[Any], Iterable[Any]]) -> None:
        if not len(paths):
            raise ConfigError("Files(paths=[]): the list of files is empty")
        self.paths, self.open = list(paths), open

    def __iter__(self) -> Iterator[Any]:
        for path in self.paths:
            yield from self.open(path)


class FileReader(Watch):
    """Batches out of `files`, in that order: `(batch, ends)`; `ends` has, for each file that ended since the
    batch before, how many samples of this batch came from it. The last item may have no batch."""

    def __init__(self, dataset: Files, cut: Cut, files: list[int], skip: dict[int, int]) -> None:
        super().__init__()
        self.dataset, self.cut, self.files, self.skip = dataset, cut, files, skip

    def __iter__(self) -> Iterator[tuple[Any, tuple[int, list[int]]]]:
        cut, waiting, private = self.cut, list(self.files), Private(0)
        samples: Iterator[Any] | None = None
        offset = 0  # in the file that is open
        while True:
            found: list[Any] = []
            ends: list[int] = []
            start = (waiting[0] if waiting else -1, offset)
            while len(found) < cut.batch_size and waiting:
                if samples is None:
                    private.reseed(mix(cut.seed, cut.epoch, "file", waiting[0]))
                    samples, offset = self._samples(waiting[0]), self.skip.get(waiting[0], 0)
                some = self.run(private, partial(_next_few, samples, cut.batch_size - len(found)))
                found += some
                offset += len(some)
                if len(found) < cut.batch_size:
                    ends.append(len(some))
                    waiting.pop(0)
                    samples, offset = None, 0
            if len(found) < (cut.batch_size if cut.drop_last else 1):
                if ends and not cut.drop_last:
                    yield None, (0, ends)
                return
            where = f"a batch from sample {start[1]} of {self.dataset.paths[start[0]]} on"
            finish = partial(cut.finish, found, where)
            # Only the user's own collate may draw; its seed must not depend on where the run was resumed.
            own = Private(mix(cut.seed, cut.epoch, "collate", *start))
            batch = finish() if cut.collate is None else self.run(own, finish)
            self.settle()
            yield batch, (len(found), ends)

    def _samples(self, file: int) -> Iterator[Any]:
        path = self.dataset.paths[file]
        count, skip = 0, self.skip.get(file, 0)
        opened: Any = None
        try:
            opened = self.dataset.open(path)
            for sample in opened:
                count += 1
                if count > skip:
                    yield sample
        except Exception as error:
            tell(error, f"while reading sample {count} of file {path}")
            raise
        finally:
            if hasattr(opened, "close"):
                opened.close()


def _next_few(samples: Iterator[Any], count: int) -> list[Any]:
    return list(islice(samples, count))


class FileFeed:
    """One epoch over files, from what was consumed of each file on."""

    def __init__(self, dataset: Files, cut: Cut, state: dict[str, Any], *, shuffle: bool, agree: Agree | None) -> None:
        count = len(dataset.paths)
        self.dataset, self.cut = dataset, cut
        self.agree = agree  # None: members need not keep step
        self.place: Callable[[Any], Any] = lambda batch: batch  # onto the device
        self._ready = ByFile().owned(count, cut.rank, cut.size)  # this member's when none has been read
        self.part: dict[int, int] = {int(file): n for file, n in state.get("files", {}).items()}
        self.done: set[int] = set(state.get("done", []))
        self.consumed: int = state.get("consumed", 0)
        visit = permutation(count, cut.seed, cut.epoch) if shuffle else torch.arange(count)
        place = {file: at for at, file in enumerate(visit.tolist())}
        left = [file for file in range(count) if file not in self.done]
        self.queues = [sorted(left[rank :: cut.size], key=place.__getitem__) for rank in range(cut.size)]
        self.reader = FileReader(dataset, cut, list(self.queues[cut.rank]), dict(self.part))
        self._last: Any = None  # what a member that has run out repeats

    def take(self, item: tuple[Any, tuple[int, list[int]]] | None) -> tuple[Any, int]:
        """The batch to hand out and its real samples; `None` says that this member's files have ended."""
        batch, (real, ends) = item if item is not None else (None, (0, []))
        if self.agree is None:
            self._count(self.cut.rank, real, ends)
            if not real:
                raise StopIteration
            return batch, real
        if real:
            self._last = batch
        elif self._last is None:
            self._last = self._filler()
        codes = self.agree(real << 32 | len(ends) if self._last is not None else _NOTHING)
        reals = [max(0, code) >> 32 for code in codes]
        closed = [max(0, code) & 0xFFFFFFFF for code in codes]
        self._check(codes, reals)
        rounds = [self.agree(ends[turn] if turn < len(ends) else 0) for turn in range(max(closed))]
        for rank in range(self.cut.size):
            self._count(rank, reals[rank], [counts[rank] for counts in rounds[: closed[rank]]])
        if not any(reals):
            raise StopIteration
        return self._last, real

    def _check(self, codes: list[int], reals: list[int]) -> None:
        """Every member sees the same numbers, so all of them raise, or none."""
        without = [rank for rank, code in enumerate(codes) if code == _NOTHING]
        if without and (any(reals) or not self.consumed):
            raise ConfigError(
                f"ByFile: the files of member(s) {', '.join(map(str, without))} have no samples: spread the "
                "samples over all files, start fewer members, or leave partition out"
            )
        if not any(reals) and not self.consumed:
            raise ConfigError("ByFile: drop_last=True leaves no batch: use a smaller batch_size or drop_last=False")

    def _count(self, rank: int, real: int, ends: list[int]) -> None:
        self.consumed += real
        for samples in ends:
            file = self.queues[rank].pop(0)
            self.done.add(file)
            self.part.pop(file, None)
            real -= samples
        if real:
            file = self.queues[rank][0]
            self.part[file] = self.part.get(file, 0) + real

    def _filler(self) -> Any:
        """A batch to repeat for a member that resumed when nothing was left for it: of files that it owns."""
        with Private(0):
            for file in self._ready:
                for sample in self.dataset.open(self.dataset.paths[file]):
                    return self.place(self.cut.finish([sample], f"a sample of {self.dataset.paths[file]}"))
        return None

    def mark(self) -> dict[str, Any]:
        part = {str(file): count for file, count in sorted(self.part.items())}
        return {"consumed": self.consumed, "files": part, "done": sorted(self.done)}

    def state(self, at: dict[str, Any]) -> dict[str, Any]:
        return at
