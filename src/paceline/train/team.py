"""Members that come and go, as one of them sees it: which group it works with now, and how the next one is formed.

Every collective of an elastic run is a pass (gradients are summed) or an operation (`do`: a metric, a checkpoint). Both
end alike: when one returns here, it was begun by everyone; so when the group breaks, members are at most one apart.

    a member is lost    → the scheduler numbers a new view; hearing of it closes the connections of the old one, which
                          ends whatever waits in them (`mend`)
    those of the view   → connect, tell each other how many steps they have committed and how many operations are done
                          (`_level`); who is behind is given the state, or the result, by one who is ahead
    a turn of the loop whose step was not committed counts for nothing: its batches are drawn again (`Replica`)
    one who has begun a turn less makes up for it with a turn that counts for nothing, since scripts count their turns

Newcomers are taken in between two steps: the scheduler announces a planned view, those who have heard of it say so with
their gradients, and all go there after the same step (`between`). They take their first turn while their state is on
its way, with gradients that weigh nothing, and apply the others' step to it when it is there (`Healing`). With fewer
members than the least, nobody begins a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from paceline.checkpoint import pack, unpack
from paceline.core.errors import Interrupted, PacelineError
from paceline.core.status import Status
from paceline.core.view import Member, View
from paceline.membership.line import Line
from paceline.train.body import Body, Healing
from paceline.train.handing import given, let_go, plain
from paceline.train.place import Change, Place
from paceline.transport.group import Group, solo
from paceline.transport.wires import Wires

T = TypeVar("T")
NEW = -1  # commits of one that has no state yet
_LANE = "heal"
_MOST_LAG = 1  # between members of one view; who was away for longer does not make up for it


class Team:
    """The members of an elastic run. `group` is that of the present view; a newcomer is alone until it is taken in."""

    def __init__(self, line: Line, wires: Wires, own: int, *, limit_s: float, status: Status) -> None:
        self.group = solo()
        self.view: View | None = None
        self.commits = 0
        self._formed = 0  # number of the view in which the last of them was
        self._away = False  # left out of a view since then
        self.operations = 0
        self.turns = 0  # of the loop that this member has begun
        self.lag = 0  # turns that it takes for nothing, to count as many as the others
        self._begins = False  # the turn that was counted last has not begun yet
        self._stepped = False
        self.drained = False  # this member was asked to leave, and does
        self.adrift = False  # left out of the view, it trains on by itself until it is taken in again
        self.changed: Callable[[Change], object] = lambda change: None
        self.body: Body | None = None
        self._line = line
        self._wires = wires
        self.own = own
        self._limit_s = limit_s
        self._status = status
        self._number = 0  # of the newest view that this member has acted on
        self._result: Any = None  # of the last operation
        self._late: set[int] = set()  # ids of those that the newest view leaves out because they are slow
        self._instead: set[int] = set()  # and of those in it that were lost and came back, or came for one that was
        line.on_view = lambda heard: None if heard.planned else wires.outdated(heard.view.number)

    # ---- from joining to training

    def meet(self) -> None:
        """Form the first group; where training has begun already, stay outside for now.

        Also where all who trained are lost: others who came while they lived prepare alone, and meet before their first
        batch; who prepares with others could not meet them there.
        """
        if self._line.standing.view is not None or self._line.standing.begun:
            self.commits = NEW
            return
        self._form_next(None)

    @property
    def seated(self) -> list[tuple[int, str]]:
        """Ids and hosts of the present group."""
        return [(m.id, m.host) for m in self.view.members] if self.view else []

    @property
    def left(self) -> tuple[int, ...]:
        """Ids of those that are not in the view, and were not lost."""
        return self._line.newest.left if self._line.newest else ()

    @property
    def outside(self) -> bool:
        return self.view is None

    def id_of(self, rank: int) -> int:
        """A member's number for life."""
        return self.view.members[rank].id if self.view else rank

    @property
    def me(self) -> tuple[int, str]:
        """This member's number for life, and its process."""
        return self.own, self._wires.name

    @property
    def expected(self) -> tuple[int, int]:
        """Rank and size; of a newcomer, those that it is likely to have."""
        if self.view is not None or self._line.standing.view is None:
            return self.group.rank, self.group.size
        return self._line.standing.view.size, self._line.standing.view.size + 1

    def begin(self, load: Callable[[], object]) -> bool:
        """All members stand before their first batch: everyone gets the state of the first one, which `load`s it.
        False: others had begun before."""
        if self.outside:
            self._line.ready(0)
            self._form_next(None)
        first = self.commits < 1
        while self.commits < 1:
            try:
                if self.group.rank == 0:
                    load()
                    self.commits = 1
                self._level(self.group, lend=False)
            except Interrupted as error:
                self.mend(error)
        return first

    # ---- while training

    def do(self, operation: Callable[[Group], T]) -> T:
        """Something that all members do together; done again by those who are left where one is lost in it."""
        if self.outside:
            return operation(self.group)
        while True:
            before, commits = self.operations, self.commits
            in_turn = self.body is not None and self.body.busy
            mine: list[T] = []  # the result, if this member has come to it
            try:
                if self.adrift:
                    raise Interrupted("this member was left out of the view")
                if self.body:
                    self.body.arrive()
                mine.append(operation(self.group))
                self.group.barrier()
            except Interrupted as error:
                self.mend(error)
                away = self.operations > before + 1 or self.commits != commits
                if away and not in_turn:
                    raise PacelineError(
                        f"member {self.own} was away while the others ended what it did with them, and went on: its "
                        "script stands where they are no more, so it ends, to be started again"
                    ) from None
                if mine and self.operations > before:  # it had ended elsewhere; what each gets of it may be its own
                    return mine[0]
                if away:  # the last result is that of something else, and the turn counts for nothing
                    return operation(solo())
                if self.operations > before:
                    return self._result  # type: ignore[no-any-return]
                continue
            (result,) = mine
            self.operations += 1
            self._result = result
            return result

    def committed(self, step: int) -> None:
        """This member has taken a step with the others; of its first, the scheduler hears."""
        self.commits += 1
        self._formed = self.view.number if self.view else 0
        if not self._stepped:
            self._stepped = True
            self._line.formed(self._number, step)

    @property
    def called(self) -> bool:
        """Whether this member has heard of a view that it is not in yet."""
        heard = self._line.newest
        return heard is not None and heard.view.number > self._number

    @property
    def urgent(self) -> bool:
        """Whether that view counts already: it was made because some are lost."""
        heard = self._line.newest
        return self.called and heard is not None and not heard.planned

    @property
    def awaited(self) -> bool:
        """Whether the others of a view that one that is adrift is to be in wait for it."""
        heard = self._line.newest
        if self._line.drained or heard is None or not self.called:
            return self._line.drained
        waits = not heard.planned or self._line.come >= heard.view.number  # the others are there, or on their way
        return waits and any(self._is_me(member) for member in heard.view.members)

    @property
    def leaving(self) -> bool:
        """Whether somebody is to leave, and waits for the end of what is under way."""
        heard = self._line.newest
        if self.view is None or heard is None or not (self.called and heard.planned):
            return False
        staying = {member.id for member in heard.view.members}
        return any(member.id not in staying for member in self.view.members)

    @property
    def sent_home(self) -> bool:
        """Whether all members are to leave."""
        heard = self._line.newest
        return self.called and heard is not None and not heard.view.members

    def turn(self) -> bool:
        """The loop begins its next turn; whether it is one that counts."""
        self.turns += 1
        if not self.lag:
            return True
        self.lag -= 1
        return False

    def between(self, *, moving: bool) -> None:
        """Between two steps; `moving`: all have agreed to go to the view that was announced."""
        self._begins = True
        if moving or (self.group.size == 1 and self.called):
            self._form_next(None)
        self.muster()
        self._begins = False

    def muster(self) -> None:
        """Wait until there are enough."""
        while self.group.size < self.least:
            self._status.set(f"waiting for members: {self.group.size} of at least {self.least}")
            self._form_next(None, short=True)

    def go(self) -> bool:
        """Members that train apart: go to the view that was heard of; False: this one is not in it, and trains on."""
        return self._form_next(None, linger=True)

    def here(self, round: int, quorum: int, grace_s: float) -> None:
        """This member has come to a round: once the quorum has, those who are late are left out of the view."""
        self._line.here(self._number, round, quorum, grace_s)

    def rejoin(self) -> None:
        """Adrift, with nothing left to train: wait to be taken in."""
        self._form_next(None)

    def settle(self) -> bool:
        """Between two steps: newcomers that have taken their first one are members like all others.

        Whatever the script does with its weights, they are to be equal: where they are not, the state is sent again,
        and False returned.
        """
        while self.body and (healed := self.body.healed):
            try:
                asked = self.group.rank == healed.source or self.group.rank in healed.idle
                told = self.group.exchange(self.body.digest() if asked else b"")
                if any(told[rank] != told[healed.source] for rank in healed.idle):
                    if self.group.rank in healed.idle:
                        self.commits = NEW
                    self._level(self.group, lend=False)
                    return False
                self.body.settled()
            except Interrupted as error:
                self.mend(error)
        return True

    def mend(self, error: Interrupted, *, linger: bool = False) -> None:
        """The group broke here: form that of the next view, and come level with the others. `linger`: not where this
        member is left out of it; then it trains on."""
        if not self.adrift:
            self._wires.leave()  # others who still wait in it are to notice too
            self._report(error)
        let_go(error)
        self._form_next(error, linger=linger)

    @property
    def least(self) -> int:
        """With fewer members nobody takes a step."""
        return self._line.standing.least

    def slow(self, id: int, why: str) -> None:
        """Ask the scheduler to let a member leave that holds the others up."""
        self._line.slow(id, why)

    def leave(self, reason: str) -> None:
        self._line.leave(reason)

    def close(self) -> None:
        self.group.close()
        self._wires.close()
        self._line.close()

    # ---- inside

    def _form_next(self, error: Interrupted | None, *, short: bool = False, linger: bool = False) -> bool:
        began, old, doing = time.monotonic(), self.view, self._status.what
        reason = str(error) if error else ""
        while True:
            found = self._next_view(linger)
            if found is None:
                self._status.set(doing)
                return False
            view, mine = found
            if self.body and self.body.apart:
                self._line.going(view.number)
            try:
                healed = self._form(view, mine)
                break
            except Interrupted as again:
                self._wires.leave()
                reason = reason or str(again)
                self._report(again)
                let_go(again)
        self._line.formed(view.number, self.body.step if self.body else 0)
        self._status.set(doing)
        before = {m.id for m in old.members} if old else set()
        now = {m.id for m in view.members}
        if old:
            self.changed(
                Change(
                    number=view.number,
                    size=view.size,
                    lost=tuple(sorted(before - now)),
                    late=tuple(sorted((before - now) & self._late)),
                    joined=tuple(sorted(now - before)),
                    healed=tuple(view.members[r].id for r in healed),
                    seconds=time.monotonic() - began,
                    reason=reason,
                    least=self.least,
                    left=tuple(sorted((before - now) & set(self.left))),
                    instead=tuple(sorted((now - before) & self._instead)),
                    short=short,
                )
            )
        return True

    def _next_view(self, linger: bool = False) -> tuple[View, Member] | None:
        """The next view that this member is in; where it was left out, it asks to be taken in again. `linger`: without
        waiting for that; None."""
        while True:
            try:
                heard = self._line.newer(self._number, self._limit_s)
            except Interrupted:
                self._go_if_drained()
                raise
            self._number = heard.view.number
            self._late, self._instead = set(heard.late), set(heard.instead)
            for member in heard.view.members:
                if self._is_me(member):
                    return heard.view, member
            self._go_if_drained()
            if self.commits == 0:
                raise PacelineError(
                    f"member {self.own} was left out of view {heard.view.number} while it prepared to train with the "
                    "others, who go on: it ends, to be started again"
                )
            self._away = True
            self._line.ready(heard.view.number)
            if linger:
                self._wires.leave()
                self.adrift = True
                return None
            self._status.set("left out of the view: asking to be taken in again")

    def _is_me(self, member: Member) -> bool:
        return (member.id, member.local) == self.me

    def _go_if_drained(self) -> None:
        if self._line.drained:
            self.drained = True
            raise SystemExit(0)

    def _form(self, view: View, mine: Member) -> list[int]:
        self.group.close()
        self.view = view
        self._wires.join(view, mine.rank, limit_s=self._limit_s, status=self._status)
        self.group = Group(self._wires, range(view.size))
        self.adrift = False
        return self._level(self.group)

    def _level(self, group: Group, *, lend: bool = True) -> list[int]:
        """Tell each other how far each is, and bring those who are behind up; their ranks."""
        body = self.body
        mine = Place(
            NEW if body and body.waits else self.commits,
            self.operations,
            self.turns,
            saving=bool(body and body.saving),
            easy=bool(lend and body and not body.busy),
            begins=self._begins,
            formed=self._formed,
            even=bool(body and body.even),
            away=self._away,
        )
        told = group.exchange(msgspec.msgpack.encode(mine))
        places = [msgspec.msgpack.decode(each, type=Place) for each in told]
        self._go_if_outdated(places)
        operations, begun = max(p.operations for p in places), max(p.begun for p in places)
        newest = max(p.state for p in places)
        behind = [rank for rank, p in enumerate(places) if p.state < newest]
        source = next(rank for rank, p in enumerate(places) if p.state == newest)
        if group.rank in behind or (behind and group.rank == source):
            self._status.set("healing" if group.rank in behind else f"healing members {', '.join(map(str, behind))}")
        healing: Healing | None = None
        together = body is None or not body.apart
        if together and behind and all(p.easy for p in places) and all(places[r].commits == NEW for r in behind):
            healing = Healing(source, tuple(behind))
        state = given(group, source, behind, lambda: self._state(healing))
        if healing and group.rank in behind:
            healing = healing._replace(pipe=self._wires.mesh.channel(source, _LANE))
        short = [r for r, p in enumerate(places) if p.operations < operations and p.commits != NEW]
        knows = next(rank for rank, p in enumerate(places) if p.operations == operations)
        result = given(group, knows, short, lambda: pack(plain(self._result)))
        if self.body:
            even = all(p.even for p in places if p.state == newest)
            self.body.regroup(group, state, healing, even=even)
            self.body.saving = any(p.saving for p in places if p.state == newest)
        if result is not None:
            self._result = unpack(memoryview(result))
        behind_by = begun - mine.begun
        makes_up = together and mine.commits != NEW and not mine.begins and behind_by <= _MOST_LAG
        self.lag = behind_by if makes_up else 0
        (self.commits, self._formed), self._away = newest, False
        self.operations, self.turns = operations, begun - self.lag + mine.begins
        return behind

    def _go_if_outdated(self, places: list[Place]) -> None:
        """Who was away and outlives all who went on without it has an old state, where they have saved a newer one."""
        old = self._away and all(p.away or p.commits == NEW for p in places)
        if old and any(p.commits == NEW for p in places) and self.body and self.body.outdated:
            raise PacelineError(
                f"member {self.own} was away while the others went on and were lost: a checkpoint is newer than what "
                "it has; it ends, to be started again from there"
            )

    def _state(self, healing: Healing | None) -> bytes:
        if self.body is None:
            return b""
        if healing is None:
            return self.body.state()
        return self.body.lend([self._wires.mesh.channel(rank, _LANE) for rank in healing.idle])

    def _report(self, error: Interrupted) -> None:
        blamed = -1
        if self.view and error.rank is not None and error.rank < self.view.size:
            blamed = self.view.members[error.rank].id
        self._line.broken(self._number, blamed, str(error))
