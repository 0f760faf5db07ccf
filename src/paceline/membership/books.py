"""The books of an elastic run: what its scheduler knows, and the orders that are still to go out.

`roster` takes events in and keeps these; `forming` decides about views from them, `staff` about who is started and
ended. All of it is pure: no sockets, no threads, no clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import msgspec

from paceline.core.errors import ConfigError
from paceline.core.view import View
from paceline.membership.hosts import Hosts
from paceline.membership.messages import Refused
from paceline.membership.orders import Come, Drain, NewView, Noted, Over, Standing, Start, Stop
from paceline.membership.seats import HostSeen, Rules, Run, Seat, Watch

To: TypeAlias = int | str  # a member's id, or a host's name
Order: TypeAlias = Standing | NewView | Come | Drain | Noted | Refused | Start | Stop | Over

LEFT = "left: its script ended before the run did"  # why a seat is empty
FAILED = "left: failed"  # its process has not ended yet; how it does says more
_PATIENCE = 3  # silences between a loss and the end of a process that still runs: it may come back
_BACK_OFF_S, _BACK_OFF_MOST_S = 0.5, 30.0


def back_off_s(fails: int) -> float:
    """The pause before a member is started again, after so many losses in a row that led nowhere."""
    return min(_BACK_OFF_MOST_S, _BACK_OFF_S * (1 << min(fails, 16)))


class Books:
    """State that the parts of a roster share."""

    def __init__(self, rules: Rules, now: float) -> None:
        self.rules = rules
        self.run = Run(target=rules.target)
        self.seats = {i: Seat(id=i, since=now, wanted=i < rules.target) for i in range(rules.most)}
        self.watch = {i: Watch() for i in self.seats}
        self.hosts = Hosts(rules.silence_s)
        self.reports: dict[int, int] = {}  # who said that the present view broke, and whom it blamed
        self.broken_at = 0.0  # when the first of them said so
        self.out: list[tuple[To, Order]] = []
        self.dirty = True

    def dump(self) -> dict[str, str]:
        """All that must outlive this scheduler, as JSON by name."""
        parts: dict[str, object] = {"run": self.run}
        parts |= {f"seat {i}": seat for i, seat in self.seats.items()}
        parts |= {f"host {name}": host for name, host in self.hosts.seen.items()}
        return {name: msgspec.json.encode(part).decode() for name, part in parts.items()}

    def load(self, parts: Mapping[str, str], now: float) -> None:
        """Go on where another scheduler stopped, in a higher term; everybody gets time to come back."""
        try:
            self.run = msgspec.json.decode(parts["run"], type=Run)
            seats = [msgspec.json.decode(v, type=Seat) for k, v in parts.items() if k.startswith("seat ")]
            hosts = [msgspec.json.decode(v, type=HostSeen) for k, v in parts.items() if k.startswith("host ")]
        except (KeyError, msgspec.DecodeError) as error:
            raise ConfigError(f"the journal is of another version, or altered: {error}; start a new run") from None
        self.run.term += 1
        self.seats.update({seat.id: seat for seat in seats})
        self.watch = {i: Watch() for i in self.seats}
        self.hosts = Hosts(self.rules.silence_s, hosts, now)
        for seat in self.seats.values():
            seat.since = min(seat.since, now)
            watch = self.watch[seat.id]
            watch.down, watch.unmet = now, True  # until it dials again
            if seat.state == "starting":
                watch.start_by = now + self.rules.settings.join_limit_s
            elif seat.state == "lost":
                watch.start_at = now + back_off_s(seat.fails)
            if seat.state == "lost" or seat.condemned:
                watch.stop_at = now + self.patience_s
            elif seat.draining:
                watch.stop_at = now + self.rules.settings.wait_limit_s

    @property
    def patience_s(self) -> float:
        return _PATIENCE * self.rules.silence_s

    def say(self, to: To, order: Order) -> None:
        self.dirty = True
        self.out.append((to, order))

    def show_view(self, id: int) -> None:
        """Tell a member of the present view."""
        run = self.run
        assert run.view is not None
        left = tuple(seat.id for seat in self.seats.values() if seat.left and seat.id not in run.ids)
        instead = tuple(i for i in run.ids if self.seats[i].instead)
        order = NewView(term=run.term, view=run.view, planned=run.planned, left=left, late=run.late, instead=instead)
        self.say(id, order)

    def send_home(self, id: int) -> None:
        """Tell a member of the view that nobody stays in it: a planned view of nobody."""
        self.say(id, NewView(term=self.run.term, view=View(number=self.run.number, members=()), planned=True))

    def turn(self, seat: Seat, state: str, now: float) -> None:
        """Let a seat be in another state."""
        self.dirty = True
        if seat.state != state:
            seat.state, seat.since = state, now

    @property
    def short(self) -> bool:
        """Whether there is a seat too few in which somebody should sit."""
        return sum(seat.wanted for seat in self.seats.values()) < self.run.target

    def able(self, seat: Seat) -> bool:
        """Whether it could take part in a view at once."""
        return seat.here and self._reachable(seat)

    def _reachable(self, seat: Seat) -> bool:
        watch = self.watch[seat.id]
        heard = not seat.host or seat.host not in self.hosts.seen or self.hosts.live(seat.host)
        return heard and watch.down is None and watch.paused is None and not seat.condemned

    def lose(self, seat: Seat, why: str, now: float, *, ended: bool = False, host_fault: bool = True) -> None:
        """A member is lost; `ended`: its process is gone for certain."""
        watch = self.watch[seat.id]
        if seat.draining and not seat.wanted:  # it was to go anyway
            self.turn(seat, "drained", now)
        else:
            self.turn(seat, "lost", now)
            if host_fault:
                self.hosts.lost(seat.host, now)
            if seat.wanted and seat.replaced >= self.rules.replacements:
                seat.wanted = False
            watch.start_at = now + back_off_s(seat.fails)
            seat.fails += 1
        seat.why = why  # its Ready stands, should it come back
        seat.draining = seat.draining and not seat.wanted
        watch.start_by = None
        watch.stop_at = None if ended else now + self.patience_s
        if ended:
            seat.member, seat.ready, seat.condemned, watch.paused = None, 0, False, None

    def part(self, seat: Seat, now: float) -> None:
        """A member's script has ended before the run did: it has left, and nobody is started in its place."""
        seat.parting, seat.wanted, seat.why = True, False, LEFT
        self.turn(seat, "drained", now)
        self.watch[seat.id].start_by = self.watch[seat.id].stop_at = None

    def revive(self, seat: Seat, now: float) -> None:
        """One that was lost is there again, in the same process: it is taken in once it is ready, if it is wanted."""
        if seat.state == "lost" and seat.member is not None and self._reachable(seat):
            self.turn(seat, "ready" if seat.ready else "arrived", now)
            seat.wanted, seat.instead = seat.wanted or self.short, True
            self.watch[seat.id].stop_at = None

    def condemn(self, seat: Seat, why: str, now: float) -> None:
        """Lose a member, and have its process ended at once."""
        self.lose(seat, why, now)
        seat.condemned, self.watch[seat.id].stop_at = True, now

    def end(self, kind: str, reason: str) -> None:
        """The run is over; `reason` "": it has finished."""
        self.run.over, self.run.kind = reason, kind
        for seat in self.seats.values():
            alive = seat.member is not None and seat.state not in ("finished", "drained")  # lost ones may still hear
            if alive and reason:
                self.say(seat.id, Refused(kind, reason))
            elif alive or seat.state == "starting":  # came too late to take part
                self.say(seat.id, Drain(self.run.term))
                if seat.host in self.hosts.seen:
                    self.say(seat.host, Stop(self.run.term, seat.id))
        for name in self.hosts.seen:
            self.say(name, Over(self.run.term, reason))
