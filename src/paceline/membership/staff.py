"""Who is started, started again, ended, and how many there shall be; and when too few can ever come.

A lost member is started again on a free slot, with a pause that doubles while its losses lead into no view, at most
`replacements` times. A process that is lost but still runs (it was stopped, or its line is cut) gets some time to come
back before it is ended to make room.
"""

from __future__ import annotations

from paceline.core.errors import ConfigError
from paceline.membership.books import FAILED, Books
from paceline.membership.orders import Drain, Start, Stop
from paceline.membership.seats import Seat

STOPPED = "the run was stopped"
_PAST = 8  # processes of a seat that are remembered, so that they are refused


class Staff:
    """The rules about processes, over the books of a run."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._few_since: float | None = None  # since when it is not certain that enough will come

    def turn(self, now: float) -> None:
        """Start and stop what is due."""
        books = self._books
        for seat in books.seats.values():
            watch = books.watch[seat.id]
            if seat.state == "starting" and watch.start_by is not None and now >= watch.start_by:
                limit_s = books.rules.settings.join_limit_s
                books.condemn(seat, f"did not arrive within {limit_s:g} s", now)
            left_out = seat.state == "arrived" and seat.held and books.run.view and seat.id not in books.run.ids
            if left_out and not seat.draining and now - seat.since >= books.rules.settings.wait_limit_s:
                books.condemn(seat, "was left out of a view and did not come back", now)
            if watch.stop_at is not None and now >= watch.stop_at:
                self._stop(seat, now)
            if seat.wanted and seat.state in ("idle", "lost") and now >= watch.start_at:
                self._start(seat, now)
        self._give_up(now)

    def scale(self, size: int, now: float) -> str:
        """Let there be `size` members; what will be done about it."""
        books, rules = self._books, self._books.rules
        if books.run.over is not None:
            raise ConfigError("the run is over")
        if not rules.least <= size <= rules.most:
            raise ConfigError(
                f"size={size}: must be between {rules.least} and {rules.most}, as in -n {rules.least}:{rules.most}"
            )
        books.run.target, books.dirty = size, True
        have = [s for s in books.seats.values() if s.wanted]  # who leaves a host that goes is started elsewhere
        if size == len(have):
            return f"{size} members, as before"
        if size > len(have):
            # Those that were never lost first; last those that have not left yet, and are started when they have.
            leaving = {s.id for s in books.seats.values() if s.here or books.hosts.runs(s.host, s.id)}
            spare = [s for s in books.seats.values() if not s.wanted and s.state != "finished"]
            new = sorted(spare, key=lambda s: (s.id in leaving, s.replaced))[: size - len(have)]
            for seat in new:
                seat.wanted = True
                if seat.id not in leaving:
                    seat.draining = False
                    books.turn(seat, "idle", now)
                    books.watch[seat.id].start_at = now
            slots = books.hosts.free()
            wait = f"; {len(new) - slots} of them wait for a free slot" if slots < len(new) else ""
            return f"{len(have)} to {len(have) + len(new)} members: {_names(new)} will be started{wait}"
        order = {id: rank for rank, id in enumerate(books.run.ids)}
        juniors = sorted(have, key=lambda s: (order.get(s.id, rules.most), s.id))[size:]
        for seat in juniors:
            seat.wanted = False
            self.drain(seat, now)
        return f"{len(have)} to {size} members: {_names(juniors)} will leave"

    def shed(self, id: int, why: str, now: float) -> None:
        """Let one member less be there, without this one: unless there would be too few, or others are on their way."""
        books, run = self._books, self._books.run
        if run.over is not None or not run.formed or id not in run.ids or len(run.ids) <= books.rules.least:
            return
        if any(not self._books.seats[i].here or self._books.seats[i].draining for i in run.ids):
            return
        seat = books.seats[id]
        seat.wanted, seat.why = False, f"was asked to leave: {why}"
        run.target, books.dirty = max(books.rules.least, run.target - 1), True
        self.drain(seat, now)

    def ended(self, seat: Seat, code: int, error: str) -> None:
        """A process of this seat has ended: end the run where others in its place would end in the same way.

        `error` is the script's own mistake (ConfigError). A host that has just joined may be the one that is wrong, so
        there it counts only of a process that was in a view.
        """
        books, run = self._books, self._books.run
        if run.over is not None or code <= 0 or seat.state != "lost":
            return
        if error and (seat.held or not run.stepped or len(books.hosts.seen) == 1):
            books.end("left", f"member {seat.id} ended with an error that would come again: {error}")
        elif not run.stepped:
            seat.vain = books.dirty = True
            if all(s.vain for s in books.seats.values() if s.wanted or s.state == "lost"):
                why = f"member {seat.id} ended with code {code}"
                books.end("left", f"every member failed before the first step, so that none is started again: {why}")

    def drain(self, seat: Seat, now: float) -> None:
        """Let the member of this seat finish what it does, and go."""
        books, watch = self._books, self._books.watch[seat.id]
        if seat.here:
            seat.draining = True
            books.say(seat.id, Drain(books.run.term))
            watch.stop_at = now + books.rules.settings.wait_limit_s
        elif seat.state == "starting":
            books.turn(seat, "drained", now)
            seat.condemned, watch.start_by, watch.stop_at = True, None, now

    def _stop(self, seat: Seat, now: float) -> None:
        books = self._books
        if not books.hosts.runs(seat.host, seat.id):
            books.watch[seat.id].stop_at = None if seat.host not in books.hosts.seen else now + books.patience_s
            return
        if seat.here:
            books.condemn(seat, "was asked to leave and did not", now)
        seat.condemned = True
        books.watch[seat.id].stop_at = now + books.patience_s  # once more, should that be lost
        books.say(seat.host, Stop(books.run.term, seat.id))

    def _start(self, seat: Seat, now: float) -> None:
        books = self._books
        if any(s.state == "finished" for s in books.seats.values()):
            return
        if books.hosts.runs(seat.host, seat.id):  # it must end, or come back, first
            return
        place = books.hosts.place(seat.id)
        if place is None:
            return
        seat.instead = seat.state == "lost"
        seat.replaced += seat.instead
        if seat.member is not None:
            seat.past = [*seat.past, (seat.member.host, seat.member.pid)][-_PAST:]
        books.hosts.seen[place].running.append(seat.id)
        seat.host, seat.pid, seat.member, seat.held, seat.ready = place, 0, None, 0, 0
        seat.draining = seat.condemned = seat.parting = False
        watch = books.watch[seat.id]
        watch.down = watch.paused = watch.stop_at = None
        watch.start_by = now + books.rules.settings.join_limit_s
        books.turn(seat, "starting", now)
        books.say(place, Start(books.run.term, seat.id))

    def _give_up(self, now: float) -> None:
        """End the run when too few can ever come."""
        books, rules = self._books, self._books.rules
        if books.run.stopping:
            if not any(s.here or s.state == "starting" for s in books.seats.values()):
                books.end("left", STOPPED)
            return
        if not self._begun() or any(s.state == "finished" for s in books.seats.values()):
            return
        # One that was drained is to be started elsewhere when its process has ended.
        waiting = [s for s in books.seats.values() if s.wanted and s.state in ("idle", "lost", "drained")]
        zombies = [s for s in books.seats.values() if s.state == "lost" and books.hosts.runs(s.host, s.id)]
        own = sum(books.hosts.runs(s.host, s.id) for s in waiting if s.state == "lost")  # their own slot will be free
        certain = sum((s.here and not s.draining) or s.state == "starting" for s in books.seats.values())
        certain += own + min(len(waiting) - own, books.hosts.free())
        certain += sum(not s.wanted for s in zombies)
        heard = [s for s in books.seats.values() if s.state == "lost" and s.member and books.watch[s.id].down is None]
        present = set(books.run.ids)  # only their agents are silent
        certain += sum(s.id in present and not books.hosts.runs(s.host, s.id) for s in heard)
        certain += sum(s.draining and s.wanted for s in books.seats.values() if s.here)
        if certain >= rules.least:
            self._few_since = None
            return
        if self._few_since is None:
            self._few_since = now
        # Where members leave one after another, the others may be on their way out too, until they form the next view.
        # How it ends says why it failed; or that it has not left, but failed, and can be started again.
        ending = any(s.why == FAILED for s in zombies)
        ending = ending or any(s.parting and books.hosts.runs(s.host, s.id) for s in books.seats.values())
        if ending and now < self._few_since + books.patience_s:
            return
        leaving = any(s.parting for s in books.seats.values()) and books.run.view is not None and not books.run.formed
        if leaving and now < self._few_since + rules.settings.join_limit_s:
            return
        silent = [s for s in books.seats.values() if s.state == "lost" and s.member and s.host in books.hosts.seen]
        perhaps = len(waiting) + sum(not s.wanted for s in silent)
        may_come = any(not books.hosts.live(s.host) for s in silent) or (
            (books.run.number == 0 or rules.open) and waiting
        )
        if perhaps and may_come and now < self._few_since + rules.settings.join_limit_s:
            return
        if books.run.number == 0 and any(s.here for s in books.seats.values()) and perhaps:
            return  # they are told who is missing at their limit
        lost = [s for s in books.seats.values() if s.state == "lost" or s.parting]
        who = "; ".join(f"member {s.id}{f' on {s.host}' if s.host else ''} {s.why}" for s in lost)
        who = who or "no host has a free slot" if waiting else who or "all have left"
        bad = f"; quarantined: {', '.join(books.hosts.quarantined)}" if books.hosts.quarantined else ""
        budget = f"each is started again at most {rules.replacements} times, and only where a slot is free"
        books.end("left", f"fewer than {rules.least} members can go on: {who}{bad} ({budget})")

    def _begun(self) -> bool:
        return bool(self._books.hosts.seen) or any(s.state != "idle" for s in self._books.seats.values())


def _names(seats: list[Seat]) -> str:
    return ("member " if len(seats) == 1 else "members ") + ", ".join(str(s.id) for s in seats)
