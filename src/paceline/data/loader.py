"""The loader: this member's batches of a dataset, fetched ahead, counted, resumable.

The user iterates it, `run.loader` makes it. A `Loader` knows the dataset and how far the epoch has come; one
iteration is a `Batches`. Batches are counted where they are handed out: what was only fetched ahead is not
consumed.

Iterating a second time in one epoch is another pass, with an order of its own. After `load_state_dict`, the
first pass goes on where the saved one stood, so a pass that was over when it was saved gives nothing more: the
script that is run again finds done what was done. A loader without `pad` is for evaluation: its members need
not be at the same place, so it has no place to save, and always starts over.

An epoch of the run begins a new iteration. One that is kept instead, and asked again in a later epoch, takes its
place in the loader back, and from then on iterations over this loader keep theirs over the ends of epochs.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from operator import index
from typing import Any, NamedTuple, Never

import torch

from paceline.core.errors import ConfigError, nearest
from paceline.data.batches import Batches
from paceline.data.fetch import Collate
from paceline.data.files import Agree
from paceline.data.kinds import Bound
from paceline.data.mapped import MapFeed
from paceline.data.partition import ByFile, Partition
from paceline.data.randomness import mix
from paceline.data.sampler import Deal
from paceline.data.source import Feed, MapSource, Terms, source_of
from paceline.data.uploads import UploadFeed

_OPTIONS = ("bound", "collate", "drop_last", "pad", "partition", "prefetch", "seed", "shuffle", "workers")
_TORCH = {  # what a torch DataLoader calls things
    "num_workers": "use workers=",
    "prefetch_factor": "use prefetch=, the number of batches that all workers together fetch ahead",
    "collate_fn": "use collate=",
    "sampler": "use partition= for who gets which samples, and shuffle= for their order",
    "batch_sampler": "use batch_size= and drop_last=, and partition= for who gets which samples",
    "generator": "use seed=",
    "worker_init_fn": "leave it out, what a worker draws follows from seed=; open files in the dataset's first access",
    "pin_memory": "leave it out, batches are copied to run.device ahead of use by themselves",
    "persistent_workers": "leave it out, workers live as long as one iteration",
}


class _Mark(NamedTuple):
    """A place in an iteration."""

    feed: Feed | None
    epoch: int
    number: int  # of the pass
    at: Any  # as the feed says it


class Loader:
    """Iterates over this member's share of `dataset`.

    batch_size, rank, size: a global batch is `batch_size` samples on each of `size` members.
    seed: decides the order, with the epoch, and what the dataset draws.
    device: batches are copied there ahead of use.
    partition: who gets which samples; without one, all members share one order, shuffled or not.
    drop_last: leave out the last, shorter global batch.
    workers, prefetch: worker processes, and how many batches may be fetched ahead (at least one per worker).
    pad: a member that has run out before others gets fillers, with `last_real` 0, so that all loops end at
        the same step. Without it only real samples are handed out, for evaluation.
    agree: all-gather of one number, for `ByFile`.
    bound: a label for each sample, as a sequence or a function of its index: only members that have the label train it;
        None: anybody does. Needs `deal`.
    labels: those that some member has.
    deal: who deals out batches as members ask for them; each then gets as many as it is fast.
    owed: whether gradients of batches that were handed out are kept for a later push, which then settles them.
    before: called when the user asks for a batch, before anything of it is counted.
    draw: called with (real samples, batch_size) as each batch is handed out.
    on_note: called with what the user should know.

    >>> loader = Loader(torch.arange(5), batch_size=2, rank=1, size=2, shuffle=False)
    >>> [batch.tolist() for batch in loader], len(loader)
    ([[1, 3], [3]], 2)
    >>> loader.last_real, loader.state_dict()["consumed"]
    (0, 5)
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        rank: int = 0,
        size: int = 1,
        seed: int = 0,
        device: torch.device | str | None = None,
        partition: Partition | ByFile | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        workers: int = 0,
        prefetch: int = 2,
        pad: bool = True,
        collate: Collate | None = None,
        agree: Agree | None = None,
        deal: Deal | None = None,
        bound: Bound | None = None,
        labels: tuple[str, ...] = (),
        owed: Callable[[], bool] = lambda: False,
        before: Callable[[], None] | None = None,
        draw: Callable[[int, int], None] | None = None,
        on_note: Callable[[str], None] | None = None,
        **unknown: Never,
    ) -> None:
        for option in unknown:
            known = _TORCH.get(option) or nearest(option, _OPTIONS)
            raise ConfigError(f"the loader has no option {option!r}: {known}")
        for name, value in {"workers": workers, "prefetch": prefetch}.items():
            if value < 0:
                raise ConfigError(f"{name}={value}: must be 0 or more")
        self.terms = Terms(
            batch_size=index(batch_size),
            rank=rank,
            size=size,
            partition=partition,
            shuffle=shuffle,
            drop_last=drop_last,
            pad=pad,
            collate=collate,
            deal=deal,
            bound=bound,
            labels=labels,
        )
        self.source = source_of(dataset, self.terms, agree)
        self.dataset, self.batch_size, self.seed, self.epoch = dataset, self.terms.batch_size, seed, 0
        self._pass = 0  # of this epoch
        self.device = torch.device(device) if device is not None else None
        self.workers, self.prefetch, self.before, self.draw = workers, prefetch, before, draw
        self.wait_s = 0.0  # how long the consumer has waited for batches, over all iterations
        self.last_real = 0  # real samples in the batch handed out last
        self._owed = owed
        self._on_note = on_note
        self._noted: set[str] = set()
        self._loaded: dict[str, Any] = {}  # the state that was loaded, until its epoch is over
        self._left: tuple[tuple[int, int], int | None] | None = None  # batches of the resumed pass of an epoch
        self._feed: Feed | None = None  # the newest iteration's
        self._begun = False
        self._earlier: tuple[Feed, int, int] | None = None  # the newest of an earlier epoch, its epoch and pass
        self._goes_on = False  # iterations are known to go on over the ends of epochs
        self._coming: int | None = None  # the epoch of the next iteration, while one of an earlier epoch goes on
        self._live: weakref.WeakSet[Batches] = weakref.WeakSet()
        self._agree = agree
        self._idle = False  # what it hands out counts for nothing
        self._marked = _Mark(None, 0, 0, 0)
        self._out = False
        if workers and self.source.in_memory:
            self.workers = 0
            self.note("workers has no effect: the dataset is made of tensors, which are quicker to index here")

    def __len__(self) -> int:
        """Batches of an epoch; in one that was resumed, those that this iteration has or will have.

        Raises:
            TypeError: only reading the data can tell.
        """
        batches = self.whole
        if batches is not None and (start := self._start()):
            place = (self.epoch, self._pass)
            if self._left is None or self._left[0] != place:
                self._left = place, self.source.left(self._pass_seed(), self.epoch, start)
            batches = self._left[1]
        if batches is None:
            raise TypeError(f"the length of a loader over {type(self.dataset).__name__} is not known")
        return batches

    @property
    def dealt(self) -> bool:
        """Whether members get batches as they ask for them."""
        return isinstance(self.source, MapSource) and self.source.dealt

    @property
    def whole(self) -> int | None:
        """Batches of a whole epoch, where that is known."""
        return self.source.batches

    @property
    def active(self) -> bool:
        """Whether a loop over it is under way."""
        return any(batches.active for batches in self._live)

    def __iter__(self) -> Batches:
        if self._coming is not None and (self._feed or not self._start()):
            self.set_epoch(self._coming)
        if self._begun:
            self._pass, self._begun = self._pass + 1, False
        self._feed, self._earlier = self.source.begin(self._pass_seed(), self.epoch, self._start()), None
        batches = Batches(self, self._feed)
        self._live.add(batches)
        if not self._out:
            self.mark()
        return batches

    def _pass_seed(self) -> int:
        return mix(self.seed, self._pass) if self._pass else self.seed

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration the first of `epoch`; a loaded state of the same epoch still decides where."""
        if self._feed:
            self._earlier = self._feed, self.epoch, self._pass
        self.epoch, self._begun, self._feed, self._coming = epoch, False, None, None
        self._pass = self._loaded["pass"] if self._loaded.get("epoch") == epoch else 0

    def enter_epoch(self, epoch: int) -> None:
        """As `set_epoch`, but an iteration that will go on keeps its place until it is over."""
        if self._goes_on and self._under_way():
            self._coming = epoch
        else:
            self.set_epoch(epoch)
        self.mark()

    def _under_way(self) -> bool:
        """Whether the newest iteration, or the one that a loaded state stands in, may give more."""
        if self._feed is None:
            return bool(self._start())
        return any(batches.active and batches.feed is self._feed for batches in self._live)

    def mark(self) -> None:
        """What was handed out so far counts: its step is committed."""
        self._marked = _Mark(self._feed, self.epoch, self._pass, self._feed.mark() if self._feed else 0)
        self._out = False

    @property
    def number(self) -> int:
        """Of the pass of this epoch that it is in."""
        return self._pass

    @property
    def drawn(self) -> int:
        """Batches that this member was handed since the rest of the epoch was last divided."""
        return self._feed.course.done if isinstance(self._feed, MapFeed) else 0

    def consumed(self, state: dict[str, Any]) -> int:
        """Samples of the epoch that a state of this loader leaves behind it."""
        if not isinstance(self.source, MapSource):
            return int(state.get("consumed", 0))
        seed = mix(state["seed"], state["pass"]) if state["pass"] else state["seed"]
        return self.source.consumed(seed, state["epoch"], state["history"])

    @property
    def over(self) -> bool:
        """Whether the newest iteration has no more batches, as the epoch is divided now."""
        return isinstance(self._feed, MapFeed) and self._feed.over

    @property
    def out(self) -> bool:
        """Whether batches were handed out whose step is not committed."""
        return self._out and self.terms.pad

    def committed(self) -> dict[str, Any]:
        """As `state_dict`, but as far as steps are committed."""
        feed, epoch, number, at = self._marked
        return self._state(feed, at, epoch, number)

    def state_dict(self) -> dict[str, Any]:
        """How far the user has come, in plain numbers and words; the same on all members."""
        return self._state(self._feed, self._feed.mark() if self._feed else 0, self.epoch, self._pass)

    def _state(self, feed: Feed | None, at: Any, epoch: int, number: int) -> dict[str, Any]:
        body = feed.state(at) if feed and self.terms.pad else self._start(epoch, number)
        where = {"epoch": epoch, "pass": number, "seed": self.seed}
        goes_on = {"goes_on": True} if self._goes_on else {}
        return {"consumed": 0} | body | where | goes_on | self._fingerprint()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that was saved by any number of members."""
        for key, now in self._fingerprint().items():
            if key not in state or state[key] != now:
                raise ConfigError(
                    f"the loader's saved state has {key}={state.get(key)!r}, this loader {now!r}: resume "
                    "with the same dataset, partition and shuffle, or start the run afresh"
                )
        self.seed, self._loaded = state["seed"], dict(state) if self.terms.pad else {}
        self.set_epoch(state["epoch"])
        self._earlier, self._goes_on = None, state.get("goes_on", False)
        self.mark()

    def go_on(self, state: dict[str, Any], rank: int, size: int, *, idle: bool = False) -> None:
        """Go on from a state as another one of so many members; so does the loop that is under way.

        `idle`: beside the one that has this rank, and to be handed the same batches, which count for nothing here.
        """
        self._idle = idle
        self._turn_to(state, dataclasses.replace(self.terms, rank=rank, size=size, widths=()))

    @property
    def evenly(self) -> str:
        """Why members' shares of a global batch cannot follow their speed; "": they can."""
        return self.source.evenly

    @property
    def widths(self) -> tuple[int, ...]:
        """Each member's samples of a global batch."""
        return self.terms.widths or (self.batch_size,) * self.terms.size

    def share(self, widths: Sequence[int]) -> None:
        """From the next batch on member i gets widths[i] of each global batch, which stays as large as it was.

        Called by all members with the same widths, between the same two steps.
        """
        if self.evenly:
            raise ConfigError(f"the loader cannot give members unequal shares: {self.evenly}")
        if len(widths) != self.terms.size or sum(widths) != self.terms.size * self.batch_size or min(widths) < 1:
            raise ConfigError(f"widths={list(widths)}: {self.terms.size} numbers above 0 that add up to a global batch")
        even = all(width == self.batch_size for width in widths)
        coming = self._coming
        self._turn_to(self.state_dict(), dataclasses.replace(self.terms, widths=() if even else tuple(widths)))
        self._coming = coming

    def _turn_to(self, state: dict[str, Any], terms: Terms) -> None:
        live = [batches for batches in self._live if batches.feed is self._feed and not batches.over]
        self.terms = terms
        self.source = source_of(self.dataset, self.terms, self._agree)
        self.load_state_dict(state)
        if live and self.terms.pad:
            self._feed, self._begun = self.source.begin(self._pass_seed(), self.epoch, self._start()), True
            for batches in live:
                batches.turn_to(self._feed)
            left = self.source.left(self._pass_seed(), self.epoch, self._start())
            drawn = max(batches.drawn for batches in live)  # by a loop that counts them
            self._left = (self.epoch, self._pass), None if left is None else drawn + left
        self.mark()

    def leases(self) -> dict[str, tuple[int, ...]]:
        """The batches that a push of now has the gradients of, by course; empty where batches are not dealt."""
        return {course: numbers for batches in self._live for course, numbers in batches.leases().items()}

    def close(self) -> None:
        """End all iterations and whatever fetches for them."""
        for batches in list(self._live):
            batches.close()

    def note(self, text: str) -> None:
        """Tell the user something once."""
        if self._on_note and text not in self._noted:
            self._noted.add(text)
            self._on_note(text)

    def asked(self, feed: Feed) -> None:
        """Called by an iteration when the user asks for a batch."""
        if self._feed is None and self._earlier and self._earlier[0] is feed and self.terms.pad:
            self._coming = self.epoch
            self._feed, self.epoch, self._pass = self._earlier
            self._begun = self._goes_on = True
            self.note(
                "an iteration over a loader goes on from one epoch into the next: the checkpoint between these two "
                "does not hold its place, those from here on do"
            )
        if isinstance(feed, MapFeed | UploadFeed):
            feed.asked(owed=self._owed())
        if self.before:
            self.before()

    def handed_out(self, feed: Feed, real: int) -> None:
        """Called by an iteration for each batch, in the consumer's thread."""
        self.last_real = real = 0 if self._idle else real
        self._out = True
        if feed is self._feed:
            self._begun = True
        if self.draw:
            self.draw(real, self.batch_size)

    def ended(self, feed: Feed) -> None:
        """Called by an iteration that has come to the end of its epoch."""
        if feed is self._feed:
            self._begun, self._loaded = True, {}

    def _start(self, epoch: int | None = None, number: int | None = None) -> dict[str, Any]:
        """Where a pass begins: this one, or the given one of an epoch."""
        place = (self.epoch, self._pass) if epoch is None else (epoch, number)
        if (self._loaded.get("epoch"), self._loaded.get("pass")) != place:
            return {}
        return {key: self._loaded[key] for key in ("consumed", "history", "files", "done") if key in self._loaded}

    def _fingerprint(self) -> dict[str, Any]:
        """What must be the same for a state to fit."""
        partition = self.terms.partition
        name = type(partition).__name__ if partition else "default"
        return {"length": self.source.length, "partition": name, "shuffle": self.terms.shuffle}
