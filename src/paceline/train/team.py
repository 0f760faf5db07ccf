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

import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import torch

from paceline.checkpoint import pack, unpack
from paceline.core.errors import Interrupted, PacelineError
from paceline.core.status import Status
from paceline.core.view import Member, View
from paceline.membership.line import Line
from paceline.train.body import Body, Healing
from paceline.transport.group import Group, solo
from paceline.transport.wires import Wires

T = TypeVar("T")
NEW = -1  # commits of one that has no state yet
_LANE = "heal"
_MOST_LAG = 1  # between members of one view; who was away for longer does not make up for it


class Place(msgspec.Struct, frozen=True):
    """How far a member has come."""

    commits: int
    operations: int
    turns: int  # of the loop that it has begun
    saving: bool = False  # after its last commit a checkpoint is due
    easy: bool = False  # it stands between two turns
    begins: bool = False  # it has counted the turn that it is about to begin
    formed: int = 0  # number of the view in which its last commit was
    away: bool = False  # others have gone on without it since then

    @property
    def begun(self) -> int:
        """Turns that it has really begun."""
        return self.turns - self.begins

    @property
    def state(self) -> tuple[int, int]:
        """Whoever has the greater one has what counts.

        Members that go on without one may take the step that it took when it was left out already, without knowing it:
        two of one number, and that of the newer view counts.
        """
        return self.commits, self.formed


class Change(msgspec.Struct, frozen=True):
    """What a new view brought, for those who watch."""

    number: int
    size: int
    lost: tuple[int, ...]  # ids of those that are gone
    joined: tuple[int, ...]
    healed: tuple[int, ...]  # ids of those that were given the state
    seconds: float
    reason: str
    least: int = 1  # with fewer members nobody takes a step
    left: tuple[int, ...] = ()  # of these, who were not lost: they were asked to go, or went
    short: bool = False  # there were too few before, and they waited for this view

    @property
    def text(self) -> str:
        """
        >>> Change(number=3, size=3, lost=(1,), joined=(), healed=(), seconds=0.21, reason="").text
        'member 1 is gone, 3 members go on (after 0.2 s)'
        >>> Change(number=3, size=1, lost=(1,), joined=(), healed=(), seconds=0.21, reason="", least=2).text
        'member 1 is gone, 1 member is left and waits: at least 2 are needed (after 0.2 s)'
        """
        what = [f"{_members(self.lost)} gone"] if self.lost else []
        what += [f"{_members(self.joined)} here"] if self.joined else []
        one = self.size == 1
        on = f"{'1 member goes' if one else f'{self.size} members go'} on"
        if self.size < self.least:
            are = "1 member is left and waits" if one else f"{self.size} members are left and wait"
            on = f"{are}: at least {self.least} are needed"
        return ", ".join([*(what or ["the connections were made anew"]), f"{on} (after {self.seconds:.1f} s)"])


