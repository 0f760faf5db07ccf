"""Who sits down where, whose process has ended, and who is heard of again: what an event means for one seat.

The part of the roster that looks at processes; which view follows is `forming`'s, who is started again `staff`'s.
"""

from __future__ import annotations

from paceline.core.errors import ConfigError, Interrupted
from paceline.core.view import Member
from paceline.membership.books import FAILED, Books
from paceline.membership.forming import Forming
from paceline.membership.orders import Stop
from paceline.membership.seats import Seat, process_of
from paceline.membership.staff import Staff


class Seating:
    """The rules about seats, over the books of a run."""

    def __init__(self, books: Books, forming: Forming, staff: Staff) -> None:
        self._books = books
        self._forming = forming
        self._staff = staff

    def sit_down(self, seat: Seat, member: Member, view: int, now: float) -> None:
        """A process that did not sit there before."""
        books = self._books
        watch = books.watch[seat.id]
        if (member.host, member.pid) in seat.past:
            raise Interrupted(f"member {seat.id} was lost ({seat.why}) and replaced: this process ends")
        if seat.member is None or view <= seat.held:
            self._check_free(seat, now)
        # Else it was in a later view than who sits there, who was replaced: a full disk kept that out of the journal.
        seat.member, seat.pid, seat.held, seat.ready = member, member.pid, view, 0
        seat.wanted = seat.wanted or books.short
        seat.draining = seat.condemned = seat.parting = False
        watch.start_by = watch.paused = watch.stop_at = None
        watch.faults.clear()
        books.turn(seat, "arrived", now)

    def _check_free(self, seat: Seat, now: float) -> None:
        """ConfigError where the process that sits there may still run; one that is gone is lost."""
        books = self._books
        if books.watch[seat.id].unmet and seat.member and (seat.here or seat.state == "lost"):
            # Only an agent starts a second process of a seat, when the first has ended: a full disk kept that out of
            # the journal. Should the first be on a host that was cut off, it is not to come back.
            seat.past = [*seat.past, *process_of(seat)]
            books.lose(seat, "came again as another process", now, ended=True)
            seat.instead = True
            self._forming.settle(now)
        if seat.here and (books.watch[seat.id].down is None or books.hosts.runs(seat.host, seat.id)):
            other = seat.member
            raise ConfigError(
                f"id {seat.id} is taken by process {other.pid if other else 0} on {other.host if other else ''}: a "
                f"member joins once; a program that a member starts inherits its place, so clear PACELINE_* for it"
            )
        if seat.here:
            books.lose(seat, "came again as another process", now, ended=True)
            self._forming.settle(now)
        if seat.state == "lost" and books.hosts.runs(seat.host, seat.id) and seat.member:
            raise ConfigError(f"id {seat.id} belongs to a process that still runs on {seat.host}")

    def ended(self, name: str, id: int, how: str, code: int | None, now: float) -> None:
        books = self._books
        books.hosts.ended(name, id)
        seat = books.seats.get(id)
        books.dirty = True
        if seat is None or seat.host != name:  # another one sits there by now
            return
        books.watch[id].stop_at = None
        if seat.parting and code:  # it has not left well after all
            seat.parting, seat.wanted = False, True
            books.lose(seat, how, now, ended=True)
        elif seat.state in ("drained", "finished") or (seat.draining and (code == 0 or seat.wanted)):
            seat.member, seat.condemned, seat.draining = None, False, False
            again = seat.wanted and seat.state != "finished"  # of a host that goes: elsewhere, if there is room
            books.turn(seat, "idle" if again else "finished" if seat.state == "finished" else "drained", now)
        elif code == 0 and seat.state == "starting" and self._nobody_came():
            books.turn(seat, "finished", now)
            if all(s.state == "finished" for s in books.seats.values() if s.wanted):
                books.end("left", "")
        elif books.run.over is not None and (seat.here or seat.state == "starting"):  # it was told to
            seat.member = None
            books.turn(seat, "drained", now)
        elif code == 0 and seat.here:
            books.part(seat, now)
            seat.member = None
        elif seat.here or seat.state == "starting":
            books.lose(seat, how, now, ended=True)
        elif seat.state == "lost":
            seat.member, seat.condemned = None, False
            if seat.why == FAILED and code is not None:
                seat.why = how

    def _nobody_came(self) -> bool:
        """So far; a script that never joins is as many plain scripts, which are run once."""
        return self._books.run.number == 0 and not any(s.here for s in self._books.seats.values())

    def back(self, name: str, now: float) -> None:
        """A host that was silent is heard: its members may be there after all, unless others took their seats."""
        for id in self._books.hosts.seen[name].running:
            if self._books.seats[id].host != name:
                self._books.say(name, Stop(self._books.run.term, id))
        for seat in self._books.seats.values():
            if seat.host == name:
                self.revive(seat, now)
        self._forming.settle(now)

    def revive(self, seat: Seat, now: float) -> None:
        """One that was lost is heard of again: it is told of the view that was made without it, since its line may
        never have closed."""
        run, was = self._books.run, seat.state
        self._books.revive(seat, now)
        if was == "lost" and seat.here and run.view:
            self._books.show_view(seat.id)
        if was == "lost" and self.going(seat):
            self._staff.drain(seat, now)
            if run.home and seat.id in run.ids:
                self._books.send_home(seat.id)

    def going(self, seat: Seat) -> bool:
        """Whether it is to go: the host on which it is must, or there were to be fewer while it was away."""
        host = self._books.hosts.seen.get(seat.host)
        return seat.here and (not seat.wanted or (host is not None and host.going))
