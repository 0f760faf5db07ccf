"""The user's loop as the run sees it: epochs that begin and end, turns that ask for a batch, steps that are taken.

Between the optimizer and the loaders, which tell it what the loop does, and the rooms that act on it: the strategy, the
saver, the meter, and in an elastic run the team. What the user holds is the run.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import msgspec
import torch

from paceline.core.errors import ConfigError, Interrupted
from paceline.core.events import Events
from paceline.core.status import Status
from paceline.data import Loader
from paceline.parallel.precise import Precise
from paceline.strategies import Local, Strategy, World
from paceline.strategies.server import Served
from paceline.train import metrics
from paceline.train.accounts import Accounts
from paceline.train.apart import Apart
from paceline.train.late import Late
from paceline.train.lateness import Lateness
from paceline.train.meter import Meter
from paceline.train.outermost import Outermost
from paceline.train.pacing import Pacing
from paceline.train.place import Change
from paceline.train.replica import Replica
from paceline.train.saving import Saver
from paceline.train.stragglers import Pace, heard
from paceline.train.team import Team
from paceline.train.window import Window
from paceline.transport.group import Group
from paceline.transport.hub import HubGroup


class Loop:
    """The loop of one member."""

    def __init__(
        self,
        *,
        world: World,
        strategy: Strategy,
        saver: Saver,
        meter: Meter,
        events: Events,
        status: Status,
        loaders: list[Loader],
        optimizers: list[torch.optim.Optimizer],
        seed: int,
        team: Team | None,
        rate: Callable[[int], float],
        lead: Callable[[bool], object],
        stragglers: str = "tell",
        precise: Precise,
    ) -> None:
        self.under_way = False  # within the loop over epochs
        self.window = Window(self._warn)
        self.quiet: Callable[[], object] | None = None  # waits for the threads that train now, where some do
        self._world = world
        self._precise = precise
        self._strategy = strategy
        self._saver = saver
        self._meter = meter
        self._events = events
        self._status = status
        self._loaders = loaders
        self._optimizers = optimizers
        self._team = team
        self._rate = rate  # by the number of members
        self._lead = lead  # take over what the first member does besides training, or leave it to another
        self._leads = world.group.rank == 0 and not (team and team.outside)
        self._outermost = Outermost(self._warn)
        self.accounts = Accounts(team.own) if team else None  # of all who come and go
        parts: dict[str, Any] = {
            "world": world,
            "strategy": strategy,
            "saver": saver,
            "meter": meter,
            "loaders": loaders,
            "seed": seed,
            "accounts": self.accounts or Accounts(0),
            "on_group": self._regrouped,
        }
        self._replica: Replica | Apart
        if team and isinstance(strategy, Local):
            mend = partial(self._mend, linger=True)
            self._replica = world.commits = Apart(team=team, mend=mend, **parts)
        else:
            self._replica = Replica(**parts)
        self._here = set(world.group.ranks)
        self._pacing = Pacing(stragglers, world=world, meter=meter, events=events, loaders=loaders, team=team)
        self._lateness = Lateness()
        self._late: Late | None = None  # where lost workers are replaced
        if world.replaces and isinstance(world.group, HubGroup) and isinstance(strategy, Served):
            self._late = Late(world.group, saver, strategy, seed)
        if team:
            world.elastic = True
            world.together, world.mend = team.do, self._mend
            team.body, team.changed = self._replica, self._changed

    # ---- what the optimizer tells (train.optimizer.StepObserver)

    def own_step(self, optimizer: torch.optim.Optimizer) -> bool:
        spoilt = self._precise.scaling(optimizer) is not None and self._spoilt(optimizer)
        if not self._strategy.finish(optimizer):
            return False
        if self._team:
            try:
                self._replica.before_step()
            except Interrupted as error:  # what this newcomer needs does not come
                self._mend(error)
                return False
        return not spoilt

    def _spoilt(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a gradient is not finite: with all-reduce all members have the same ones by now, in sync they ask
        each other; elsewhere they step by themselves, and so each skips its own."""
        self._strategy.reduced()
        served = isinstance(self._strategy, Served)
        asks = isinstance(self._strategy, Served) and self._strategy.sync and not self._strategy.forgives
        asks = asks and self._world.group.size > 1 and not self._world.replaces

        def agree(mine: bool) -> bool:
            if not asks:
                return mine
            return bool(self._world.do(lambda group: group.all_reduce(torch.tensor([float(mine)]), "max")).item())

        return self._precise.spoilt(optimizer, agree, clear=served)

    def rate(self) -> float:
        return self._rate(self._world.group.size)

    def full(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        return self._precise.full(optimizer)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.window.open = False
        if not self._world.dropped and (scaling := self._precise.stepped(optimizer)):
            self._events.emit("skipped", step=self._meter.step + 1, scale=scaling.scale)
            if scaling.hopeless:
                self._world.tell(
                    f"the last {scaling.in_a_row} steps were skipped, since gradients were not finite, and the loss "
                    f"scale is down to {scaling.scale:g}: that is not for fp16 to mend. Look at the data and the loss, "
                    "lower the learning rate, or use bf16"
                )
        first = optimizer is self._optimizers[0]
        if isinstance(self._replica, Apart):
            report = self._meter.after_step() if first else None
            self._replica.after_step(report)
            if report:
                self._pacing.after_step(report)
                self._world.wish = self._saver.due
            self._strategy.stepped(optimizer)
            return
        if self._world.dropped:
            self._replica.put_back()
            return
        self._strategy.stepped(optimizer)
        if self._team:
            self._team.committed(self._meter.step + 1)
            self._replica.committed()
        if first:
            self._count()
            self._pacing.after_step(self._meter.after_step())
            saves = self._world.granted or (self._world.group.size == 1 and self._world.wish)
            self._replica.saving = self._replica.saving or saves
            self._world.granted = False
            self._world.wish = self._saver.due

    def _count(self) -> None:
        """Whose samples this step was made of."""
        tally, paces = self._world.tally, heard(self._world.paces)
        if not self._team or not self.accounts:
            tally.commit(tally.pending)
            return
        members = self._team.seated
        if len(paces) != len(members):  # nothing was exchanged
            paces = [Pace(0.0, 0.0, 0.0, samples=tally.pending)] if len(members) == 1 else []
        self.accounts.committed(members, paces)
        tally.commit(paces[self._world.group.rank].samples if paces else tally.pending)

    def cleared(self, optimizer: torch.optim.Optimizer) -> None:
        self.window.open = False
        if self._team and self.under_way and not self._loaders and optimizer is self._optimizers[0]:
            self._between_turns(self._team, None)  # nobody else tells where an iteration begins
        self._strategy.cleared(optimizer)

    def group_added(self, optimizer: torch.optim.Optimizer) -> None:
        self._strategy.extend(optimizer)
        self._precise.extend(optimizer)

    @property
    def healing(self) -> bool:
        return self._replica.waits

    # ---- epochs

    def begin(self) -> tuple[int, int, int] | None:
        """Resume if there is something to resume from: step, epoch, and that epoch's first step."""
        place: tuple[int, int, int] | None
        if self._team:
            self.warn_of_untracked()  # before others depend on this one
            if self._team.begin(self._resume_for_all) and isinstance(self._replica, Apart):
                self._replica.take_own(self._world.do(self._saver.hand_out))
            place = (self._meter.step, self._meter.epoch, self._replica.epoch_step) if self._meter.step else None
        else:
            if self._world.replaces:
                self.warn_of_untracked()
            place = self._late.enter() if self._late and self._world.late else self._saver.resume()
            self._world.late = False
        self._pacing.begin(self._strategy)
        if place is not None:
            self._meter.step, _, self._replica.epoch_step = place
            self._status.step = self._meter.step
        return place

    def epochs(self, first: int, count: int) -> Iterator[int]:
        """Their numbers, with what belongs to the beginning and the end of each."""
        self.under_way = True
        epoch = first
        while epoch < count:
            self._enter_epoch(epoch, count)
            yield epoch
            epoch = self._meter.epoch  # a member that was away has come back in a later one
            self._leave_epoch(epoch, last=epoch + 1 >= count)
            epoch += 1
        self.under_way = False

    def _resume_for_all(self) -> None:
        if place := self._saver.resume_alone(each=isinstance(self._replica, Apart)):
            self._meter.step, self._meter.epoch, self._replica.epoch_step = place
            if isinstance(self._replica, Apart):
                self._replica.resumed()

    def _enter_epoch(self, epoch: int, count: int) -> None:
        self._meter.epoch = epoch
        steps = None
        for loader in self._loaders:
            if loader.epoch != epoch:  # a resumed loader stands in the middle of this epoch already
                loader.enter_epoch(epoch)
        self._outermost.enter_epoch()
        with contextlib.suppress(TypeError):
            steps = self._loaders[0].whole if self._loaders else None
        self._status.enter(epoch, self._replica.epoch_step, steps or 0)
        self._status.set("training")
        self._events.emit("epoch", epoch=epoch, epochs=count, steps=steps, step=self._replica.epoch_step)
        if self._late:
            self._late.tell(epoch, self._meter.step)
        self._meter.start()
        self._pacing.start()

    def _leave_epoch(self, epoch: int, *, last: bool) -> None:
        self._strategy.rest()  # others may still be training, and must not wait for this member's pushes
        self._replica.restore()
        if self._team:
            self._settle(self._team)
        if isinstance(self._replica, Apart):
            with self._for_others():
                self._replica.leave_epoch()
        scalars = self._meter.end_epoch()
        with self.waiting():
            self._strategy.together(keep=self._saver.enabled, end=last)
            means = self._world.do(lambda group: metrics.weighted_means(group, scalars))
        for name, value in means.items():
            self.tell_metric(f"epoch/{name}", value)
        for rank in sorted(self._here - set(self._present())):
            self._events.emit("lost", member=rank, step=self._meter.step, epoch=epoch)
        for rank in sorted(set(self._present()) - self._here):
            self._events.emit("joined", member=rank, step=self._meter.step, epoch=epoch)
        self._here = set(self._present())
        for loader in self._loaders:
            loader.enter_epoch(epoch + 1)
        if isinstance(self._replica, Apart):
            self._replica.next_epoch()
        self._replica.epoch_step = self._meter.step
        if self._saver.enabled:
            self.save(epoch + 1, met=True)
        self._world.granted = self._world.wish = self._replica.saving = False

    # ---- turns

    def asked(self, loader: Loader) -> None:
        """A loop asks for its next batch: nothing of the last step is left undone, if it is the outermost one."""
        self._strategy.cleared()
        if not self.under_way:
            return
        if not self._outermost.asks(loader, self._meter.step, due=self._replica.saving):
            return
        if self._team:
            self._between_turns(self._team, loader)
        if self._replica.saving:
            self._save_now()

    def _save_now(self) -> None:
        """All have agreed to."""
        if self.quiet:
            self.quiet()
        self.save(self._meter.epoch)
        self._replica.saving = self._world.wish = False

    def _between_turns(self, team: Team, loader: Loader | None) -> None:
        """Where members come and go, they do so here."""
        if isinstance(self._replica, Apart):
            with self._for_others():
                self._replica.between(loader)
            if self._replica.saving:  # before the group changes: all may leave
                self._save_now()
                with self._for_others():
                    self._replica.between(loader)
            return
        alone = team.group.size == 1 and team.sent_home  # nobody to agree with
        if alone and self._saver.enabled and not self._world.dropped:
            self._replica.saving = True
        if self._replica.saving and (self._world.moving or alone):
            self._save_now()  # before the group changes: all may leave
        self._boundary(team, self._replica)

    def _boundary(self, team: Team, replica: Replica) -> None:
        """A step that was dropped is over."""
        if not team.turn():
            replica.draw_again()
            return
        replica.restore()
        with self._for_others():  # perhaps until there are enough
            self._settle(team)
            team.between(moving=self._world.moving)
        self._world.move = team.called
        self._world.wish = self._world.wish or (team.sent_home and self._saver.enabled)  # so that nothing is lost

    def _mend(self, error: Interrupted, *, linger: bool = False) -> None:
        """The group broke: what it takes to form another one is no time of this member's own."""
        assert self._team is not None
        with self._for_others():
            self._team.mend(error, linger=linger)

    @contextlib.contextmanager
    def _for_others(self) -> Iterator[None]:
        """All time within is waiting, also what no group has counted as that."""
        began, before = time.monotonic(), self._world.waited
        yield
        counted = self._world.waited - before
        self._world.waited_s += max(0.0, time.monotonic() - began - counted)

    def _settle(self, team: Team) -> None:
        if not team.settle():
            self._warn(
                "weights or optimizers change outside of optimizer.step(), so a newcomer was not equal to the others "
                "after its first step, and they had to wait for it to get the state again"
            )

    def save(self, epoch: int, *, met: bool = False) -> None:
        """A checkpoint, by all members together; `met`: they are between two steps for it already."""
        if not self._saver.enabled:
            raise ConfigError("this run writes no checkpoints: checkpoint_keep is 0")
        self.window.before_checkpoint(self._optimizers)
        before = self._status.what
        self._status.set("checkpointing")
        if not met:
            self._strategy.together(keep=True)
        versions = self._strategy.versions if isinstance(self._strategy, Served) else ()
        with self._strategy.showing():
            self._saver.save(self._meter.step, epoch, self._replica.epoch_step, versions)
        self._status.set(before)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """All members meet: whoever comes first waits."""
        began = time.monotonic()
        yield
        if self._world.group.size > 1:
            self._meter.waited(time.monotonic() - began)

    def _present(self) -> Sequence[int]:
        """Who came to the last collective."""
        group = self._world.group
        return group.ranks_here if isinstance(group, HubGroup) else group.ranks

    def _regrouped(self, group: Group) -> None:
        old, self._world.group = self._world.group, group
        if old is not group:  # what a group counts begins anew
            self._world.sent_bytes += old.sent_bytes
            self._world.waited_s += old.waited_s
        self._meter.size = group.size
        self._pacing.regrouped()
        self._here = set(group.ranks)
        self._world.granted = False
        if (group.rank == 0) != self._leads:  # not any more, where it was away for a while
            self._leads = group.rank == 0
            self._lead(self._leads)

    def _changed(self, change: Change) -> None:
        steps = self._steps(change.size)
        self._status.enter(self._meter.epoch, self._replica.epoch_step, steps)
        self._events.emit("view", **msgspec.structs.asdict(change), step=self._meter.step, steps=steps or None)
        if self._world.group.rank == 0:
            print(f"paceline: {change.text}", file=sys.stderr)
        for line in self._lateness.note(change):
            self._world.tell(line)

    def _steps(self, size: int) -> int:
        """Of this epoch, those to come taken by so many; 0: not known."""
        loader = self._loaders[0] if self._loaders else None
        if loader is None or loader.whole is None or loader.source.length is None:
            return 0
        left = loader.source.length - int(loader.committed()["consumed"])
        return self._meter.step - self._replica.epoch_step + -(-left // (loader.batch_size * size))

    def warn_of_untracked(self) -> None:
        """A scheduler that no checkpoint holds."""
        scheduled = any(hasattr(o.step, "_wrapped_by_lr_sched") for o in self._optimizers)
        if not scheduled or self._saver.holds(torch.optim.lr_scheduler.LRScheduler):
            return
        if self._team or self._world.replaces:
            raise ConfigError(
                "a learning-rate scheduler drives this optimizer, and members that come or are behind could not get "
                "its state from the others: add run.track(scheduler=scheduler)"
            )
        if self._saver.enabled:
            self._warn(
                "a learning-rate scheduler drives this optimizer but is not saved: "
                "add run.track(scheduler=scheduler) so that a resumed run continues its schedule"
            )

    def tell_metric(self, name: str, value: float) -> None:
        self._events.emit("metric", name=name, value=value, step=self._meter.step, epoch=self._meter.epoch)

    def _warn(self, message: str) -> None:
        self._events.emit("warning", message=message)