def _members(ids: tuple[int, ...]) -> str:
    one = len(ids) == 1
    return ("member " if one else "members ") + ", ".join(map(str, ids)) + (" is" if one else " are")


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
        self.changed: Callable[[Change], object] = lambda change: None
        self.body: Body | None = None
        self._line = line
        self._wires = wires
        self.own = own
        self._limit_s = limit_s
        self._status = status
        self._number = 0  # of the newest view that this member has acted on
        self._result: Any = None  # of the last operation
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
    def expected(self) -> tuple[int, int]:
        """Rank and size; of a newcomer, those that it is likely to have."""
        if self.view is not None or self._line.standing.view is None:
            return self.group.rank, self.group.size
        return self._line.standing.view.size, self._line.standing.view.size + 1

    def begin(self, load: Callable[[], object]) -> None:
        """All members stand before their first batch: everyone gets the state of the first one, which `load`s it."""
        if self.outside:
            self._line.ready(0)
            self._form_next(None)
        while self.commits < 1:
            try:
                if self.group.rank == 0:
                    load()
                    self.commits = 1
                self._level(self.group, lend=False)
            except Interrupted as error:
                self.mend(error)

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
        while self.group.size < self.least:
            self._status.set(f"waiting for members: {self.group.size} of at least {self.least}")
            self._form_next(None, short=True)
        self._begins = False

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

    def mend(self, error: Interrupted) -> None:
        """The group broke here: form that of the next view, and come level with the others."""
        self._wires.leave()  # others who still wait in it are to notice too
        self._report(error)
        _let_go(error)
        self._form_next(error)

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

    def _form_next(self, error: Interrupted | None, *, short: bool = False) -> None:
        began, old, doing = time.monotonic(), self.view, self._status.what
        reason = str(error) if error else ""
        while True:
            view, mine = self._next_view()
            try:
                healed = self._form(view, mine)
                break
            except Interrupted as again:
                self._wires.leave()
                reason = reason or str(again)
                self._report(again)
                _let_go(again)
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
                    joined=tuple(sorted(now - before)),
                    healed=tuple(view.members[r].id for r in healed),
                    seconds=time.monotonic() - began,
                    reason=reason,
                    least=self.least,
                    left=tuple(sorted((before - now) & set(self.left))),
                    short=short,
                )
            )

    def _next_view(self) -> tuple[View, Member]:
        """The next view that this member is in; where it was left out, it asks to be taken in again."""
        while True:
            try:
                heard = self._line.newer(self._number, self._limit_s)
            except Interrupted:
                self._go_if_drained()
                raise
            self._number = heard.view.number
            for member in heard.view.members:
                if member.id == self.own and member.pid == os.getpid():
                    return heard.view, member
            self._go_if_drained()
            if self.commits == 0:
                raise PacelineError(
                    f"member {self.own} was left out of view {heard.view.number} while it prepared to train with the "
                    "others, who go on: it ends, to be started again"
                )
            self._away = True
            self._status.set("left out of the view: asking to be taken in again")
            self._line.ready(heard.view.number)

    def _go_if_drained(self) -> None:
        if self._line.drained:
            self.drained = True
            raise SystemExit(0)

    def _form(self, view: View, mine: Member) -> list[int]:
        self.group.close()
        self.view = view
        self._wires.join(view, mine.rank, limit_s=self._limit_s, status=self._status)
        self.group = Group(self._wires, range(view.size))
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
        if behind and all(p.easy for p in places) and all(places[r].commits == NEW for r in behind):
            healing = Healing(source, tuple(behind))
        state = _given(group, source, behind, lambda: self._state(healing))
        if healing and group.rank in behind:
            healing = healing._replace(pipe=self._wires.mesh.channel(source, _LANE))
        short = [r for r, p in enumerate(places) if p.operations < operations and p.commits != NEW]
        knows = next(rank for rank, p in enumerate(places) if p.operations == operations)
        result = _given(group, knows, short, lambda: pack(_plain(self._result)))
        if self.body:
            self.body.regroup(group, state, healing)
            self.body.saving = any(p.saving for p in places if p.state == newest)
        if result is not None:
            self._result = unpack(memoryview(result))
        behind_by = begun - mine.begun
        makes_up = mine.commits != NEW and not mine.begins and behind_by <= _MOST_LAG
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


def _let_go(error: BaseException) -> None:
    """Forget where an error came from: its frames hold the group that broke, with all of its shared memory, and are
    held by each other until Python looks for cycles."""
    seen: BaseException | None = error
    while seen is not None:
        seen.__traceback__ = None
        seen = seen.__context__


def _given(group: Group, source: int, to: list[int], make: Callable[[], bytes]) -> bytes | None:
    """Bytes from one member to some; None where there is nothing to get."""
    if len(to) == group.size - 1 and to:  # all others
        mine = make() if group.rank == source else b""
        length = torch.tensor([len(mine)])
        group.broadcast(length, source)
        flat = _flat(mine) if mine else torch.zeros(int(length), dtype=torch.uint8)
        group.broadcast(flat, source)
        return None if group.rank == source else flat.numpy().tobytes()
    if group.rank == source and to:
        flat = _flat(make())
        for rank in to:
            group.send(flat, rank)
    return group.recv(source).numpy().tobytes() if group.rank in to else None


def _flat(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _plain(result: Any) -> Any:
    """A result that can be handed on; what is of one member alone cannot."""
    try:
        pack(result)
    except PacelineError:
        return None
    return result
