"""Who comes late to rounds, and how often: named when that is a habit."""

from __future__ import annotations

from paceline.train.place import Change

_OFTEN = (3, 10, 30, 100, 300, 1000)  # rounds


class Lateness:
    """
    >>> lateness, change = Lateness(), Change(2, 3, (7,), (), (), 0.1, "", late=(7,))
    >>> [line.partition(":")[0] for _ in range(4) for line in lateness.note(change)]
    ['member 7 was late for 3 rounds']
    """

    def __init__(self) -> None:
        self._times: dict[int, int] = {}  # by id

    def note(self, change: Change) -> list[str]:
        """A view came; what is to be said of it."""
        lines = []
        for id in change.late:
            self._times[id] = times = self._times.get(id, 0) + 1
            if times in _OFTEN:
                lines.append(
                    f"member {id} was late for {times} rounds: what it learns counts a round later, and is left out "
                    "where it misses the end of an epoch. Give it more time with grace_s, or let it leave"
                )
        return lines
