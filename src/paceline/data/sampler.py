"""The sampler: which samples this member visits in which global batch, and how far the epoch has come.

A global batch is one batch on each member. A `Course` is the way through one epoch from a given point: every
member has a queue of samples, global batch k takes the k-th piece of `batch_size` of every queue. A member
whose queue is empty before the others' takes part with a filler: samples it repeats, which count for nothing.

How far an epoch has come is kept as its history, `[[size, batch_size, batches], ...]`: so many global batches
were taken by so many members. Replaying it on any number of members gives the samples that are left, so a run
saved on two members goes on with four or one, and no sample is lost or visited twice. Where members had unequal
shares (`widths`, which add up to size * batch_size), these stand behind: `[2, 8, batches, 10, 6]`. Where they have
taken unequal numbers of batches, as members that train apart do, these stand behind a -1: `[2, 8, -1, 10, 6]`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from paceline.core.errors import ConfigError, Interrupted
from paceline.data.kinds import Kinds, Parts
from paceline.data.partition import Partition
from paceline.data.randomness import mix, permutation
from paceline.data.shares import deal as deal_out

History = list[list[int]]
APART = -1  # in the place of a number of batches: each member's own stand behind


class Deal(Protocol):
    """Who deals out batches; see `paceline.data.leases`."""

    @property
    def deals(self) -> bool:
        """Whether epochs that begin now are dealt; else they are shared out evenly. All members have the same."""

    def take(self, course: str, total: int, *, wait: bool, waits: Callable[[], None], bound: Parts = ()) -> int | None:
        """The next batch's number; `waits` is called now and then while it depends on others whether there is one.

        `bound`: to which labels the last ones of the batches are bound.
        """

    def done(self, course: str, numbers: Sequence[int]) -> None:
        """These of the batches that this member was lent are trained."""

    def named(self, course: str) -> str:
        """What whoever deals knows a course by."""

    def rest(self) -> None:
        """This member has nothing to do until it is dealt a batch."""


class Turn(NamedTuple):
    """This member's part in one global batch."""

    number: int  # of the global batch, counted since the division was made
    indices: Tensor  # into the dataset
    real: int  # how many of them count: all, or 0 for a filler


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Divides each epoch over a dataset of `length` samples among `size` members."""

    length: int
    partition: Partition
    shuffle: bool
    batch_size: int
    rank: int
    size: int
    drop_last: bool = False
    widths: tuple[int, ...] = ()  # each member's samples of a global batch; (): batch_size each

    def __post_init__(self) -> None:
        self.partition.check(self.length, self.size)
        if self.drop_last and not self.begin(0, 0, []).batches:
            raise ConfigError(
                f"drop_last=True leaves no batch: {self.length} samples do not fill "
                f"batch_size={self.batch_size} on {self.size} member(s): use a smaller batch_size or "
                "drop_last=False"
            )

    def begin(self, seed: int, epoch: int, history: History) -> Course:
        """The way through the rest of an epoch."""
        order = permutation(self.length, seed, epoch) if self.shuffle else torch.arange(self.length)
        rest, done, before = order, 0, list(history)
        if before and [*before[-1][:2], *before[-1][3:]] == [self.size, self.batch_size, *self.widths]:
            done = before.pop()[2]  # the same division goes on
        for size, batch_size, batches, *behind in before:
            apart = batches == APART
            widths = [] if apart else behind
            ends = [n * batch_size for n in behind] if apart else [batches * w for w in widths or [batch_size] * size]
            taken = torch.zeros(self.length, dtype=torch.bool)
            for queue, end in zip(self._queues(rest, size, batch_size, widths), ends):
                taken[queue[:end]] = True
            rest = rest[~taken[rest]]
        return Course(self, seed, epoch, before, rest, done, spare=order[:1])

    def queues(self, rest: Tensor) -> list[Tensor]:
        """Divide what is left of an epoch among the members."""
        return self._queues(rest, self.size, self.batch_size, self.widths)

    def _queues(self, rest: Tensor, size: int, batch_size: int, widths: Sequence[int]) -> list[Tensor]:
        return deal_out(rest, widths) if widths else self.partition.share(rest, self.length, size, batch_size)

    def dealt(self, seed: int, epoch: int, deal: Deal, kinds: Kinds | None = None) -> DealtCourse:
        """The way through an epoch of which this member gets batches as it asks for them."""
        order = permutation(self.length, seed, epoch) if self.shuffle else torch.arange(self.length)
        return DealtCourse(self, seed, epoch, order, deal, kinds or Kinds(None, self.length))


class Course:
    """One epoch from one point on. `done` counts the global batches since the division was last made."""

    def __init__(
        self,
        sampler: Sampler,
        seed: int,
        epoch: int,
        before: History,
        rest: Tensor,
        done: int,
        *,
        spare: Tensor,
    ) -> None:
        self.sampler, self.epoch, self.done = sampler, epoch, done
        self._before, self._seed, self._spare = before, seed, spare
        self._consumed_before = sampler.length - len(rest)
        queues = sampler.queues(rest)
        self.queue = queues[sampler.rank]
        self._lengths = [len(queue) for queue in queues]
        self._widths = sampler.widths or (sampler.batch_size,) * sampler.size
        self._width = self._widths[sampler.rank]
        if sampler.drop_last:  # a global batch counts as complete when every member's part is
            self.batches = min(length // width for length, width in zip(self._lengths, self._widths))
        else:
            self.batches = max(-(-length // width) for length, width in zip(self._lengths, self._widths))

    @property
    def own_batches(self) -> int:
        """How many of the batches have real samples on this member."""
        return min(self.batches, -(-len(self.queue) // self._width))

    def turns(self, pad: bool = True, *, wait: bool = True) -> Iterator[Turn]:
        """This member's part in each global batch from `done` on; without `pad`, no fillers."""
        return map(self.turn, range(self.done, self.batches if pad else self.own_batches))

    def turn(self, number: int) -> Turn:
        width = self._width
        indices = self.queue[number * width : (number + 1) * width]
        if len(indices):
            return Turn(number, indices, len(indices))
        # As many as the fullest member has: layers such as batch norm refuse a batch of one.
        most = min(width, max(length - number * w for length, w in zip(self._lengths, self._widths)))
        own = self.queue[-most:] if len(self.queue) else self._spare
        return Turn(number, own.repeat(-(-most // len(own)))[:most], 0)

    def real(self, number: int) -> int:
        """How many real samples this member has in a global batch."""
        return max(0, min(self._width, len(self.queue) - number * self._width))

    def seed(self, number: int) -> int:
        """For what the dataset draws while it makes this member's part of a global batch."""
        return mix(self._seed, self.epoch, self.consumed(number), self.sampler.rank)

    def consumed(self, done: int) -> int:
        """Samples of this epoch that all members together have consumed after `done` global batches."""
        queues = list(zip(self._lengths, self._widths))
        queues = queues[:1] if self.sampler.partition.whole else queues
        return self._consumed_before + sum(min(done * width, length) for length, width in queues)

    def history(self, done: int | None = None) -> History:
        done = self.done if done is None else done
        now = [self.sampler.size, self.sampler.batch_size, done, *self.sampler.widths]
        return [*self._before, now] if done else self._before


class DealtCourse(Course):
    """One epoch over all samples, whose batches are lent to members. `done` counts those of this member."""

    def __init__(self, sampler: Sampler, seed: int, epoch: int, order: Tensor, deal: Deal, kinds: Kinds) -> None:
        super().__init__(sampler, seed, epoch, [], order, 0, spare=order[:1])
        self.queue, self._edges, self._bound = kinds.cut(order, sampler.batch_size, drop_last=sampler.drop_last)
        self.batches = len(self._edges) - 1
        self._deal = deal
        self._name = f"{seed}/{epoch}"
        self._numbers: list[int] = []  # that this member was lent
        self._settled = 0  # of those handed out, so many are told to be done, or held until they are
        self._passed = 0  # so many are behind the user, who has asked for more
        self._told = 0  # how many are known to be done
        self._telling = threading.Lock()
        self._waiting = False  # for a batch that others may leave
        self._stopped = False

    def turns(self, pad: bool = True, *, wait: bool = True) -> Iterator[Turn]:
        """The batches that this member is lent. `wait`: at the end, for those that others may lose."""
        while True:
            number = self._deal.take(self._name, self.batches, wait=wait, waits=self._wait, bound=self._bound)
            self._waiting = False
            if number is None:
                return
            self._numbers.append(number)
            yield self.turn(number)

    def turn(self, number: int) -> Turn:
        indices = self.queue[self._edges[number] : self._edges[number + 1]]
        return Turn(number, indices, len(indices))

    def seed(self, number: int) -> int:
        return mix(self._seed, self.epoch, self._edges[number], 0)  # the same whoever gets the batch

    def _wait(self) -> None:
        if self._stopped:
            raise Interrupted("this member's loop has failed, and waits for no more batches")
        if not self._waiting:
            self._waiting = True
            self._settle_passed()  # nobody is to wait for a push that this member may never make

    def _rest_if_idle(self) -> None:
        """Called by whoever fetches and by whoever trains: the later of both finds that there is nothing to train."""
        if len(self._numbers) == self.done == self._told:
            self._deal.rest()

    def asked(self, *, owed: bool = False) -> None:
        """The user asks for a batch: those that were handed out are done, but for those that are held.

        `owed`: their gradients are kept here for a push to come, which settles them. Where there are no more batches,
        they are done all the same.
        """
        self._passed = self.done
        if not owed or self._waiting:
            self._settle_passed()

    def leases(self) -> dict[str, tuple[int, ...]]:
        """The batches that a push of now has the gradients of: handed out, not yet done, and not held."""
        numbers = tuple(self._numbers[self._settled : self.done])
        return {self._deal.named(self._name): numbers} if numbers else {}

    def end(self) -> None:
        """There are no more batches."""
        self._passed = self.done
        self._settle_passed()

    def _settle_passed(self) -> None:
        with self._telling:
            places, self._settled = range(self._settled, self._passed), max(self._settled, self._passed)
        self._tell(places)

    def hold(self) -> Callable[[], None]:
        """The batch handed out last is done when the returned function is called, whoever asks for the next."""
        self._settled = self.done
        return functools.partial(self._tell, [self.done - 1])

    def stop(self) -> None:
        """Whoever waits for a batch, in another thread, need not wait any longer."""
        self._stopped = True

    def _tell(self, places: Sequence[int]) -> None:
        if places:
            self._deal.done(self._name, [self._numbers[place] for place in places])
            with self._telling:
                self._told += len(places)
        if self._waiting:
            self._rest_if_idle()

    def real(self, number: int) -> int:
        number = self._numbers[number]
        return self._edges[number + 1] - self._edges[number]

    def history(self, done: int | None = None) -> History:
        return []  # what all members have done is not known here: an epoch that is resumed begins anew

    def consumed(self, done: int) -> int:
        return self._edges[self._numbers[done]] if done < len(self._numbers) else 0
