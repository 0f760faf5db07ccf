"""In which order members of a pipeline compute: forward, backward, or backward in halves, of a micro-batch in a stage.

    gpipe        all forward, then all backward: the bubble is (S-1)/(M+S-1) of a step of S members, M micro-batches
    1f1b         one forward, one backward in turn: the same bubble, with activations of at most S micro-batches
    interleaved  each member has v stages: (S-1)/(vM+S-1), and more messages
    zero-bubble  gradients of weights are computed where a member would wait: (S-1)/(3M+S-1) where all three parts take
                 equally long, with the memory of 1f1b (ZB-H1)

Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters"; Qi et al. 2023, "Zero bubble
pipeline parallelism".

>>> [str(a) for a in orders("1f1b", 2, 3)[0]]
['F0.0', 'F0.1', 'B0.0', 'F0.2', 'B0.1', 'B0.2']
>>> [str(a) for a in orders("zero-bubble", 2, 2)[1]]
['F1.0', 'I1.0', 'F1.1', 'I1.1', 'W1.0', 'W1.1']
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from paceline.core.errors import ConfigError, nearest

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")


class Action(NamedTuple):
    """What a member computes: F forward, B backward, or I what earlier stages need of it and W what weights need."""

    kind: str
    stage: int
    micro: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.micro}"


class Staging(NamedTuple):
    """How a model is to be cut into stages; see `Run.model`."""

    cut: Sequence[str] = ()
    like: Any = None
    micro: int = 0
    schedule: str = "1f1b"
    whole: Sequence[str] | None = None  # inputs that have no samples in their rows; None: nobody has said
    limit_s: float = 300.0  # that a message may be late
    tell: Callable[[str], object] = lambda line: None  # to the person who watches

    def check(self) -> None:
        check_schedule(self.schedule)
        if not isinstance(self.micro, int) or self.micro < 0:
            raise ConfigError(f"run.model(micro={self.micro!r}): a number of micro-batches, or 0 for four per stage")
        if isinstance(self.cut, str):
            raise ConfigError(f"run.model(cut={self.cut!r}): a list of names is wanted: cut=[{self.cut!r}]")
        if isinstance(self.whole, str):
            raise ConfigError(f"run.model(whole={self.whole!r}): a list of names is wanted: whole=[{self.whole!r}]")


def check_schedule(schedule: str) -> None:
    if schedule not in SCHEDULES:
        raise ConfigError(f"run.model(schedule={schedule!r}): {nearest(schedule, SCHEDULES)}")


def stages_each(schedule: str) -> int:
    """How many stages a member has."""
    return 2 if schedule == "interleaved" else 1


def bubble(schedule: str, members: int, micros: int) -> float:
    """The share of a step in which a member waits, by the formula; stages take equally long, backward twice forward.

    >>> round(bubble("1f1b", 4, 12), 2), round(bubble("zero-bubble", 4, 12), 3)
    (0.2, 0.077)
    """
    parts = {"interleaved": stages_each("interleaved"), "zero-bubble": 3}.get(schedule, 1)
    return (members - 1) / (parts * micros + members - 1)


def orders(schedule: str, members: int, micros: int) -> list[list[Action]]:
    """What each member computes, in its order."""
    check_schedule(schedule)
    if schedule == "interleaved" and micros % members:
        raise ConfigError(f"interleaved: {micros} micro-batches on {members} members: take a multiple of {members}")
    if schedule == "zero-bubble":
        return [_zero_bubble(member, members, micros) for member in range(members)]
    each = stages_each(schedule)
    made = []
    for member in range(members):
        forward = _rounds("F", member, members, micros, each)
        backward = _rounds("B", member, members, micros, each)
        if schedule == "gpipe":
            ahead = micros
        elif schedule == "1f1b":
            ahead = members - member - 1
        else:
            ahead = (each - 1) * members + 2 * (members - member - 1)
        made.append(_alternating(forward, backward, min(ahead, len(forward))))
    return made


def _rounds(kind: str, member: int, members: int, micros: int, each: int) -> list[Action]:
    """As many micro-batches as there are members through one stage of this member, then through its next."""
    if each == 1:
        return [Action(kind, member, micro) for micro in range(micros)]
    found = []
    for first in range(0, micros, members):
        of_this = range(first, min(first + members, micros))
        for turn in range(each) if kind == "F" else reversed(range(each)):
            found += [Action(kind, turn * members + member, micro) for micro in of_this]
    return found


def _alternating(forward: list[Action], backward: list[Action], ahead: int) -> list[Action]:
    steady = [action for pair in zip(forward[ahead:], backward) for action in pair]
    return [*forward[:ahead], *steady, *backward[len(forward) - ahead :]]


def _zero_bubble(member: int, members: int, micros: int) -> list[Action]:
    """1f1b, with the gradients of weights as many micro-batches behind as the member has stages before it: so all hold
    as many activations as the first one does."""
    forward, halves = ([Action(kind, member, micro) for micro in range(micros)] for kind in "FI")
    found: list[Action] = []
    behind = 0
    for action in _alternating(forward, halves, min(members - member - 1, micros)):
        found.append(action)
        if action.kind == "I":
            behind += 1
            if behind > member:
                found.append(Action("W", member, action.micro - member))
                behind -= 1
    return found + [Action("W", member, micro) for micro in range(micros - behind, micros)]


def _needs(action: Action, stages: int) -> list[Action]:
    """What must be done before, of the same micro-batch."""
    kind, stage, micro = action
    if kind == "W":
        return [Action("I", stage, micro)]
    if kind == "F":
        return [Action("F", stage - 1, micro)] if stage else []
    return [Action("F", stage, micro)] + ([Action(kind, stage + 1, micro)] if stage + 1 < stages else [])


def play(made: Sequence[Sequence[Action]], stages: int, costs: Mapping[str, float]) -> float:
    """How long these orders take, if an action of each kind takes so long and messages none.

    >>> play(orders("gpipe", 4, 12), 4, {"F": 1, "B": 2})
    45.0
    """
    ends: dict[Action, float] = {}
    free = [0.0] * len(made)
    at = [0] * len(made)
    while any(at[m] < len(order) for m, order in enumerate(made)):
        before = sum(at)
        for member, order in enumerate(made):
            while at[member] < len(order):
                action = order[at[member]]
                needs = _needs(action, stages)
                if not all(need in ends for need in needs):
                    break
                begin = max([free[member], *(ends[need] for need in needs)])
                free[member] = ends[action] = begin + costs[action.kind]
                at[member] += 1
        if sum(at) == before:
            raise AssertionError(
                f"these orders wait for each other: {[str(o[i]) for o, i in zip(made, at) if i < len(o)]}"
            )
    return max(free)
