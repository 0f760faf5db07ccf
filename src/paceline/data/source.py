"""What kind of dataset it is, and how one epoch over it begins.

`source_of` checks the user's input and gives one of four sources, each with `begin` (a feed: one epoch from
a given state on), `batches` (how many there are in an epoch, where that is known) and `length` (to tell a
state that belongs to other data).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from torch.utils.data import IterableDataset

from paceline.core.errors import ConfigError
from paceline.data.fetch import Collate, TensorFetch, fetcher
from paceline.data.files import Agree, FileFeed, Files
from paceline.data.kinds import Bound, Kinds
from paceline.data.mapped import MapFeed
from paceline.data.partition import ByFile, Columns, Partition, Shuffled, Strided
from paceline.data.sampler import Deal, History, Sampler
from paceline.data.stream import Cut, StreamFeed
from paceline.data.uploads import UploadFeed, Uploads, UploadSource

Feed = MapFeed | StreamFeed | FileFeed | UploadFeed


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What the user asked for, apart from the dataset."""

    batch_size: int
    rank: int
    size: int
    partition: Partition | ByFile | None = None
    shuffle: bool = True
    drop_last: bool = False
    pad: bool = True  # a member without samples takes part with a filler
    collate: Collate | None = None
    deal: Deal | None = None  # batches are dealt out as members ask for them, where no partition is given
    bound: Bound | None = None  # each sample to members with a label
    labels: tuple[str, ...] = ()  # that some member has
    widths: tuple[int, ...] = ()  # unequal shares of a global batch, where the source can have them

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError(f"batch_size={self.batch_size}: a batch needs at least one sample")
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"rank={self.rank} of size={self.size}: rank must be from 0 to {self.size - 1}")
        if self.bound is not None and self.partition is not None:
            raise ConfigError(f"bound= with partition={self.partition}: leave out one of the two")
        if isinstance(self.partition, Shuffled) and not self.shuffle:
            raise ConfigError("partition=Shuffled() with shuffle=False: leave out one of the two")

    def cut(self, seed: int, epoch: int) -> Cut:
        after = None
        if isinstance(self.partition, Columns):
            after = partial(self.partition.cut, rank=self.rank, size=self.size)
        return Cut(
            batch_size=self.batch_size,
            rank=self.rank,
            size=self.size,
            seed=seed,
            epoch=epoch,
            collate=self.collate,
            drop_last=self.drop_last,
            after=after,
        )


