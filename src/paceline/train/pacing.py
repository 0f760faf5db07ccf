"""What is done about members that are slower than others: `tell`, give them `less`, or `drop` them.

    tell  the first member says who is slow, and why (`stragglers`)
    less  shares of each global batch follow the members' speed. After every 50 turns all members look at the same
          numbers, so that all decide alike, and what they decide holds from the same step on. The sum stays as it was.
    drop  who is found slow and stays so is asked to leave, through the scheduler; one at a time, never below the least

A new view begins with equal shares, and is measured anew.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence

from paceline.core.errors import ConfigError, Interrupted
from paceline.core.events import Events
from paceline.core.step import StepReport
from paceline.data import Loader
from paceline.data.shares import widths_of
from paceline.strategies import AllReduce, Strategy, World
from paceline.train.links import Links
from paceline.train.meter import Meter
from paceline.train.queued import UNKNOWN, queued_s
from paceline.train.stragglers import Pace, Straggler, Stragglers, heard
from paceline.train.team import Team

RULES = ("tell", "less", "drop")
_WINDOW = 50  # turns between two looks at the shares
_CHANGE = 0.1  # of a member's share; less is not worth it
_LEAST_S = 1e-3  # of a turn; what is shorter is mostly chance
_LASTS = 100  # turns that one must be slow before it is asked to leave, and between two such wishes


class Pacing:
    """The pace of all members, as one of them sees it."""

    def __init__(
        self,
        rule: str,
        *,
        world: World,
        meter: Meter,
        events: Events,
        loaders: list[Loader],
        team: Team | None,
    ) -> None:
        if rule == "drop" and team is None:
            raise ConfigError(
                "--stragglers drop: members can leave only a run that goes on without them; start it with -n MIN:MAX, "
                "or use --stragglers tell or less"
            )
        self._rule = rule
        self._world = world
        self._meter = meter
        self._events = events
        self._loaders = loaders
        self._team = team
        self.start()
        self.regrouped()

    def regrouped(self) -> None:
        """The world has another group, whose loaders share out evenly."""
        self._stragglers = Stragglers(self._names)
        self._links = Links()
        self._window: list[list[float]] = []  # everyone's own time for an equal share, turn by turn
        self._skip = False  # what is told next was measured before the shares were changed
        self._asked = 0  # turns until another one may be asked to leave

    def start(self) -> None:
        """Measure from now: what lies before (set-up, evaluation) belongs to no turn."""
        self._cpu_s, self._queued_s = time.process_time(), queued_s()

    def begin(self, strategy: Strategy) -> None:
        """Before the first batch: say what cannot be done."""
        if self._rule == "tell" or self._world.group.size == 1:
            return
        if not isinstance(strategy, AllReduce):
            reason = "is for --strategy allreduce, and does nothing here: leave it out"
            if strategy.forgives:
                reason += "; the servers wait for nobody, and fast workers take more batches by themselves"
            else:
                reason += ", or use --strategy async or bounded, whose fast workers take more batches by themselves"
            self._world.tell(f"--stragglers {self._rule} {reason}")
            self._rule = "tell"
        elif self._rule == "less" and not self._shared:
            why = self._loaders[0].evenly if self._loaders else "batches do not come from run.loader"
            self._world.tell(f"--stragglers less: shares cannot follow the members' speed here, since {why}")

    def after_step(self, report: StepReport) -> None:
        """A step was taken: tell this member's pace, and look at what all have told."""
        world = self._world
        before, self._cpu_s = self._cpu_s, time.process_time()
        waited, self._queued_s = self._queued_s, queued_s()
        try:
            link = self._links.note(world.group.traffic())
        except Interrupted:  # the group breaks just now
            link = self._links.note({})
        cpu_s = self._cpu_s - before
        more_s = max(0.0, self._queued_s - waited) if min(waited, self._queued_s) >= 0 else UNKNOWN
        world.pace = Pace(
            report.data_s, report.compute_s, cpu_s, report.wait_s, link, more_s, report.sent_bytes
        ).numbers()
        numbers, world.paces = world.paces, []
        if not numbers:
            return
        skip, self._skip = self._skip, False
        if skip:
            return
        equal = [_scaled(pace, 1 / share) for pace, share in zip(heard(numbers), self._shares)]
        for slow in self._stragglers.note(equal):
            less = self._rule == "less" and slow.reason != "network" and self._shared
            self._tell(slow, "gets less" if less else "told")
        if self._rule == "less" and self._shared:
            self._share_out([pace.own_s for pace in equal])
        if self._rule == "drop" and self._team and world.group.rank == 0:
            self._drop(self._team)

    # ---- inside

    @property
    def _names(self) -> list[int]:
        size = self._world.group.size
        return [self._team.id_of(rank) for rank in range(size)] if self._team else list(range(size))

    @property
    def _shared(self) -> list[Loader]:
        """Loaders whose shares can follow the members' speed."""
        return [loader for loader in self._loaders if not loader.evenly]

    @property
    def _shares(self) -> Sequence[float]:
        """Each member's part of what an equal share would be."""
        for loader in self._shared:
            if loader.terms.widths:
                return [width / loader.batch_size for width in loader.widths]
        return [1.0] * self._world.group.size

    def _share_out(self, own_s: list[float]) -> None:
        self._window.append(own_s)
        if len(self._window) < _WINDOW:
            return
        times, self._window = [statistics.median(turns) for turns in zip(*self._window)], []
        if min(times) < _LEAST_S:
            return
        speeds = [1 / seconds for seconds in times]
        wanted = [widths_of(speeds, loader.batch_size) for loader in self._shared]
        pairs = [pair for loader, widths in zip(self._shared, wanted) for pair in zip(loader.widths, widths)]
        if not any(abs(now - old) > max(_CHANGE * old, 1) for old, now in pairs):  # one sample more may be chance
            return
        for loader, widths in zip(self._shared, wanted):
            loader.share(widths)
        self._skip = True
        first, widths, rank = self._shared[0], wanted[0], self._world.group.rank
        self._meter.size = sum(widths) / widths[rank]
        self._events.emit("shares", members=self._names, samples=widths, step=self._meter.step)
        words = ", ".join(f"{width} for member {name}" for width, name in zip(widths, self._names))
        self._print(f"samples of a global batch of {sum(first.widths)} from now on: {words}")

    def _drop(self, team: Team) -> None:
        self._asked = max(0, self._asked - 1)
        slow = self._stragglers.slowest
        if slow is None or slow.turns < _LASTS or self._asked:
            return
        self._asked = _LASTS
        name = self._names[slow.rank]
        if self._world.group.size <= team.least:
            self._tell(slow, f"kept, since there must be {team.least} members")
            self._asked = 10 * _LASTS
            return
        self._tell(slow, "asked to leave")
        team.slow(name, slow.text)

    def _tell(self, slow: Straggler, done: str) -> None:
        name = self._names[slow.rank]
        self._events.emit(
            "straggler",
            member=name,
            times=slow.times,
            reason=slow.reason,
            text=slow.text,
            done=done,
            step=self._meter.step,
        )
        self._print(f"member {name} {slow.text}" + (f"; it is {done}" if done not in ("told", "gets less") else ""))

    def _print(self, line: str) -> None:
        if self._world.group.rank == 0:
            print(f"paceline: {line}", file=sys.stderr)


def _scaled(pace: Pace, by: float) -> Pace:
    return pace._replace(
        data_s=by * pace.data_s, compute_s=by * pace.compute_s, cpu_s=by * pace.cpu_s, queued_s=by * pace.queued_s
    )
