"""Leases: the batches of an epoch, lent to members one by one as they ask.

Where nobody waits for anybody, a fast member trains more batches than a slow one. A batch that was lent is done when
a push with its gradients is taken, or when its member says so; those of a member that is lost are lent again. So every
batch counts once, whenever a member is lost (decision 0016).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class Leases:
    """The batches 0 to `total`-1 of one epoch.

    >>> leases = Leases(3)
    >>> leases.take(0), leases.take(1), leases.take(0), leases.take(1)
    (0, 1, 2, None)
    >>> leases.lost(0)
    >>> leases.take(1), leases.over
    (0, False)
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._next = 0
        self._returned: deque[int] = deque()
        self._lent: dict[int, dict[int, None]] = {}  # by rank, in the order in which they were lent

    @property
    def over(self) -> bool:
        """Whether all batches are done."""
        return self._next >= self.total and not self._returned and not any(self._lent.values())

    def take(self, rank: int) -> int | None:
        """The next batch for a member; None: all are done or lent, and those that are lent may come back."""
        if self._returned:
            number = self._returned.popleft()
        elif self._next < self.total:
            number = self._next
            self._next += 1
        else:
            return None
        self._lent.setdefault(rank, {})[number] = None
        return number

    def done(self, rank: int, numbers: Iterable[int]) -> None:
        """A member has done these of the batches that it was lent."""
        lent = self._lent.get(rank, {})
        for number in numbers:
            lent.pop(number, None)

    def lost(self, rank: int) -> None:
        """A member is gone: what it had not done can be lent again."""
        self._returned.extend(self._lent.pop(rank, ()))