class MapSource:
    """A dataset with `__getitem__` and `__len__`."""

    def __init__(self, dataset: Any, terms: Terms, partition: Partition) -> None:
        self.length, self.terms = len(dataset), terms
        self.dealt = terms.deal is not None and terms.partition is None and terms.pad
        if not self.length:
            raise ConfigError(f"the dataset ({type(dataset).__name__}) is empty: check the path or the filter")
        self._kinds = self._bound(terms)
        even = partial(
            Sampler,
            length=self.length,
            partition=partition,
            shuffle=terms.shuffle,
            batch_size=terms.batch_size,
            drop_last=terms.drop_last,
        )
        self._even = even(rank=terms.rank, size=terms.size, widths=() if self.evenly else terms.widths)
        self.sampler = even(rank=0, size=1) if self.dealt else self._even
        self.fetch = fetcher(dataset, terms.collate)
        if isinstance(partition, Columns):
            self.fetch = self.fetch.cut(partial(partition.cut, rank=terms.rank, size=terms.size))

    @property
    def in_memory(self) -> bool:
        return isinstance(self.fetch, TensorFetch)

    @property
    def evenly(self) -> str:
        """Why members' shares of a global batch cannot follow their speed; "": they can."""
        partition = self.terms.partition
        if self.dealt:
            return "its batches are dealt out as members ask for them, so a fast one gets more already"
        if not self.terms.pad:
            return "it is for evaluation"
        if not isinstance(partition, Shuffled | None):
            return f"partition={type(partition).__name__} says which member gets which samples"
        return ""

    @cached_property
    def batches(self) -> int | None:
        course = self.sampler.begin(0, 0, [])
        if self.dealt:
            batches = (
                len(self._kinds.cut(course.queue, self.terms.batch_size, drop_last=self.terms.drop_last).edges) - 1
            )
            return -(-batches // self.terms.size)  # where all are equally fast
        return course.batches if self.terms.pad else course.own_batches

    def left(self, seed: int, epoch: int, state: dict[str, Any]) -> int | None:
        """Batches from this state on."""
        course = self.sampler.begin(seed, epoch, state.get("history", []))
        return (course.batches if self.terms.pad else course.own_batches) - course.done

    def consumed(self, seed: int, epoch: int, history: History) -> int:
        """Samples that a history leaves behind it."""
        course = self.sampler.begin(seed, epoch, history)
        return course.consumed(course.done)

    def begin(self, seed: int, epoch: int, state: dict[str, Any]) -> Feed:
        if self.dealt:
            assert self.terms.deal is not None
            if not self.terms.deal.deals:
                if self.terms.bound is not None:
                    raise _not_dealt("after a turn to sync")
                return MapFeed(self.fetch, self._even.begin(seed, epoch, []), self.terms.pad)
            return MapFeed(self.fetch, self.sampler.dealt(seed, epoch, self.terms.deal, self._kinds), self.terms.pad)
        return MapFeed(self.fetch, self.sampler.begin(seed, epoch, state.get("history", [])), self.terms.pad)

    def _bound(self, terms: Terms) -> Kinds:
        kinds = Kinds(terms.bound, self.length)
        if terms.bound is not None:
            kinds.check(terms.labels)
            if not self.dealt and terms.size > 1:
                raise _not_dealt("here" if terms.pad else "in a loader without pad")
        return kinds


def _not_dealt(where: str) -> ConfigError:
    return ConfigError(
        f"bound= needs batches that are lent to workers as they ask, and {where} all have a part in every step: "
        "use --strategy async or bounded(...) with server processes (--servers K)"
    )


class StreamSource:
    """An iterable dataset, read whole by every member."""

    in_memory = False
    evenly = "every member reads the whole stream and takes its own batches"

    def __init__(self, dataset: Any, terms: Terms) -> None:
        self.dataset, self.terms = dataset, terms
        self.length = len(dataset) if hasattr(dataset, "__len__") else None
        if isinstance(terms.partition, Columns):
            terms.partition.check(0, terms.size)

    @property
    def batches(self) -> int | None:
        return self.left(0, 0, {})

    def left(self, seed: int, epoch: int, state: dict[str, Any]) -> int | None:
        """Batches from this state on."""
        if self.length is None:
            return None
        whole = isinstance(self.terms.partition, Columns)
        span = self.terms.batch_size * (1 if whole else self.terms.size)
        full, rest = divmod(max(0, self.length - state.get("consumed", 0)), span)
        first_idle = 0 if self.terms.pad or whole else self.terms.rank  # in the last, shorter batch
        return int(full + (rest > first_idle and not self.terms.drop_last))

    def begin(self, seed: int, epoch: int, state: dict[str, Any]) -> Feed:
        cut = self.terms.cut(seed, epoch)
        return StreamFeed(self.dataset, cut, state.get("consumed", 0), self.terms.pad)


class FileSource:
    """A dataset in files, of which each member opens only its own."""

    in_memory = False
    evenly = "every member reads files of its own"
    batches = None  # unknown before all files have been read

    def __init__(self, dataset: Files, terms: Terms, agree: Agree | None) -> None:
        self.dataset, self.terms, self.agree = dataset, terms, agree if terms.pad else None
        self.length = len(dataset.paths)
        ByFile().owned(self.length, terms.rank, terms.size)
        if terms.pad and agree is None:
            if terms.size > 1:
                raise ConfigError("ByFile on several members needs agree=: how they tell each other their counts")
            self.agree = lambda number: [number]

    def left(self, seed: int, epoch: int, state: dict[str, Any]) -> int | None:
        return None

    def begin(self, seed: int, epoch: int, state: dict[str, Any]) -> Feed:
        cut = self.terms.cut(seed, epoch)
        return FileFeed(self.dataset, cut, state, shuffle=self.terms.shuffle, agree=self.agree)


Source = MapSource | StreamSource | FileSource | UploadSource


def source_of(dataset: Any, terms: Terms, agree: Agree | None) -> Source:
    """Find out what `dataset` is; a ConfigError says what is missing."""
    kind, partition = type(dataset).__name__, terms.partition
    if terms.bound is not None and not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise ConfigError(f"bound= needs a dataset with __getitem__ and __len__, not {kind}")
    if isinstance(dataset, Uploads):
        if partition is not None or not terms.pad or terms.drop_last:
            raise ConfigError("uploads go to the members as they come, once: leave out partition=, pad= and drop_last=")
        return UploadSource(dataset, terms.cut)
    if isinstance(partition, ByFile):
        if not isinstance(dataset, Files):
            raise ConfigError(f"partition=ByFile() needs a dataset made by Files(paths, open), not {kind}")
        return FileSource(dataset, terms, agree)
    mapped = hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)
    if mapped and hasattr(dataset, "__len__"):
        return MapSource(dataset, terms, partition or (Shuffled() if terms.shuffle else Strided()))
    if mapped and not hasattr(dataset, "__iter__"):
        raise ConfigError(f"the dataset ({kind}) has __getitem__ but no __len__: add __len__")
    if isinstance(dataset, Iterator):
        raise ConfigError(
            f"the dataset is a {kind}, which can be read only once: give an IterableDataset, or any object "
            "whose __iter__ starts over"
        )
    if not hasattr(dataset, "__iter__"):
        raise ConfigError(
            f"the dataset ({kind}) has neither __getitem__ and __len__ nor __iter__: a dataset needs the "
            "first two, or the third"
        )
    if not isinstance(partition, Strided | Columns | None):
        raise ConfigError(
            f"partition={partition} needs a dataset with __getitem__ and __len__; {kind} is a stream, for "
            "which Columns() or, for Files, ByFile() can be used"
        )
    return StreamSource(dataset, terms)
