"""How long those who have come to a round wait for the others, where members train apart.

Each tells the scheduler when it comes to a round. Once as many as the quorum are there, the others have the grace
window to come; who has not is left out of the view, so that the round is held without it. It is not lost, and nobody
blames it: it trains on, says that it is ready, and is taken in again after the next round.

With fewer members than the quorum nobody is left out. Pure, as the roster is; what it knows is told again by members
whose line was cut.
"""

from __future__ import annotations

from paceline.membership.books import Books
from paceline.membership.forming import Forming
from paceline.membership.orders import Here


class Quorum:
    """Over the books of a run."""

    def __init__(self, books: Books, forming: Forming) -> None:
        self._books, self._forming = books, forming
        self._newest: Here | None = None
        self._there: set[int] = set()  # ids, at the newest round
        self._since: float | None = None  # when there were enough of them

    def here(self, id: int, here: Here, now: float) -> None:
        """A member has come to a round."""
        run = self._books.run
        about = (run.number, run.number - 1) if run.pending else (run.number,)
        if here.view not in about or id not in self._base:
            return
        if self._newest is None or here.round > self._newest.round:
            self._there, self._since = set(), None
        elif here.round < self._newest.round:  # it will be given what the others have agreed on
            return
        self._newest = here
        self._there.add(id)
        self.look(now)

    def look(self, now: float) -> None:
        """Time has passed."""
        books, newest, base = self._books, self._newest, self._base
        if newest is None or books.run.over is not None or not self._there:
            return
        # One whose line is cut may be there: it says so again, or is lost.
        missing = [i for i in base if i not in self._there and books.seats[i].here and books.watch[i].down is None]
        if not missing or sum(i in self._there for i in base) < newest.quorum:
            self._since = None
            return
        self._since = now if self._since is None else self._since
        if now - self._since >= newest.grace_s:
            self._since = None
            self._forming.without(missing, now)

    @property
    def _base(self) -> tuple[int, ...]:
        run = self._books.run
        return run.old if run.pending else run.ids
