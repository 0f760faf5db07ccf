"""How members that train apart meet: a word from everyone first, then what that word says.

    note     everyone tells which fragment it sends, or that it waits between two steps (MEET), and what it has seen
    weigh    from all notes each member makes the same weights
    carry    the differences of that fragment

Who waits takes part in what the others still send: so members need not have taken equally many steps when an epoch
ends or a checkpoint is due (a GradScaler skips steps, here and there unlike ones). When all wait, they have met.

A thread does all of it, in the order in which it is handed in, while training goes on or waits. Every wait in it is
limited by the group's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from paceline.core.errors import ConfigError, Interrupted, PacelineError
from paceline.strategies.anchors import SKETCH
from paceline.strategies.averaging import Averaging, BySamples, Mean, Seen
from paceline.strategies.buckets import PACE
from paceline.strategies.strategy import AFTER, BEFORE, SPENT, Stand
from paceline.transport.arena import Courier
from paceline.transport.group import Group

MEET = -1


class Note(NamedTuple):
    """What a member tells before an exchange.

    >>> stand = Stand(step=7, seat=1, drawn=(4, 5), spent=(1.0, 2.0, 3.0, 4.0, 5.0))
    >>> note = Note(2, Seen(samples=3.0, loss=1.0), pace=(1.0,) * PACE, changed=(True, False), stand=stand)
    >>> Note.of(note.numbers().tolist()) == note
    True
    """

    fragment: int
    seen: Seen
    steps: int = 0  # since its weights were those of the run
    squares: float = 0.0  # of its difference
    sketch: tuple[float, ...] = (0.0,) * SKETCH  # of it too; see `anchors.sketch`
    wish: bool = False
    turn: float = 0.0  # samples that it was to draw so far: the same where loops are at the same batch
    pace: tuple[float, ...] = ()  # see World.pace; zeros where nothing was measured yet
    changed: tuple[bool, ...] = ()  # buffers
    stand: Stand = Stand()  # where members come and go
    guests: tuple[float, float] = (0.0, 0.0)  # what those outside give it to bring weighs, and how many they are

    def numbers(self) -> torch.Tensor:
        flat = [self.fragment, *self.seen, self.steps, self.squares, self.wish, self.turn]
        flat += (*self.pace, *(0.0,) * PACE)[:PACE]
        step, move, out, seat, drawn, spent = self.stand
        flat += [*self.sketch, step, move, out, seat, *spent, len(drawn), *drawn]
        return torch.tensor([*self.guests, *flat, *self.changed], dtype=torch.float64)

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Note:
        weight, guests, fragment, sound, samples, tokens, loss, steps, squares, wish, turn, *rest = numbers
        pace, sketch, rest = rest[:PACE], rest[PACE : PACE + SKETCH], rest[PACE + SKETCH :]
        step, move, out, seat, *rest = rest
        spent, (loaders, *rest) = tuple(rest[:SPENT]), rest[SPENT:]
        drawn, changed = rest[: int(loaders)], rest[int(loaders) :]
        return cls(
            fragment=int(fragment),
            seen=Seen(bool(sound), samples, tokens, loss),
            steps=int(steps),
            squares=squares,
            sketch=tuple(sketch),
            wish=bool(wish),
            turn=turn,
            pace=tuple(pace),
            changed=tuple(map(bool, changed)),
            stand=Stand(int(step), int(move), bool(out), int(seat), tuple(map(int, drawn)), spent),
            guests=(weight, guests),
        )


class Outcome(NamedTuple):
    """What has become of an exchange."""

    fragment: int  # MEET: all have met
    notes: list[Note]
    weights: list[float]

    @property
    def waits(self) -> bool:
        """Whether some come who are to be in it: then all go to the view that has them, and hold it there."""
        moves = {note.stand.move for note in self.notes}
        return BEFORE in moves and AFTER not in moves

    @property
    def empty(self) -> bool:
        """Whether nobody has taken a step, where members come and go: they have only met."""
        return not any(note.steps for note in self.notes)

    @property
    def short(self) -> bool:
        """Whether it was held before its time, so that it tells nothing of how far members come apart."""
        return any(note.stand.out or note.stand.move == AFTER for note in self.notes)

    @property
    def changed(self) -> list[bool]:
        """Buffers that some member has changed."""
        return [any(flags) for flags in zip(*(note.changed for note in self.notes))]

    @property
    def spread(self) -> float:
        """Σ wᵢ · ‖differenceᵢ − their mean‖², about: from sketches, since the mean may have gone through a codec."""
        counted = [(w, note) for w, note in zip(self.weights, self.notes) if w]
        sketches = torch.tensor([note.sketch for _, note in counted], dtype=torch.float64)
        weights = torch.tensor([[w] for w, _ in counted], dtype=torch.float64)
        return float((weights * (sketches - (weights * sketches).sum(0)).square()).sum())


class Meeting(Protocol):
    """Where notes are handed in, one after another; `end` waits for the last one."""

    def begin(self, note: Note) -> None: ...
    def end(self) -> Outcome: ...
    def close(self) -> None: ...


class Exchange:
    """With others. `carry` is called in a thread, with what is to be exchanged."""

    def __init__(
        self, group: Group, average: Averaging, carry: Callable[[Outcome], object], *, uneven: bool = False
    ) -> None:
        self._group, self._average, self._carry = group, average, carry
        self._uneven = uneven  # members may have taken unlike numbers of steps, or none
        self._outcome: Outcome | None = None
        self._courier = Courier(self._run, f"{group.name}/exchange")

    def begin(self, note: Note) -> None:
        self._courier.post(note.numbers())

    def end(self) -> Outcome:
        self._courier.wait()
        assert self._outcome is not None
        return self._outcome

    def close(self) -> None:
        self._courier.close()

    @torch.no_grad()
    def _run(self, numbers: torch.Tensor) -> None:
        try:
            notes = [Note.of(row.tolist()) for row in self._group.all_gather(numbers)]
            sent = {note.fragment for note in notes} - {MEET}
            if len(sent) > 1:
                raise PacelineError(f"members send unlike fragments: {sorted(sent)}; they have lost count of rounds")
            self._outcome = Outcome(sent.pop() if sent else MEET, notes, [])
            idle = self._uneven and self._outcome.empty
            if self._outcome.fragment != MEET and not self._outcome.waits and not idle:
                weights = weigh(self._average, notes, uneven=self._uneven)
                self._outcome = self._outcome._replace(weights=weights)
                self._carry(self._outcome)
        except Interrupted as error:
            self._group.abort(error)
            raise


def weigh(average: Averaging, notes: Sequence[Note], *, uneven: bool = True) -> list[float]:
    """Weights of the members of a round. `uneven`: some may have trained more than others since the last one, as who
    came late, or in the middle of it.

    Who has taken no step says nothing. The plain mean is of equals: where steps are unlike, it goes by samples. Scripts
    log after their step: where the first one is a round already, nobody can have been heard.

    >>> weigh(Mean(), [Note(0, Seen(samples=40), steps=5), Note(0, Seen(samples=38), steps=5), Note(0, Seen())])
    [0.5, 0.5, 0.0]
    >>> weigh(Mean(), [Note(0, Seen(samples=30), steps=4), Note(0, Seen(samples=10), steps=1)])
    [0.75, 0.25]
    >>> from paceline.strategies.averaging import ByLoss
    >>> weigh(ByLoss(), [Note(0, Seen(), steps=1), Note(0, Seen(), steps=1)])
    [0.5, 0.5]
    >>> weigh(ByLoss(), [Note(0, Seen(loss=1.0), steps=9), Note(0, Seen(), steps=9)])
    Traceback (most recent call last):
      ...
    paceline.core.errors.ConfigError: average=loss(temperature=1.0): member 1 has logged no loss since the last round, \
