"""Whether a run has lost or doubled anything: what each member wrote of its committed steps, held against the others'.

    found = Ledger.read(directory).check()
    assert found.clean, found

Each process of a run appends to a file of its own (`testing.counted` writes them): a `Begin`, a `Step` for each
committed step, an `End`. A step holds what the member gave, a digest of its weights, and, where the model counts
(`Counted`), which samples of all members have counted in it; so a member that was killed before it could write is no
gap. Where workers of sync servers come and go, rounds are told apart by the weights after them.

A step may stand there twice: a member that was killed right after it may have been the only one to see it, and the
others take a step of that number without it; all members may be lost and go on from a checkpoint. What holds is what
those who came to the end stand on: from the last step backwards, each step is the one on which the writers of the next
one stood. Lines that do not belong to it are `replaced`, which is no fault where their writers are dead, or had been
left out of the view without knowing it yet (one that was stopped, and goes on); it is one where they lived on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from paceline.core.errors import ConfigError

_TOLD = 20  # problems that are told in words


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag="begin"):
    """A process has joined."""

    samples: int  # of the dataset, whose numbers are 0 to samples - 1
    epochs: int
    together: bool = True  # all members take each step together, and hold equal weights after it
    rounds: bool = False  # steps of several members with equal weights after them are one, whatever their numbers


class Step(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """A step that counts."""

    step: int
    epoch: int
    samples: tuple[int, ...]  # that this member gave
    counted: tuple[int, ...] | None = None  # that have counted, of all members; twice where one has twice
    times: int = 1  # that the step was applied
    weights: str  # digest after the step
    view: int = 0
    members: tuple[int, ...] = ()  # of that view
    at: float = 0.0  # time.monotonic()


class End(msgspec.Struct, frozen=True, kw_only=True, tag="end"):
    """A process has come to the end of the run."""

    weights: str
    totals: tuple[int, ...] | None = None  # how often each sample has counted, over all epochs


Line = Begin | Step | End


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """What was found. All zero but the first three, in a run that lost nothing."""

    steps: int  # that hold
    samples: int  # that counted, over all epochs
    replaced_steps: int  # that died with all who had taken them
    lost_steps: int
    doubled_steps: int
    lost_samples: int
    doubled_samples: int
    unlike_weights: int  # steps after which members that lived on had different weights
    problems: tuple[str, ...] = ()

    @property
    def clean(self) -> bool:
        return not (
            self.lost_steps + self.doubled_steps + self.lost_samples + self.doubled_samples + self.unlike_weights
        )


class Written(msgspec.Struct, kw_only=True):
    """What one process has written."""

    member: int
    pid: int
    begin: Begin | None = None
    steps: list[Step] = []
    end: End | None = None

    def __str__(self) -> str:
        return f"member {self.member} (process {self.pid})"


def path(directory: Path, member: int, pid: int) -> Path:
    """Where a process writes."""
    return directory / f"member-{member}-{pid}.jsonl"


class Ledger:
    """What the processes of a run have written."""

    def __init__(self, written: Iterable[Written]) -> None:
        self.written = list(written)
        if not any(w.begin for w in self.written):
            raise ConfigError("this ledger is empty: no process has begun to write; is it the right directory?")

    @classmethod
    def read(cls, directory: Path) -> Ledger:
        """All files of a directory. A last line that was cut off when its writer was killed does not count."""
        decode = msgspec.json.Decoder(Line).decode
        found = []
        for file in sorted(directory.glob("member-*-*.jsonl")):
            _, member, pid = file.stem.split("-")
            written = Written(member=int(member), pid=int(pid))
            *lines, _rest = file.read_bytes().split(b"\n")
            for number, text in enumerate(lines, 1):
                try:
                    line = decode(text)
                except msgspec.DecodeError as error:
                    raise ConfigError(f"{file}:{number}: {error}: this is no ledger, or its disk was full") from None
                if isinstance(line, Begin):
                    written.begin = line
                elif isinstance(line, Step):
                    written.steps.append(line)
                else:
                    written.end = line
            found.append(written)
        return cls(found)

    def check(self, epochs: int | None = None) -> Findings:
        """Hold everything against each other. `epochs`: how many should be whole; None: as many as were begun with."""
        begin = next(w.begin for w in self.written if w.begin)
        check = _Check(begin.samples, begin.epochs if epochs is None else epochs)
        if begin.rounds:
            _rounds(self.written, check)
        elif begin.together:
            _together(self.written, check)
        else:
            _each_alone(self.written, check)
        return check.findings()


class _Check:
    def __init__(self, samples: int, epochs: int) -> None:
        self.samples, self.epochs = samples, epochs
        self.steps = self.replaced = self.lost = self.doubled = self.unlike = 0
        self.lost_samples = self.doubled_samples = 0
        self.counted: dict[int, Counter[int]] = {}  # by epoch
        self.totals: Sequence[int] | None = None
        self._problems: list[str] = []

    def tell(self, problem: str) -> None:
        if len(self._problems) < _TOLD:
            self._problems.append(problem)

    def count(self, epoch: int, numbers: Iterable[int]) -> None:
        self.counted.setdefault(epoch, Counter()).update(numbers)

    def findings(self) -> Findings:
        everything = range(self.samples)
        if self.totals is not None:
            self._samples("in all epochs", Counter(dict(zip(everything, self.totals))), self.epochs)
        else:
            for epoch in sorted({*range(self.epochs), *self.counted}):
                times = 1 if epoch < self.epochs else 0
                self._samples(f"in epoch {epoch}", self.counted.get(epoch, Counter()), times)
        counted = sum(self.totals) if self.totals is not None else sum(c.total() for c in self.counted.values())
        return Findings(
            steps=self.steps,
            samples=counted,
            replaced_steps=self.replaced,
            lost_steps=self.lost,
            doubled_steps=self.doubled,
            lost_samples=self.lost_samples,
            doubled_samples=self.doubled_samples,
            unlike_weights=self.unlike,
            problems=tuple(self._problems),
        )

    def _samples(self, when: str, counted: Counter[int], times: int) -> None:
        due = dict.fromkeys(range(self.samples), times)
        lost = {n: times - counted[n] for n in due if counted[n] < times}
        over = {n: count - due.get(n, 0) for n, count in counted.items() if count > due.get(n, 0)}
        self.lost_samples += sum(lost.values())
        self.doubled_samples += sum(over.values())
        for what, numbers in (("were lost", lost), ("counted too often", over)):
            if numbers:
                self.tell(f"{when} {len(numbers)} samples {what}: {_few(sorted(numbers))}")


Place = tuple[Written, int]  # a process, and which of its lines


def _together(written: Sequence[Written], check: _Check) -> None:
    at: dict[int, list[Place]] = {}  # lines by step
    for process in written:
        for place, line in enumerate(process.steps):
            at.setdefault(line.step, []).append((process, place))
    if not at:
        return
    came_through = [w for w in written if w.end and w.steps] or [w for w in written if w.steps]
    top = max(w.steps[-1].step for w in came_through)
    held: dict[int, list[Place]] = {}
    for step in range(top, min(at) - 1, -1):
        here = at.get(step, [])
        held[step] = _held(here, held.get(step + 1, []), came_through if step == top else []) if here else []
    last = {id(w): -1 for w in written}  # of each process the last line that holds
    for process, place in (each for places in held.values() for each in places):
        last[id(process)] = max(last[id(process)], place)
    for step in sorted({*at, *held}):
        if step in at:
            _one_step(step, held.get(step, []), check)
            _left(step, at[step], held.get(step, []), last, check)
        else:
            check.lost += 1
            check.tell(f"nobody committed step {step}, but somebody a later one")


def _held(here: list[Place], above: list[Place], came_through: list[Written]) -> list[Place]:
    """The lines of a step on which those of the next one stand."""
    standing: list[Place] = []
    for process, place in above:
        before = [i for p, i in here if p is process and i < place]
        standing += [(process, before[-1])] if before else []
    if came_through:
        standing = [(p, i) for p, i in here if any(p is w for w in came_through) and i == len(p.steps) - 1]
    if not standing:  # all came later, and were healed or resumed: what stood there when they came
        until = min((p.steps[i].at for p, i in above), default=float("inf"))
        earlier = [(p, i) for p, i in here if p.steps[i].at <= until] or here
        standing = [max(earlier, key=lambda place: place[0].steps[place[1]].at)]
    digest = Counter(p.steps[i].weights for p, i in standing).most_common(1)[0][0]
    return [(p, i) for p, i in here if p.steps[i].weights == digest]


def _one_step(step: int, held: list[Place], check: _Check) -> None:
    if not held:  # nobody who came through stands on it
        return
    check.steps += 1
    lines = [p.steps[i] for p, i in held]
    gave: dict[tuple[int, int], set[tuple[int, ...]]] = {}  # by view: taken again from a checkpoint, seats differ
    for (process, _), line in zip(held, lines):
        gave.setdefault((line.view, process.member), set()).add(line.samples)
    twice = any(line.times > 1 for line in lines) or len({id(p) for p, _ in held}) < len(held)
    differ = len({line.counted for line in lines}) > 1 or len({line.epoch for line in lines}) > 1
    if twice or differ or any(len(each) > 1 for each in gave.values()):
        check.doubled += 1
        check.tell(f"step {step} was applied twice, or with different samples: {_names(held)}")
    for view in {line.view for line in lines}:
        given = Counter(n for (at, _), each in gave.items() if at == view for samples in each for n in set(samples))
        if over := sorted(n for n, times in given.items() if times > 1):
            check.doubled_samples += len(over)
            check.tell(f"in step {step} several members gave samples {_few(over)}")
    counted = lines[0].counted
    if counted is None:
        newest = max(line.view for line in lines)
        counted = tuple(n for (view, _), each in gave.items() if view == newest for samples in each for n in samples)
    check.count(lines[0].epoch, counted)


def _left(step: int, here: list[Place], held: list[Place], last: dict[int, int], check: _Check) -> None:
    """Lines of a step that do not hold: no fault where all of their writers ended with them."""
    left = [(p, i) for p, i in here if not any(p is q and i == j for q, j in held)]
    living = [(p, i) for p, i in left if (p.end or last[id(p)] > i) and not _left_out(p, p.steps[i], held)]
    undone = [(p, i) for p, i in living if any(p is q and i < j for q, j in held)]
    if undone:
        check.lost += 1
        check.tell(f"step {step} was committed and undone later: {_names(undone)}")
    elif living:
        check.unlike += 1
        check.tell(f"after step {step} weights differed: {_names([*held[:1], *living])}")
    elif left:
        check.replaced += 1


def _left_out(process: Written, line: Step, held: list[Place]) -> bool:
    """Whether the step was taken in a newer view, without this process."""
    newer = [p.steps[i] for p, i in held if p.steps[i].view > line.view]
    return bool(newer) and all(process.member not in other.members for other in newer)


def _rounds(written: Sequence[Written], check: _Check) -> None:
    """Rounds of those who were there, as with sync servers whose workers come and go."""
    rounds: dict[str, list[Step]] = {}  # by the weights after it
    for process in written:
        for line in process.steps:
            rounds.setdefault(line.weights, []).append(line)
    for lines in rounds.values():
        check.steps += 1
        gave = {n for line in lines for n in line.samples}
        if len({line.counted for line in lines}) > 1 or not gave <= set(lines[0].counted or ()) or lines[0].times > 1:
            check.doubled += 1
            check.tell(f"members differ in what counted in steps {sorted({line.step for line in lines})}")
        check.count(lines[0].epoch, lines[0].counted or ())
    if len({w.end.weights for w in written if w.end}) > 1:
        check.unlike += 1
        check.tell("members ended with different weights")


def _each_alone(written: Sequence[Written], check: _Check) -> None:
    """Steps are each member's own, as with servers that do not wait: only samples are held against each other."""
    for process in written:
        for before, line in zip([None, *process.steps], process.steps):
            check.steps += 1
            check.count(line.epoch, line.samples)
            if before and line.step <= before.step:
                check.doubled += 1
                check.tell(f"{process} took step {line.step} after step {before.step}")
            elif before and line.step > before.step + 1:
                check.lost += line.step - before.step - 1
                check.tell(f"{process} took step {line.step} after step {before.step}")
    ends = [w.end for w in written if w.end]
    if ends and len({e.weights for e in ends}) > 1:
        check.unlike += 1
        check.tell("members ended with different weights")
    check.totals = next((e.totals for e in ends if e.totals is not None), None)


def _names(places: Iterable[Place]) -> str:
    return ", ".join(f"{p} with {p.steps[i].weights[:8]}" for p, i in list(places)[:4])


def _few(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")
