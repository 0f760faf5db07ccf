"""Who takes part in an elastic run: events in, orders out.

The rules of membership as a pure state machine: each event comes with the time at which it happened (`now`, of a clock
that never goes back), and `take` gives the orders that follow, each with a member's id or a host's name to go to. The
scheduler puts sockets, a clock and a journal around it. Only `tick` counts silence, so whoever is late in calling it
accuses nobody wrongly.

A member is lost when its process ends, when its host, its line or the process itself is silent for `silence_s`. The
view of the survivors follows at once; newcomers are taken in by planned views, at the end of a step. One that was lost
but lives (it was stopped, or cut off) is left out, and comes back as a newcomer does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.core.errors import ConfigError, Interrupted
from paceline.core.view import Member
from paceline.membership.books import FAILED, Books, Order, To
from paceline.membership.forming import Forming
from paceline.membership.messages import Refused
from paceline.membership.orders import Come, Drain, Ended, Here, Noted, Over, Picture, Seen, Standing, Start, Stop
from paceline.membership.quorum import Quorum
from paceline.membership.seating import Seating
from paceline.membership.seats import Rules, Seat, process_of
from paceline.membership.staff import STOPPED, Staff

_STALLED = 0.5  # of a silence without a tick: it was we who slept


class Roster:
    """The members of one run.

    >>> roster = Roster(Rules(least=1, target=1, most=2), now=0.0)
    >>> roster.arrive(0, Member(rank=0, host="h", pid=7), 0, now=0.1)
    >>> [type(order).__name__ for to, order in roster.take()]
    ['Standing', 'NewView']
    """

    def __init__(self, rules: Rules, now: float) -> None:
        self._books = Books(rules, now)
        self._forming = Forming(self._books)
        self._staff = Staff(self._books)
        self._quorum = Quorum(self._books, self._forming)
        self._seating = Seating(self._books, self._forming, self._staff)
        self._ticked = now

    @classmethod
    def load(cls, parts: Mapping[str, str], rules: Rules, now: float) -> Roster:
        """Go on from what `dump` gave, in a higher term."""
        roster = cls(rules, now)
        roster._books.load(parts, now)
        return roster

    def dump(self) -> dict[str, str]:
        """The whole state as JSON texts by name."""
        self._books.dirty = False
        return self._books.dump()

    @property
    def dirty(self) -> bool:
        """Whether anything has changed since the last dump."""
        return self._books.dirty

    @property
    def term(self) -> int:
        return self._books.run.term

    @property
    def over(self) -> str | None:
        """Why the run has ended; "": it finished; None: it has not."""
        return self._books.run.over

    def take(self) -> list[tuple[To, Order]]:
        """The orders since the last call."""
        out, self._books.out = self._books.out, []
        return out

    # Members

    def arrive(self, id: int, member: Member, view: int, now: float) -> None:
        """A member's line is open; ConfigError where nobody may sit there, Interrupted where it is too late."""
        books, run = self._books, self._books.run
        seat = self._checked(id)
        if run.over is not None:
            raise Refused(run.kind, run.over or "the run has finished").error()
        process = (member.host, member.pid)
        if seat.member is not None and (seat.member.host, seat.member.pid) == process:
            if seat.condemned or not (seat.here or seat.state == "lost"):
                raise Interrupted(f"member {id} has left the run")
        else:
            self._seating.sit_down(seat, member, view, now)
        books.watch[id].down, books.watch[id].unmet = None, False
        books.revive(seat, now)
        if view > run.number:
            # The journal lost its end: whatever was in that view, the next one has a higher number.
            run.number = view
            if run.view and not books.reports:
                books.reports[id], books.broken_at = -1, now
        rules, begun = books.rules, run.number > 0
        books.say(id, Standing(term=run.term, settings=rules.settings, least=rules.least, view=run.view, begun=begun))
        if run.view and view < run.number and (view or id in run.ids):
            books.show_view(id)
        if seat.draining:
            books.say(id, Drain(run.term))
        elif self._seating.going(seat):
            self._staff.drain(seat, now)
        if run.home and id in run.ids:
            books.send_home(id)
        self._forming.settle(now)

    def down(self, id: int, now: float) -> None:
        """A member's line has closed."""
        self._books.watch[id].down = now

    def ready(self, id: int, view: int, now: float) -> None:
        """A member can be taken in."""
        run, seat = self._books.run, self._books.seats[id]
        if id in run.ids and seat.state == "in":
            return
        if seat.here or seat.state == "lost":
            if not seat.ready:
                run.readies += 1
                seat.ready = run.readies
            if seat.here:
                self._books.turn(seat, "ready", now)
            self._books.revive(seat, now)
        self._forming.settle(now)

    def broken(self, id: int, view: int, blamed: int, now: float) -> None:
        """The group of a view broke at a member."""
        books, run = self._books, self._books.run
        about = (run.number, run.number - 1) if run.pending else (run.number,)
        if run.over is None and view in about and (id in run.ids or id in run.old):
            if not books.reports:
                books.broken_at = now
            books.reports[id] = blamed
            self._mend_when_due(now)
            self._forming.settle(now)

    def formed(self, id: int, view: int, now: float, step: int = 0) -> None:
        """All of a view have met; `step`: how many have been taken."""
        run = self._books.run
        if step and not run.stepped:
            run.stepped = self._books.dirty = True
        if run.over is None and view == run.number and id in run.ids and not run.formed:
            self._books.dirty = True
            self._forming.formed(now)
            self._forming.settle(now)

    def slow(self, id: int, why: str, now: float) -> None:
        """A member holds the others up, who ask that it leaves."""
        self._staff.shed(id, why, now)
        self._forming.settle(now)

    def here(self, id: int, here: Here, now: float) -> None:
        """A member has come to a round."""
        self._quorum.here(id, here, now)

    def going(self, id: int, view: int, now: float) -> None:
        """Members go to a planned view: who trains on meanwhile hears of it."""
        run = self._books.run
        if view == run.number and run.pending:
            for newcomer in run.ids:
                if newcomer not in run.old:
                    self._books.say(newcomer, Come(run.term, view))

    def leave(self, id: int, reason: str, now: float) -> None:
        """A member goes: finished, drained, failed, or left: its script has ended before the run did, as it seems well;
        what its process ends with says so for certain."""
        books, seat = self._books, self._books.seats[id]
        if seat.here or seat.state == "lost":
            if reason == "finished" and seat.here:
                books.turn(seat, "finished", now)
                seat.why = ""
            elif seat.draining or books.run.over is not None:
                books.turn(seat, "drained", now)
            elif reason == "left":
                books.part(seat, now)
            else:
                books.lose(seat, FAILED, now)
            if seat.state != "finished":  # nothing more can come from this process
                seat.member, seat.past = None, [*seat.past, *process_of(seat)]
        books.say(id, Noted(books.run.term))
        self._forming.settle(now)

    # Agents

    def host(
        self,
        name: str,
        slots: int,
        running: Sequence[int],
        now: float,
        agent: str = "",
        ended: Sequence[Ended] = (),
    ) -> None:
        """A host's agent has come, or come back; `agent`: which one, where there may be another of this name; `ended`:
        how processes did that have ended since it came first."""
        books, run = self._books, self._books.run
        books.dirty = True
        host = books.hosts.came(name, slots, now, agent)
        host.going = host.going or run.stopping
        if run.over is not None:
            books.say(name, Over(run.term, run.over))
            return
        how = {e.id: e for e in ended}
        for id in [i for i in host.running if i not in running]:
            seat = books.seats[id]
            if seat.host == name and seat.state == "starting":
                books.say(name, Start(run.term, id))
            elif id in how:
                self._take_end(name, how[id], now)
            else:
                self._seating.ended(name, id, "ended while its agent could not say so", None, now)
        for id in running:
            known = books.seats.get(id)
            if known is not None and id not in host.running:
                host.running.append(id)
                if known.wanted and known.state == "idle":
                    known.host = name
                    books.turn(known, "starting", now)
                    books.watch[id].start_by = now + books.rules.settings.join_limit_s
                elif known.here and not known.host:
                    known.host = name
            if known is None or known.state == "idle":
                books.say(name, Stop(run.term, id))
        self._seating.back(name, now)
        self.tick(now)

    def beat(self, name: str, paused: Sequence[int], now: float) -> None:
        """A host lives; the processes of `paused` are stopped."""
        books = self._books
        if name not in books.hosts.seen:
            return
        for id in books.hosts.seen[name].running:
            seat = books.seats.get(id)
            if seat is None or seat.host != name:
                continue
            watch = books.watch[id]
            was, watch.paused = watch.paused, (watch.paused or now) if id in paused else None
            if was is not None and watch.paused is None and seat.state == "lost":
                self._seating.revive(seat, now)
                self._forming.settle(now)
        if books.hosts.heard(name, now):
            self._seating.back(name, now)

    def started(self, name: str, id: int, pid: int, now: float) -> None:
        """A member's process runs."""
        seat = self._books.seats.get(id)
        if seat is not None and seat.host == name:
            seat.pid, self._books.dirty = pid, True

    def ended(self, name: str, id: int, code: int, now: float, error: str = "") -> None:
        """A member's process has ended; `error`: by what, if that would come again."""
        self._take_end(name, Ended(id, code, error), now)
        self._forming.settle(now)
        self.tick(now)

    def _take_end(self, name: str, end: Ended, now: float) -> None:
        how = f"was killed by signal {-end.code}" if end.code < 0 else f"ended with code {end.code}"
        self._seating.ended(name, end.id, how, end.code, now)
        if end.id in self._books.seats and self._books.seats[end.id].host == name:
            self._staff.ended(self._books.seats[end.id], end.code, end.error)

    def drain_host(self, name: str, now: float) -> None:
        """A host must go: its members leave, and are started elsewhere if there is room."""
        books = self._books
        if name not in books.hosts.seen or books.run.over is not None:
            return
        self._drain([name], now)

    def end_run(self, drain: bool, now: float) -> None:
        """The run is to end on all hosts: at once, or when all members have left."""
        books = self._books
        if books.run.over is not None:
            return
        if not drain:
            books.end("left", STOPPED)
            return
        books.run.stopping = True
        self._drain(list(books.hosts.seen), now)
        self.tick(now)

    def _drain(self, names: Sequence[str], now: float) -> None:
        """All of these at once: of some there would be a view of the others first, who could not save with them."""
        books = self._books
        for name in names:
            books.hosts.seen[name].going = books.dirty = True
        for seat in books.seats.values():
            if seat.host in names:
                self._staff.drain(seat, now)
        self._forming.settle(now)

    def live(self, name: str) -> bool:
        """Whether a host is heard."""
        return self._books.hosts.live(name)

    # Tools and time

    def scale(self, size: int, now: float) -> str:
        """Let there be so many members; what will be done about it."""
        text = self._staff.scale(size, now)
        self.tick(now)
        return text

    def look(self, now: float, wall: float) -> Picture:
        """The run, for people; `wall` is the time of day at `now`."""
        books, run = self._books, self._books.run
        return Picture(
            term=run.term,
            view=run.view,
            least=books.rules.least,
            target=run.target,
            most=books.rules.most,
            hosts=books.hosts.sites(),
            over=run.over,
            members=tuple(
                Seen(
                    id=seat.id,
                    host=seat.host or (seat.member.host if seat.member else ""),
                    pid=seat.pid,
                    state=self._state(seat),
                    since=wall - (now - seat.since),
                    replaced=seat.replaced,
                    why=seat.why,
                    again_at=self._again_at(seat, now, wall),
                    unsure=seat.state == "lost" and self._unsure(seat),
                )
                for seat in books.seats.values()
                if seat.wanted or seat.state != "idle"
            ),
        )

    def tick(self, now: float) -> None:
        """Time has passed."""
        books, silence_s = self._books, self._books.rules.silence_s
        if now - self._ticked > _STALLED * silence_s:
            self._forgive(now)
        self._ticked = now
        if books.run.over is not None:
            return
        for name in books.hosts.silenced(now):
            for seat in books.seats.values():
                if seat.host == name and (seat.here or seat.state == "starting"):
                    books.lose(
                        seat, f"was not heard: its host {name} was silent for {silence_s:g} s", now, host_fault=False
                    )
                elif seat.host == name and seat.state == "drained" and seat.wanted:
                    books.turn(seat, "idle", now)  # its end was not told, and will not be
        for seat in books.seats.values():
            watch = books.watch[seat.id]
            if seat.here and watch.paused is not None and now - watch.paused >= silence_s:
                books.lose(seat, f"was stopped for {silence_s:g} s", now)
            elif seat.here and watch.down is not None and now - watch.down >= silence_s:
                books.lose(seat, f"was not heard: its line was closed for {silence_s:g} s", now)
        self._mend_when_due(now)
        self._quorum.look(now)
        self._forming.settle(now)
        if books.run.over is None:
            self._staff.turn(now)
            self._forming.settle(now)

    # Inside

    def _state(self, seat: Seat) -> str:
        if seat.parting and self._books.hosts.runs(seat.host, seat.id):
            return "leaving"
        return "draining" if seat.draining and seat.here else seat.state

    def _unsure(self, seat: Seat) -> bool:
        """Whether how it ends, or how the others do that begin with it, may end the run."""
        failing = seat.why == FAILED and self._books.hosts.runs(seat.host, seat.id)
        return failing or (seat.vain and not self._books.run.stepped)

    def _again_at(self, seat: Seat, now: float, wall: float) -> float:
        if seat.state != "lost" or not seat.wanted:
            return 0.0
        watch = self._books.watch[seat.id]
        runs = watch.stop_at is not None and self._books.hosts.runs(seat.host, seat.id)  # and is ended first
        return wall + max(watch.start_at, watch.stop_at if runs and watch.stop_at else 0.0) - now

    def _checked(self, id: int) -> Seat:
        most = self._books.rules.most
        if id not in self._books.seats:
            raise ConfigError(f"id {id} is not one of 0 to {most - 1}: do not set PACELINE_RANK by hand")
        return self._books.seats[id]

    def _mend_when_due(self, now: float) -> None:
        books, run = self._books, self._books.run
        if not books.reports or not run.view:
            return
        base = run.old if run.pending else run.ids
        all_said = all(i in books.reports for i in base if books.seats[i].here)
        if all_said or now - books.broken_at >= books.rules.silence_s:
            self._forming.mend(now)

    def _forgive(self, now: float) -> None:
        """We did not listen for a while: what we missed is nobody's fault."""
        books = self._books
        books.hosts.grace(now)
        books.broken_at = now  # whom they blame may have said so too
        for watch in books.watch.values():
            watch.down = now if watch.down is not None else None
            watch.paused = now if watch.paused is not None else None
