"""How far a member of an elastic run has come, and what a new view brought: what a team tells, and is told."""

from __future__ import annotations

import msgspec


class Place(msgspec.Struct, frozen=True):
    """How far a member has come."""

    commits: int
    operations: int
    turns: int  # of the loop that it has begun
    saving: bool = False  # after its last commit a checkpoint is due
    easy: bool = False  # it stands between two turns
    begins: bool = False  # it has counted the turn that it is about to begin
    formed: int = 0  # number of the view in which its last commit was
    even: bool = False  # it has drawn nothing since then
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
    late: tuple[int, ...] = ()  # of `lost`, those that live, but did not come to a round in time
    instead: tuple[int, ...] = ()  # of `joined`, those that were lost and came back, or came in a lost one's place

    @property
    def text(self) -> str:
        """
        >>> Change(number=3, size=3, lost=(1,), joined=(), healed=(), seconds=0.21, reason="").text
        'member 1 is gone, 3 members go on (after 0.2 s)'
        >>> Change(number=3, size=1, lost=(1,), joined=(), healed=(), seconds=0.21, reason="", least=2).text
        'member 1 is gone, 1 member is left and waits: at least 2 are needed (after 0.2 s)'
        """
        gone = tuple(id for id in self.lost if id not in self.late)
        what = [f"{_members(gone)} gone"] if gone else []
        what += [f"{_members(self.late)} late for a round"] if self.late else []
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
