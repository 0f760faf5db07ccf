"""Members that came and went in an elastic run, as its "view" events tell it: a row for each change, and their sums.

The events of a run are those of its first member, whoever that was at the time, in one file (`history`).
"""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec

from paceline.core.events import Event
from paceline.train import figures
from paceline.train.figures import clean, value

HEADS = ("view", "after", "step", "members", "lost", "joined", "healed", "took")
_MOST = 50  # that are kept; of the earlier ones only what they add up to
_SHOWN = 8  # in the terminal


class View(msgspec.Struct, frozen=True, kw_only=True):
    """One change. Members are named by their number for life."""

    number: int
    after_s: float  # since the run began
    step: int
    size: int
    lost: tuple[int, ...] = ()  # and who left
    left: tuple[int, ...] = ()  # of them
    joined: tuple[int, ...] = ()
    healed: tuple[int, ...] = ()  # those that were given the state
    late: tuple[int, ...] = ()  # of `lost`, those that only were late for a round
    seconds: float = 0.0  # until those who stayed went on
    reason: str = ""

    @property
    def cells(self) -> tuple[str, ...]:
        """As `HEADS` names them."""
        gone = [f"{id} left" if id in self.left else str(id) for id in self.lost]
        ids = (", ".join(map(str, each)) or "-" for each in (gone, self.joined, self.healed))
        after = figures.duration(self.after_s)
        return (str(self.number), after, f"{self.step:,}", str(self.size), *ids, f"{self.seconds:.2f} s")


class Views(msgspec.Struct, frozen=True, kw_only=True):
    """All of them together."""

    changes: int = 0
    lost: int = 0  # members, each as often as it was
    left: int = 0  # that were asked to go, or went
    replaced: int = 0  # times that one which was lost came back, or another for it
    joined: int = 0  # others that came
    late: int = 0  # times that one was left out of a round, for which it was late
    recovery_s: float = 0.0  # that those who stayed took after losses and broken connections
    waiting_s: float = 0.0  # that they stood still, since there were fewer than the least
    last: tuple[View, ...] = ()

    @property
    def line(self) -> str:
        """
        >>> Views(changes=3, lost=1, replaced=1, recovery_s=0.5).line
        'members came and went: 1 lost, 1 replaced, 0 joined, in 3 views; 0.50 s in recovery'
        >>> Views(changes=1, left=1).line
        'members came and went: 0 lost, 1 left, 0 replaced, 0 joined, in 1 view; 0.00 s in recovery'
        >>> Views(changes=2, lost=1, replaced=1, recovery_s=0.08, waiting_s=7.06).line.rpartition("; ")[2]
        '0.08 s in recovery, 7.1 s waiting for members'
        """
        left = f"{self.left:,} left, " if self.left else ""
        views = "1 view" if self.changes == 1 else f"{self.changes:,} views"
        return (
            f"members came and went: {self.lost:,} lost, {left}{self.replaced:,} replaced, {self.joined:,} joined, "
            f"in {views}; {self.recovery_s:.2f} s in recovery"
            + (f", {self.waiting_s:.1f} s waiting for members" if self.waiting_s else "")
            + (f"; {self.late:,} times one was late for a round" if self.late else "")
        )

    @property
    def text(self) -> str:
        """The line and the last rows."""
        rows = [HEADS, *(view.cells for view in self.last[-_SHOWN:])]
        widths = [max(map(len, column)) for column in zip(*rows)]
        return "\n".join([self.line, *("  ".join(c.rjust(w) for c, w in zip(row, widths)) for row in rows)])


class Counted:
    """Takes "view" events one by one, in a bounded space."""

    def __init__(self) -> None:
        self._gone: set[int] = set()
        self._left: set[int] = set()
        self._late: set[int] = set()
        self._views = Views()
        self._last: deque[View] = deque(maxlen=_MOST)

    def add(self, event: Event, began: float) -> None:
        """`began`: when the run did, by the clock of the events."""
        told = ("lost", "left", "joined", "healed", "late")
        lost, left, joined, healed, late = (_ids(event.get(key)) for key in told)
        view = View(
            number=_whole(event.get("number")),
            after_s=max(0.0, value(event.get("time") or 0.0) - began),
            step=_whole(event.get("step")),
            size=_whole(event.get("size")),
            lost=lost,
            left=left,
            joined=joined,
            healed=healed,
            late=late,
            seconds=max(0.0, value(event.get("seconds") or 0.0)),
            reason=clean(event.get("reason") or "", 200),
        )
        short = event.get("short") is True
        again, self._late = self._late & set(joined), (self._late | set(late)) - set(joined)
        # One that seemed to leave may have been lost: with what its process ends is known only later.
        failed = self._left & set(joined) & set(_ids(event.get("instead")))
        back = self._gone & set(joined) | failed
        self._left = (self._left | set(left)) - set(joined)
        self._gone = (self._gone | set(lost) - set(left) - set(late)) - back
        before = self._views
        self._views = Views(
            changes=before.changes + 1,
            lost=before.lost + len(set(lost) - set(left) - set(late)) + len(failed),
            left=before.left + len(left) - len(failed),
            replaced=before.replaced + len(back),
            joined=before.joined + len(set(joined) - back - again),
            late=before.late + len(late),
            recovery_s=before.recovery_s + (view.seconds if not short and (lost or not joined) else 0.0),
            waiting_s=before.waiting_s + (view.seconds if short else 0.0),
        )
        for i in range(len(self._last) - 1, -1, -1):  # the last time that each seemed to leave
            one = self._last[i]
            if wrong := failed & set(one.left):
                self._last[i] = msgspec.structs.replace(one, left=tuple(id for id in one.left if id not in wrong))
                failed -= wrong
        self._last.append(view)

    @property
    def views(self) -> Views | None:
        """What they come to; None where there was none."""
        return msgspec.structs.replace(self._views, last=tuple(self._last)) if self._last else None


def _ids(told: Any) -> tuple[int, ...]:
    return tuple(i for i in told if isinstance(i, int)) if isinstance(told, list | tuple) else ()


def _whole(told: Any) -> int:
    return told if isinstance(told, int) else 0
