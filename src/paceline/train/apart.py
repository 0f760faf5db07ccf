"""Members that train apart, and come and go: a round is what they commit (`strategies.attending`).

Between two rounds each has weights of its own and draws from its own queue of batches (`division`). What is the same on
all, and what a newcomer gets, is as of the last round: the anchors, the outer optimizer, the place in the epochs, how
the epoch is divided and how much of it counts. Only the inner optimizers and what the script tracks are the source's as
of now.

    a member is lost     its batches since the last round are still in its queue; the others keep what they have learnt
                         and hold their round without it
    one comes            when the others are at a round: it gets the state as of the last one, listens to this one,
                         and is given a seat
    one was left out     it trains on. When the others are at the next round it is taken in, moves its work on top of
                         the anchors that they have by then, and brings it to that round; as long as the epoch is
                         divided as it was, since its batches are its own then. Else it begins anew
    one is to leave      all hold a round early, and go on without it
    an epoch ends        with a round, when nobody has batches left
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.checkpoint import Pipe, pack, seed_newcomer, unpack
from paceline.core.errors import Interrupted, PacelineError
from paceline.core.step import StepReport
from paceline.data import Loader
from paceline.strategies import Local, World
from paceline.strategies.strategy import AFTER, BEFORE, SPENT, Stand
from paceline.train import again
from paceline.train.accounts import Accounts
from paceline.train.body import Healing
from paceline.train.division import Division, Seat
from paceline.train.groups import SavedOptimizer
from paceline.train.meter import Meter
from paceline.train.saving import Saver, Stateful
from paceline.train.stragglers import Pace
from paceline.train.team import Team
from paceline.transport.group import Group


class Apart:
    """This member's part in such a run: a `Body` for the team, `Commits` for the strategy."""

    apart = True
    waits = False  # a newcomer gets everything at once
    healed: Healing | None = None

    def __init__(
        self,
        *,
        world: World,
        strategy: Local,
        saver: Saver,
        meter: Meter,
        loaders: list[Loader],
        seed: int,
        team: Team,
        accounts: Accounts,
        on_group: Callable[[Group], object],
        mend: Callable[[Interrupted], object],
    ) -> None:
        self.epoch_step = 0  # steps before the epoch under way
        self.saving = False  # all have agreed to save after this round
        self.closed = False  # the epoch has no more batches, and all of them count
        self._world = world
        self._strategy = strategy
        self._saver = saver
        self._meter = meter
        self._loaders = loaders
        self._seed = seed
        self._team = team
        self._accounts = accounts
        # Since the last round that it was in: samples (which the tally has), seconds for data, computing and waiting,
        # and bytes sent
        self._spent: tuple[float, ...] = (0.0,) * SPENT
        self._on_group = on_group
        self._mend = mend
        self._fresh = True  # no state was ever loaded or agreed on here
        self._division: Division | None = None
        self._took: list[Seat] = []  # who was in the last round
        self._loader: Loader | None = None  # the outermost one
        self._learnt = False  # a step was taken since the last round
        saver.state_of = self._saved

    # ---- what the team asks

    @property
    def step(self) -> int:
        return self._meter.step

    @property
    def busy(self) -> bool:
        return any(loader.active for loader in self._loaders)

    @property
    def even(self) -> bool:
        division, seat = self._division, self._seat
        if self._learnt or division is None or seat < 0:
            return not self._learnt
        return all(self._drawn_of(i) == drawn[seat] for i, drawn in enumerate(division.drawn))

    @property
    def brings(self) -> bool:
        """Whether this member was left out of the last round, and has kept its work for the next."""
        return self._learnt and bool(self._took) and self._me not in self._took

    @property
    def outdated(self) -> bool:
        return self._saver.newest > self.step

    def state(self) -> bytes:
        division = self._dealt
        with self._strategy.showing():
            found = self._saver.parts.items()
            parts = {name: {} if isinstance(part, Loader) else part.state_dict() for name, part in found}
            return pack(
                {
                    "parts": parts,
                    "place": [self._meter.step, self._meter.epoch, self.epoch_step],
                    "division": division.plain(),
                    "took": [list(seat) for seat in self._took],
                    "closed": self.closed,
                    "accounts": self._accounts.state(),
                }
            )

    def regroup(self, group: Group, state: bytes | None, healing: Healing | None = None, *, even: bool = False) -> None:
        self._on_group(group)
        self._world.moving = self._world.dropped = False
        self._world.paces = []
        self._strategy.regroup()
        if state is not None:
            self._take(unpack(memoryview(state)))
        division = self._dealt
        if even and any(division.seat(one) < 0 for one in self._present):
            if self.closed:  # for the next epoch
                division.seats, division.number = self._present, division.number + 1
            else:
                self._deal(self._states)
        self._fresh = False

    def resumed(self) -> None:
        """The first member has loaded a checkpoint: whatever was dealt out before is not."""
        self._division = None

    def _take(self, state: dict[str, Any]) -> None:
        """What others have agreed on without this member, or while it was told."""
        again.check_same(state["parts"], self._saver.parts)
        theirs, before = Division.of(state["division"]), self._division
        included = list(self._me) in state["took"]
        same = before is not None and theirs.number == before.number
        stays = same and not included and not self._fresh and theirs.seat(self._me) >= 0
        work = self._strategy.work() if stays else None
        self._saver.restore(state["parts"], self._put_agreed if included else self._put)
        self._accounts.load(state["accounts"])
        if included:
            self._settled()
        elif not stays:
            self._world.tally.drop()
        self._strategy.take_over(work, included=included)
        self._meter.step, self._meter.epoch, self.epoch_step = state["place"]
        self.closed, self._division = state["closed"], theirs
        self._took = [(id, process) for id, process in state["took"]]
        if not stays:
            if self._learnt and not included:
                self._world.tell_own(
                    f"what member {self._me[0]} had learnt since its last round is left out: the epoch was divided "
                    "anew without it, and its batches were dealt to others"
                )
            self._learnt = False
        if not same:
            seat = theirs.seat(self._me)
            for i, loader in enumerate(self._loaders):
                loader.go_on(theirs.state(i, loader), max(seat, 0), len(theirs.seats))
        if self._fresh:
            seed_newcomer(self._seed, self._meter.step, self._world.group.rank)

    def _put(self, part: Stateful, own: dict[str, Any]) -> None:
        """Who was there keeps what its optimizers have gathered; options, such as the learning rate, are the run's."""
        if isinstance(part, SavedOptimizer) and not self._fresh:
            own = {**own, "state": part.state_dict()["state"]}
        if not isinstance(part, Loader):
            part.load_state_dict(own)

    def _put_agreed(self, part: Stateful, own: dict[str, Any]) -> None:
        """Who was in the round has only missed its end: what it tracks is where it is."""
        if part is self._strategy or isinstance(part, torch.nn.Module):
            part.load_state_dict(own)

    def take_own(self, states: Sequence[dict[str, Any]]) -> None:
        """What this member had of its own when a checkpoint was written; nothing where the run had no such member."""
        if states:
            self._strategy.take_own(states)

    # ---- what the strategy asks

    def gather(self, count: int) -> bool:
        team, plan = self._team, self._strategy.plan
        if team.urgent or (team.adrift and team.called):
            team.go()
        if team.adrift:
            return False
        if plan.quorum and self._strategy.rounds == count:
            team.here(count, plan.quorum, plan.grace_s)
        return True

    @property
    def short(self) -> bool:
        return self._team.group.size < self._team.least

    def muster(self) -> None:
        self._team.muster()

    def stand(self) -> Stand:
        team = self._team
        self._world.wish = self._world.wish or (team.sent_home and self._saver.enabled)  # so that nothing is lost
        return Stand(
            step=self._meter.step,
            move=AFTER if team.leaving or team.urgent else BEFORE if team.called else 0,
            out=self._out,
            seat=self._seat,
            drawn=tuple(map(self._drawn_of, range(len(self._loaders)))),
            spent=(self._world.tally.pending, *self._spent[1:]),
        )

    def go(self) -> None:
        self._team.go()

    def mend(self, error: Interrupted) -> None:
        self._mend(error)

    def committed(self, stands: Sequence[Stand]) -> None:
        division = self._division
        assert division is not None
        for stand in stands:
            if stand.seat >= 0:
                division.count(stand.seat, stand.drawn)
        paces = [Pace(s[1], s[2], 0.0, s[3], sent_bytes=s[4], samples=s[0]) for s in (x.spent for x in stands)]
        self._accounts.committed(self._team.seated, paces)
        self._settled()
        self._learnt = False
        self._took = self._present
        self._meter.step = max(stand.step for stand in stands)
        self._world.moving = self._world.moving or any(stand.move == AFTER for stand in stands)
        self._team.committed(self._meter.step)
        self.saving = self.saving or self._world.granted
        self._world.granted = self._world.wish = False
        for loader in self._loaders:
            loader.mark()
        out = any(stand.out for stand in stands)
        if out or any(division.seat(one) < 0 for one in self._took):
            self._deal(self._states)
            self.closed = self._loader is not None and out and not self._left

    # ---- what the loop asks

    def after_step(self, report: StepReport | None) -> None:
        """`report`: of a step of the first optimizer."""
        self._learnt = True
        if report:
            told = (0.0, report.data_s, report.compute_s, report.wait_s, report.sent_bytes)
            self._spent = tuple(before + more for before, more in zip(self._spent, told))

    def before_step(self) -> None:
        pass

    def between(self, loader: Loader | None) -> None:
        """Before a batch: go where all go, and hold the rounds that are due before this member can have one."""
        team, world = self._team, self._world
        self._loader = loader or self._loader
        if self.closed and self._division and self._left:  # another pass in the same epoch
            self._reopen()
        while True:
            if team.adrift and team.awaited:
                team.go()
            elif team.adrift and self._out:
                team.rejoin()
            elif not team.adrift and (world.moving or team.urgent):
                if self.saving:
                    return  # first, and then again
                team.go()
            elif not team.adrift and (team.leaving or self._seat < 0 or self._out or self._strategy.due):
                self._strategy.attend()
            else:
                return

    def leave_epoch(self) -> None:
        """The loop over batches has ended, perhaps early: nothing that was learnt in it is left uncommitted."""
        if self.closed:
            return
        if not self._team.adrift:
            self._strategy.attend()
        if self._team.adrift:
            raise PacelineError(
                f"member {self._me[0]} came to the end of an epoch when the others had gone on without it: its script "
                "stands where they are no more, so it ends, to be started again"
            )
        self.closed = True

    def next_epoch(self) -> None:
        """Loaders stand before the next epoch: divide it as the last one was."""
        self._reopen()

    def _reopen(self) -> None:
        assert self._division is not None
        self.closed = False
        self._deal([loader.state_dict() for loader in self._loaders], seats=self._division.seats)

    # ---- inside

    def _settled(self) -> None:
        """What this member has drawn and spent is in the accounts."""
        self._world.tally.commit(self._world.tally.pending)
        self._spent = (0.0,) * SPENT

    @property
    def _dealt(self) -> Division:
        """The present division; before the first batch, when all loaders are there, that is the first one."""
        if self._division is None or len(self._division.states) != len(self._loaders):
            self._deal([loader.state_dict() for loader in self._loaders])
        assert self._division is not None
        return self._division

    def _deal(self, states: Sequence[dict[str, Any]], seats: Sequence[Seat] | None = None) -> None:
        number = self._division.number + 1 if self._division else 1
        seats = self._present if seats is None else seats
        self._division = Division.among(seats, number, states, self._loaders)
        for loader, state in zip(self._loaders, states):
            loader.go_on(state, max(self._seat, 0), len(seats))

    @property
    def _states(self) -> list[dict[str, Any]]:
        assert self._division is not None
        return [self._division.state(i, loader) for i, loader in enumerate(self._loaders)]

    def _saved(self, part: Stateful) -> dict[str, Any]:
        """Of a loader a checkpoint has what counts."""
        if isinstance(part, Loader) and self._division:
            number = next(i for i, loader in enumerate(self._loaders) if loader is part)
            return self._division.state(number, part)
        return part.state_dict()

    @property
    def _me(self) -> Seat:
        return self._team.me

    @property
    def _present(self) -> list[Seat]:
        assert self._team.view is not None
        return [(member.id, member.local) for member in self._team.view.members]

    @property
    def _seat(self) -> int:
        return self._division.seat(self._me) if self._division else -1

    def _drawn_of(self, number: int) -> int:
        """Batches of this member's queue of a loader; those of a second pass over an inner one are not told apart."""
        division, seat, loader = self._division, self._seat, self._loaders[number]
        if division is None or seat < 0 or number >= len(division.drawn):
            return 0
        counted, place = division.drawn[number][seat], division.states[number]
        same = (loader.epoch, loader.number) == (place["epoch"], place["pass"])
        return max(counted, loader.drawn) if same else counted

    @property
    def _out(self) -> bool:
        """Whether this member has no more batches, and others may have."""
        return self._loader is not None and self._loader.over and not self.closed

    @property
    def _left(self) -> bool:
        """Whether there are batches for anybody, as the epoch is divided now."""
        return self._loader is not None and not self._loader.over

    # ---- what only newcomers to steps taken together need

    def lend(self, pipes: list[Pipe]) -> bytes:
        raise AssertionError("a newcomer to rounds gets everything at once")

    def arrive(self) -> None:
        pass

    def restore(self) -> None:
        pass

    def digest(self) -> bytes:
        return b""

    def settled(self) -> None:
        pass
