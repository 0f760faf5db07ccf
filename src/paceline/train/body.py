"""What a team asks of what its members are to have alike (`replica`), when views change and newcomers come."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from paceline.checkpoint import Pipe
from paceline.transport.group import Group


class Healing(NamedTuple):
    """Newcomers get the state while the others train on; until then their part in a step weighs nothing."""

    source: int  # rank
    idle: tuple[int, ...]  # ranks of the newcomers
    pipe: Pipe | None = None  # of a newcomer: where its state comes from


class Body(Protocol):
    """What is to be kept the same on all members."""

    saving: bool  # all have agreed to save between these two steps
    apart: bool  # members take steps of their own, and commit rounds of them

    @property
    def even(self) -> bool:
        """Whether this member has drawn nothing since the last commit."""

    @property
    def step(self) -> int: ...

    @property
    def busy(self) -> bool:
        """Whether this member is in the middle of a turn."""

    @property
    def outdated(self) -> bool:
        """Whether a checkpoint is further than this member."""

    @property
    def waits(self) -> bool:
        """Whether this member's state is still on its way to it."""

    @property
    def healed(self) -> Healing | None:
        """Newcomers that have taken their first step with the others."""

    def state(self) -> bytes:
        """All of it, as of the last commit."""

    def lend(self, pipes: list[Pipe]) -> bytes:
        """What a newcomer needs at once; the rest is sent while this member goes on."""

    def regroup(self, group: Group, state: bytes | None, healing: Healing | None = None, *, even: bool = False) -> None:
        """Go on with another group, from this state or, None, from what is here; `even`: nobody in it has drawn
        anything since the last commit."""

    def arrive(self) -> None:
        """Wait for what is still on its way to this member."""

    def digest(self) -> bytes:
        """Equal where the state is."""

    def settled(self) -> None:
        """All members are equal, and weigh the same from now on."""
