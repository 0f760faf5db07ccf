"""What a scheduler keeps of a run: its rules, the seats of its members, its hosts, and the present view.

A seat is a member's number for life: who sits there may be lost and replaced. These are plain data, and whole they go
into the journal. `Watch` is what is only known since this scheduler started; a restarted one begins it anew.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from paceline.core.errors import ConfigError
from paceline.core.settings import Settings
from paceline.core.view import Member, View

_HERE = ("arrived", "ready", "in")


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """What does not change while a run lasts.

    >>> Rules(least=1, target=2, most=4).silence_s
    3.0
    """

    least: int  # with fewer members nobody takes a step
    target: int  # how many to begin with
    most: int
    settings: Settings = Settings()
    silence_s: float = 3.0  # after which one who is silent, stopped or cut off counts as lost
    replacements: int = 3  # how often the member of one seat is started again
    open: bool = False  # other hosts may join: without a slot, one is waited for
    begin: int = 0  # so many are enough to begin with, without waiting for the others; 0: the target

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.target <= self.most:
            raise ConfigError(
                f"least={self.least}, target={self.target}, most={self.most}: must be 1 <= least <= target <= most"
            )
        if self.begin and not self.least <= self.begin <= self.target:
            raise ConfigError(f"begin={self.begin}: must be between least={self.least} and target={self.target}, or 0")
        if self.silence_s <= 0:
            raise ConfigError(f"silence_s={self.silence_s}: must be more than 0 seconds")
        if self.replacements < 0:
            raise ConfigError(f"replacements={self.replacements}: must be 0 or more")


class Seat(msgspec.Struct, kw_only=True):
    """One id, and who sits there.

    State: idle (never started, or to be started again), starting, arrived, ready (waits to be taken in), in (the
    present view), lost, finished, drained.
    """

    id: int
    state: str = "idle"
    since: float = 0.0
    wanted: bool = False  # somebody should sit here
    host: str = ""  # whose agent runs it; "": nobody's
    pid: int = 0
    member: Member | None = None  # as it arrived; None when its process has ended
    draining: bool = False
    condemned: bool = False  # its process is to be ended by its agent
    ready: int = 0  # its place among those who wait to be taken in
    held: int = 0  # number of the last view that this process was in
    replaced: int = 0
    fails: int = 0  # losses in a row without a view that was formed
    why: str = ""  # how it was lost last
    parting: bool = False  # its script has ended before the run did; well, unless its process says otherwise
    instead: bool = False  # who sits here was lost and came back, or came in the place of one that was
    vain: bool = False  # a process ended here by itself, and not well, before the run had taken a step
    past: list[tuple[str, int]] = []  # host and pid of those that were replaced

    @property
    def here(self) -> bool:
        return self.state in _HERE

    @property
    def left(self) -> bool:
        """Whether who sat here last was not lost, but has gone or is to go."""
        again = self.state == "starting" and not self.why
        return self.draining or self.state in ("idle", "drained") or again


class HostSeen(msgspec.Struct, kw_only=True):
    """A host as its agent told of it."""

    name: str
    slots: int
    running: list[int] = []  # ids whose process has been ordered and has not ended
    lost: int = 0
    quarantined: bool = False
    going: bool = False  # it drains
    agent: str = ""  # which process speaks for it

    @property
    def usable(self) -> bool:
        return not self.quarantined and not self.going


class Run(msgspec.Struct, kw_only=True):
    """The present view and what stands around it."""

    term: int = 1
    target: int
    number: int = 0  # of the newest view; never used again
    view: View | None = None  # None: nobody has state
    planned: bool = False
    formed: bool = False
    old: tuple[int, ...] = ()  # of the view before, while a planned one is not formed
    repeats: int = 0  # views of the same members in a row, none of which was formed
    blames: dict[int, int] = {}  # in these
    late: tuple[int, ...] = ()  # ids of those that the view leaves out because they did not come to a round in time
    readies: int = 0  # counts those who said Ready
    home: bool = False  # all of the view are to leave, after a step that they agree on
    stopping: bool = False  # all members are to leave
    stepped: bool = False  # a step was taken
    over: str | None = None  # why the run has ended; "": it finished
    kind: str = ""  # of the refusal that members get

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(m.id for m in self.view.members) if self.view else ()

    @property
    def pending(self) -> bool:
        """Whether the members are still to move to a planned view."""
        return self.planned and not self.formed


@dataclass
class Watch:
    """What is timed about a seat."""

    down: float | None = None  # since when its line is closed
    unmet: bool = False  # its process is known from the journal only, which may be old
    paused: float | None = None  # since when its process is stopped
    start_at: float = 0.0  # not before
    start_by: float | None = None  # when it must have arrived
    stop_at: float | None = None  # when its process will be ended if it still runs
    faults: list[float] = field(default_factory=list)  # when it was left out of a view


def process_of(seat: Seat) -> list[tuple[str, int]]:
    """Host and pid of who sits there, if somebody does."""
    return [(seat.member.host, seat.member.pid)] if seat.member else []
