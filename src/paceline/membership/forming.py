"""Which view follows: after a loss, a break, a newcomer's Ready, and at the start.

Views go by seniority: who stays keeps its place, newcomers come last, so that the first member holds the state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from paceline.core.view import Member, View
from paceline.membership.books import FAILED, Books
from paceline.membership.seats import Seat

_REPEATS = 3  # views of the same members, none of them formed, before the most blamed is left out
_FAULTS, _WINDOW_S = 3, 60.0  # left out so often in so long: the process is replaced


class Forming:
    """The rules about views, over the books of a run."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._first_at: float | None = None  # when the first of a first view had come
        self._dark_at: float | None = None  # since when all of the view are lost, and may come back
        self._back_at: float | None = None  # when the first of them did
        self._known: tuple[View | None, dict[int, Member]] = (None, {})  # the present view, by id

    def settle(self, now: float) -> None:
        """Make the view that follows from the books, if one does."""
        run = self._books.run
        if run.over is None and run.view and self._all_part():
            return
        if run.over is None and run.view:
            self._drop_lost(now)
        base = run.old if run.pending else run.ids  # who was only to join them has nothing left to do
        if run.over is None and run.view and base and all(self._seat(i).state == "finished" for i in base):
            self._books.end("left", self._too_few(len(base)))
        if run.over is None and run.view is None:
            self._first(now)
        elif run.over is None and run.formed:
            self._plan(now)

    def mend(self, now: float) -> None:
        """The group of the present view broke, and no loss explains it."""
        books, run = self._books, self._books.run
        base = run.old if run.pending else run.ids
        if not self._staying(base):  # all are lost
            books.reports.clear()
            return
        if run.home:  # they leave, and need no other view for that
            books.reports.clear()
            return
        # A newcomer to a planned view knows only that it waited: the others may still be in the step before.
        blamed = [b for by, b in books.reports.items() if by in base and b in base]
        suspects = {b for b in blamed if b not in books.reports}
        for b in blamed:
            run.blames[b] = run.blames.get(b, 0) + 1
        if suspects:
            run.repeats = 0
        elif run.repeats >= _REPEATS:
            worst = max(reversed(base), key=lambda i: run.blames.get(i, 0))  # the most junior of several
            suspects, run.repeats = {worst}, 0
        else:
            run.repeats += 1
        newcomers = set(run.ids) - set(base)
        self.new_view([i for i in self._staying(base) if i not in suspects], False, now)
        for id in suspects | newcomers:
            self._fault(self._seat(id), now)

    def formed(self, now: float) -> None:
        """All of the present view have met: newcomers are members now."""
        run = self._books.run
        for id in run.old:
            if id not in run.ids and self._seat(id).state == "in":  # it drains
                self._books.turn(self._seat(id), "arrived", now)
        run.formed, run.old, run.repeats, run.blames = True, (), 0, {}
        for id in run.ids:
            seat = self._seat(id)
            seat.fails = 0
            if seat.here:
                self._books.turn(seat, "in", now)
                seat.ready, seat.held = 0, run.number

    def new_view(self, ids: Sequence[int], planned: bool, now: float, late: tuple[int, ...] = ()) -> None:
        """Number a view of these and tell all whom it concerns; of nobody: there is none."""
        books, run = self._books, self._books.run
        before, concerned = run.ids, dict.fromkeys([*ids, *run.ids, *run.old])
        books.reports.clear()
        books.dirty = True
        self._first_at = None
        run.home = False
        ids = [i for i in ids if self._seat(i).here]
        run.old = before if planned else ()
        run.planned, run.formed, run.late = planned, False, late
        if not ids:
            run.view = None
        else:
            run.number += 1
            chosen = [(rank, self._seat(id)) for rank, id in enumerate(ids)]
            run.view = View(
                number=run.number,
                members=tuple(
                    msgspec.structs.replace(seat.member, rank=rank, id=seat.id) for rank, seat in chosen if seat.member
                ),
            )
        for id in concerned:
            seat = self._seat(id)
            if not planned and seat.here:
                if id in ids:
                    seat.ready = 0
                    books.turn(seat, "in", now)
                elif seat.state == "in":  # left out; it comes back by Ready
                    books.turn(seat, "arrived", now)
            if id in ids and not planned:
                seat.held = run.number
            if seat.member is not None and run.view:  # also one who is lost: it may still hear
                books.show_view(id)

    def _drop_lost(self, now: float) -> None:
        run = self._books.run
        gone = [i for i in run.ids if not self._stays(i) and self._seat(i).state != "finished"]
        gone += [i for i in run.old if i not in run.ids and self._seat(i).state == "lost"]
        if not gone:
            if self._dark_at is not None:  # all are back, and still in their view
                self._dark_at = self._back_at = None
                for id in filter(self._stays, run.old if run.pending else run.ids):
                    self._seat(id).ready = 0
                    self._books.turn(self._seat(id), "in", now)
            return
        base = run.old if run.pending else run.ids
        finished = any(self._seat(i).state == "finished" for i in run.ids)
        if run.home and any(self._stays(i) and self._seat(i).draining for i in run.ids):  # they go too
            return
        if not finished and self._dark(base, now):
            return
        self.new_view(self._staying(base), False, now)
        if run.view is None and finished:
            self._books.end("left", "")

    def _too_few(self, count: int) -> str:
        """Why a run is no success whose last members' scripts have ended well: no step was taken, and members that were
        needed have failed; "": it is one."""
        books = self._books
        failed = [s for s in books.seats.values() if s.state == "lost" and (s.why == FAILED or s.vain)]
        if books.run.stepped or count >= books.rules.least or not failed:
            return ""
        who = ", ".join(f"member {s.id}" for s in failed)
        return f"{who} failed before the first step, and {count} of at least {books.rules.least} members were left"

    def _all_part(self) -> bool:
        """Whether the scripts of all who are left have ended before the run did: then it is over, as if it had
        finished, once their processes have ended well."""
        books, run = self._books, self._books.run
        base = [self._seat(i) for i in (run.old if run.pending else run.ids)]
        if not any(s.parting for s in base) or not all(s.parting or s.state == "finished" for s in base):
            return False
        if not any(s.parting and books.hosts.runs(s.host, s.id) for s in base):
            books.end("left", "")
        return True

    def _dark(self, base: Sequence[int], now: float) -> bool:
        """Whether to wait: everybody is lost, but not dead. It may be we who were cut off, while they went on."""
        books = self._books
        here = [i for i in base if self._stays(i)]
        if self._dark_at is None and here:
            return False
        self._dark_at = now if self._dark_at is None else self._dark_at
        away = [i for i in base if self._seat(i).state == "lost" and self._seat(i).member is not None]
        others = any(self._willing(s) and not (s.id in base and self._stays(s.id)) for s in books.seats.values())
        if here:
            self._back_at = now if self._back_at is None else self._back_at
            wait = bool(away) and now - self._back_at < books.rules.silence_s
        else:
            wait = bool(away) and (not others or now - self._dark_at < books.patience_s)
        if not wait:
            self._dark_at = self._back_at = None
        return wait

    def _plan(self, now: float) -> None:
        books, run = self._books, self._books.run
        if books.reports or any(not self._stays(i) for i in run.ids):  # some have finished, or may come back
            return
        joining = sorted(
            (s for s in books.seats.values() if s.state == "ready" and s.id not in run.ids and self._willing(s)),
            key=lambda s: s.ready,
        )
        staying = [i for i in run.ids if not self._seat(i).draining]
        if not staying and not run.home:
            run.number, run.home = run.number + 1, True
            for id in run.ids:
                books.send_home(id)
        if (joining or len(staying) < len(run.ids)) and staying:
            self.new_view([*staying, *(s.id for s in joining)], True, now)

    def _first(self, now: float) -> None:
        """A view of those who come, when nobody has state."""
        books, rules = self._books, self._books.rules
        limit_s = rules.settings.join_limit_s
        come = [s for s in books.seats.values() if s.here and self._willing(s)]
        if not come:
            self._first_at = None
            return
        self._first_at = now if self._first_at is None else self._first_at
        late = now >= self._first_at + limit_s
        last = self._books.run.number
        come = [s for s in come if s.ready or not s.held or (late and s.held == last)]
        ids = {s.id for s in come}
        missing = [s for s in books.seats.values() if s.wanted and not s.draining and s.id not in ids]
        enough = last == 0 and 0 < rules.begin <= len(come)
        if not late and not enough and any(self._expected(s) for s in missing):
            return
        if len(come) >= rules.least:
            # One who held a view before has state, if old; the others in the order of their ids.
            self.new_view([s.id for s in sorted(come, key=lambda s: (-s.held, s.id))], False, now)
        elif late:
            books.end("timeout", missing_message(missing, limit_s, len(come), rules.least))

    def _stays(self, id: int) -> bool:
        """Whether the process that is in the view, or was in the one before, is here; not another one of its seat."""
        seat, run = self._seat(id), self._books.run
        if run.view is not self._known[0]:
            self._known = run.view, {m.id: m for m in run.view.members} if run.view else {}
        taken = self._known[1].get(id)
        if seat.member is None or taken is None:
            return seat.here and seat.held > 0
        return seat.here and (seat.member.host, seat.member.pid) == (taken.host, taken.pid)

    def without(self, late: Sequence[int], now: float) -> None:
        """Go on without some of the members, who live and may come back."""
        run = self._books.run
        base = run.old if run.pending else run.ids
        self.new_view([i for i in self._staying(base) if i not in late], False, now, tuple(late))

    def _staying(self, ids: Sequence[int]) -> list[int]:
        here = [i for i in ids if self._stays(i)]
        return [i for i in here if not self._seat(i).draining] or here  # rather those who are to go than nobody

    def _expected(self, seat: Seat) -> bool:
        books = self._books
        if seat.here or seat.state == "starting" or books.run.number == 0:
            return True
        return books.hosts.free() > 0 or books.hosts.runs(seat.host, seat.id)

    def _willing(self, seat: Seat) -> bool:
        return self._books.able(seat) and not seat.draining

    def _fault(self, seat: Seat, now: float) -> None:
        faults = self._books.watch[seat.id].faults
        faults[:] = [at for at in faults if now - at <= _WINDOW_S] + [now]
        if len(faults) >= _FAULTS and seat.here:
            faults.clear()
            self._books.condemn(seat, f"was left out of {_FAULTS} views within {_WINDOW_S:g} s", now)

    def _seat(self, id: int) -> Seat:
        return self._books.seats[id]


def missing_message(missing: Iterable[Seat], limit_s: float, come: int, least: int) -> str:
    """What to tell those who came when too few did.

    >>> missing_message([Seat(id=1), Seat(id=3, why="was killed")], 5.0, 1, 2).rpartition(";")[0]
    'only 1 of at least 2 members arrived within 5 s; missing: member 1, member 3 (was killed)'
    """
    who = ", ".join(f"member {s.id}" + (f" ({s.why})" if s.why else "") for s in missing)
    return (
        f"only {come} of at least {least} members arrived within {limit_s:g} s; missing: {who}; see what their logs "
        f"say, or raise --join-limit-s if they need longer to start"
    ).replace("; missing: ;", ";")