and others have: call run.log(loss=...) on every member
    """
    if average.hears:
        silent = [rank for rank, note in enumerate(notes) if math.isnan(note.seen.loss) and not note.seen.tokens]
        if len(silent) == len(notes) and all(note.steps <= 1 for note in notes):
            average = Mean()
        _refuse_silent(average, silent, [note.steps for note in notes])
    if not uneven:
        return average.weigh([note.seen for note in notes])
    taken = {note.steps for note in notes} - {0}
    seen = [note.seen if note.steps else note.seen._replace(sound=False) for note in notes]
    if isinstance(average, Mean) and len(taken) > 1:
        average = BySamples()
    return average.weigh(seen)


def _refuse_silent(average: Averaging, silent: Sequence[int], steps: Sequence[int]) -> None:
    """Whoever logs nothing would have no weight. Who has taken fewer steps than all others may not have come to it."""
    heard = [taken for rank, taken in enumerate(steps) if rank not in silent]
    late = [rank for rank in silent if heard and steps[rank] >= max(2, min(heard))]
    if late:
        have = f"member {late[0]} has" if len(late) == 1 else f"members {', '.join(map(str, late))} have"
        raise ConfigError(
            f"average={average.words}: {have} logged no {average.hears} since the last round, and others have: call "
            f"run.log({average.hears}=...) on every member"
        )


class Alone:
    """Of a run of one: it always agrees with itself. `uneven`: it may come to a round without a step."""

    def __init__(self, average: Averaging, *, uneven: bool = False) -> None:
        self._average, self._uneven = average, uneven
        self._note: Note | None = None

    def begin(self, note: Note) -> None:
        self._note = note

    def end(self) -> Outcome:
        note = self._note
        assert note is not None
        nothing = note.fragment == MEET or (self._uneven and not note.steps)
        weights = [] if nothing else weigh(self._average, [note], uneven=self._uneven)
        return Outcome(note.fragment, [note], weights)

    def close(self) -> None:
        pass


class Heard:
    """Sums of what the script logs under one name, since each fragment was sent; on whatever device it is."""

    def __init__(self, name: str, fragments: int) -> None:
        self._name = name
        self._sums = torch.zeros(fragments, dtype=torch.float64)
        self._counts = [0] * fragments
        self._before = [(0.0, 0)] * fragments  # of the time before, in which something was logged

    def __call__(self, values: Mapping[str, Any]) -> None:
        if self._name not in values:
            return
        value = values[self._name]
        if isinstance(value, torch.Tensor):
            value = value.detach().reshape(())
            self._sums = self._sums.to(value.device)
        self._sums += value
        self._counts = [count + 1 for count in self._counts]

    def since(self, fragment: int) -> tuple[float, int]:
        return float(self._sums[fragment]), self._counts[fragment]

    def lately(self, fragment: int) -> tuple[float, int]:
        """Since then; where nothing was, as at the end right after it was sent, in the time before."""
        return self.since(fragment) if self._counts[fragment] else self._before[fragment]

    def sent(self, fragment: int) -> None:
        self._before[fragment] = self.lately(fragment)
        self._sums[fragment] = 0.0
        self._counts[fragment] = 0

    def state(self) -> list[tuple[float, ...]]:
        return [(*self.since(fragment), *before) for fragment, before in enumerate(self._before)]

    def load(self, state: Sequence[Sequence[float]]) -> None:
        for fragment, (total, count, *before) in enumerate(state[: len(self._counts)]):
            self._sums[fragment] = total
            self._counts[fragment] = int(count)
            if before:  # older checkpoints have none
                self._before[fragment] = (before[0], int(before[1]))
