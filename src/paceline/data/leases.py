"""Leases: the batches of an epoch, lent to members one by one as they ask.

Where nobody waits for anybody, a fast member trains more batches than a slow one. A batch that was lent is done when
its gradients are known to be everywhere, or when its member says so; those of a member that is lost are lent again,
with a note of where they count already. So every batch counts once, whenever a member is lost (decision 0016). Batches
can be bound to members that have a label; such members take these first.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence

from paceline.core.queue import Loan, Part

Counted = Mapping[tuple[int, int], int]  # by table and server: so many chunks have a batch already


class Leases:
    """The batches 0 to `total`-1 of one epoch, of which the last ones are bound to labels.

    >>> leases = Leases(3)
    >>> leases.take(0), leases.take(1), leases.take(0), leases.take(1)
    (0, 1, 2, None)
    >>> leases.lost(0, {2: {(0, 1): 5}})
    [0, 2]
    >>> leases.take(1), leases.take(1), leases.counted(0), leases.counted(2), leases.over
    (0, 2, {}, {(0, 1): 5}, False)
    >>> leases = Leases(3, [("gpu", 1)])
    >>> leases.take(0), leases.take(1, ["gpu"]), leases.take(0), leases.take(0)
    (0, 2, 1, None)
    """

    def __init__(self, total: int, bound: Sequence[tuple[str, int]] = ()) -> None:
        self.total = total
        self._lent: dict[int, dict[int, float]] = {}  # by rank, in the order in which they were lent
        self._counted: dict[int, Counted] = {}  # by number, of batches that were lent again
        self._kinds: dict[str, _Kind] = {}
        end = total - sum(count for _, count in bound)
        self._kinds[""] = _Kind(0, end)
        for label, count in bound:
            self._kinds[label] = _Kind(end, end + count)
            end += count

    @property
    def lent(self) -> bool:
        """Whether some batches are lent, and not done."""
        return any(self._lent.values())

    @property
    def over(self) -> bool:
        """Whether all batches are done."""
        return not self.lent and not any(kind.left for kind in self._kinds.values())

    def take(self, rank: int, labels: Collection[str] = ()) -> int | None:
        """The next batch for a member; None: all are done or lent, and those that are lent may come back."""
        for label, kind in sorted(self._kinds.items(), key=lambda item: not item[0]):
            if kind.left and (not label or label in labels):
                number = kind.take()
                self._lent.setdefault(rank, {})[number] = time.time()
                return number
        return None

    def done(self, rank: int, numbers: Iterable[int]) -> None:
        """A member has done these of the batches that it was lent."""
        lent = self._lent.get(rank, {})
        for number in numbers:
            if lent.pop(number, None) is not None:
                self._counted.pop(number, None)

    def counted(self, number: int) -> Counted:
        """Where a batch that is lent counts already, by what members that were lost have left."""
        return self._counted.get(number, {})

    def lost(self, rank: int, counted: Mapping[int, Counted] | None = None) -> list[int]:
        """A member is gone: what it had not done can be lent again. `counted`: where some of that counts already."""
        back = list(self._lent.pop(rank, ()))
        for number in back:
            if now := (counted or {}).get(number):
                before = self.counted(number)
                self._counted[number] = {at: max(before.get(at, 0), now.get(at, 0)) for at in {*before, *now}}
            next(kind for kind in self._kinds.values() if number in kind.numbers).give_back(number)
        return back

    def missing(self, labels: Collection[str]) -> dict[str, int]:
        """What is left for labels other than these; nothing while there are batches left for those who have these."""
        left = {label: kind.left for label, kind in self._kinds.items() if kind.left}
        return {} if any(not label or label in labels for label in left) else left

    def parts(self) -> tuple[Part, ...]:
        """How far each kind has come."""
        return tuple(self._part(label, kind) for label, kind in self._kinds.items() if kind.numbers or not label)

    def _part(self, label: str, kind: _Kind) -> Part:
        loans = []
        for rank, lent in sorted(self._lent.items()):
            times = [since for number, since in lent.items() if number in kind.numbers]
            if times:
                loans.append(Loan(rank=rank, batches=len(times), since=min(times)))
        done = len(kind.numbers) - kind.left - sum(loan.batches for loan in loans)
        return Part(label=label, done=done, left=kind.left, lent=tuple(loans), returned=kind.returned)


class _Kind:
    """The batches of one label."""

    def __init__(self, first: int, end: int) -> None:
        self.numbers = range(first, end)
        self.returned = 0
        self._next = first
        self._back: deque[int] = deque()

    @property
    def left(self) -> int:
        return self.numbers.stop - self._next + len(self._back)

    def take(self) -> int:
        if self._back:
            return self._back.popleft()
        self._next += 1
        return self._next - 1

    def give_back(self, number: int) -> None:
        self._back.append(number)
        self.returned += 1
